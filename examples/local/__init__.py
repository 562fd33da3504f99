"""The whole of lora-fs on one machine: a tiny model, and two real vLLM replicas on one folder.

Imports as ``lora_fs.demo``. The demo and ``tests/e2e`` stand on the same parts, which ``README.md``
lists. Nothing of lora-fs itself imports this package.
"""
