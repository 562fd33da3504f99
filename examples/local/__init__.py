"""The whole of lora-fs on one machine: a tiny model, real vLLM replicas, a sidecar each.

Imports as ``lora_fs.demo``. What the demo shows and what ``tests/e2e`` checks stand on the
same parts: ``tiny_llama`` makes the model and its adapters, ``engine`` boots vLLM fast,
``process`` owns what was started, ``sidecar`` and ``cli`` run lora-fs as users do. Nothing
of lora-fs itself imports this package.
"""
