"""Nothing: it lets ``vllm.vllm_flash_attn`` be imported, where the attention is Triton's."""
