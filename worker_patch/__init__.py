"""The vLLM plugin: the registry inside the API server, adapter slots inside the worker.

``plugin`` is what vLLM calls, ``compat`` says on which vLLM; ``api`` runs in the API server,
``worker`` in the engine. Nothing happens unless VLLM_PLUGINS names ``lora_fs``.
"""
