"""A block of a model, of vLLM's layers, and what its managers want to know."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from lora_fs.worker_patch.worker.load.resident import Resident, size_bytes
from lora_fs.worker_patch.worker.models import TieredModelManager

Make = Callable[..., TieredModelManager]

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, WORDS = 64, 16, 8, 2, 48, 100
WHOLE = {
    "q_proj": (HIDDEN, HEADS * HEAD),
    "k_proj": (HIDDEN, KV_HEADS * HEAD),
    "v_proj": (HIDDEN, KV_HEADS * HEAD),
    "o_proj": (HEADS * HEAD, HIDDEN),
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
}
SLOTS, RANK = 3, 4
STOCK = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"


class Model(torch.nn.Module):  # type: ignore[misc]
    """A block of a model, of vLLM's layers."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules: ClassVar = {"embed_tokens": "input_embeddings"}
    config = None

    def __init__(self, *, embedding: bool = True) -> None:
        super().__init__()
        if embedding:
            self.embed_tokens = VocabParallelEmbedding(WORDS, HIDDEN)
        self.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=False)
        self.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False)


def vllm_config(captured: int | None = None, additional: Any = None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False),
        model_config=SimpleNamespace(dtype=torch.float32),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=captured),
        additional_config={} if additional is None else additional,
        use_v2_model_runner=False,
        speculative_config=None,
    )


def adapter(number: int, sizes: dict[str, tuple[int, int]] = WHOLE) -> LoRAModel:
    random = torch.Generator().manual_seed(number)
    found = {}
    for name, (inputs, outputs) in sizes.items():
        a = torch.randn(RANK, inputs, generator=random)
        b = torch.randn(outputs, RANK, generator=random)
        found[name] = LoRALayerWeights(name, RANK, RANK, a, b)
    return LoRAModel(number, RANK, found)


def packed(manager: TieredModelManager, lora: LoRAModel) -> Resident:
    """As a load does."""
    return manager.pack(lora, manager.draft(lora))


def serve(manager: TieredModelManager, lora: LoRAModel) -> Resident:
    """Take an adapter in, and let a step use it."""
    resident = packed(manager, lora)
    manager.tiers.budget_bytes += size_bytes(resident)
    manager.admit(resident, size_bytes(resident))
    manager.tiers.begin_step({lora.id})
    manager.activate_adapter(lora.id)
    return resident
