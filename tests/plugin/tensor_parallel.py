"""A tensor-parallel world of which one rank's layers are built, without the others."""

from __future__ import annotations

import pytest
from vllm.lora.layers import logits_processor
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Let vLLM's layers that are built from now on be one rank's."""
    for module in (linear, parameter, vocab_parallel_embedding, logits_processor):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
