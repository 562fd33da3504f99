"""lora-fs: a filesystem-backed LoRA adapter registry for vLLM, and its sidecar."""

__version__ = "0.1.0"
