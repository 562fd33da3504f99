"""Rules for ``adapter_config.json``: its fields, its patterns, and features that vLLM does not serve."""
