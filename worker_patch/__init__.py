"""The vLLM plugin, which is not written yet: importing this package does nothing.

It will resolve adapters from the registry inside vLLM's API server and manage adapter slots in
its workers. No entry point names it, so installing lora-fs changes nothing in a vLLM.
"""
