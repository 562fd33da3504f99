"""A vLLM of its own whose model has experts. Prints answers as JSON.

A script of ``test_experts_model``. vLLM has its kernels of experts with adapters for GPUs alone: here one
function of theirs is written in PyTorch, from what its caller gives it, and nothing else is changed.
Arguments: the base model's folder, the prompts as JSON, what the engine is given besides as JSON, then
folders of adapters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

sys.path.append(str(Path(__file__).parents[2]))

from tests.engine.batches import answers


def apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_: object,
    **__: object,
) -> None:
    """``TritonExperts.apply`` for experts of a gate (SiLU), row by row.

    Args:
        output: [rows, hidden]; written.
        hidden_states: [rows, hidden].
        w1: gate and up, [experts, 2 * inner, hidden].
        w2: down, [experts, hidden, inner].
        topk_weights: of the row's experts, [rows, experts of a row].
        topk_ids: which they are, as ``topk_weights``.
    """
    adapters = self._lora_context
    slots = adapters.punica_wrapper.token_lora_indices.tolist()  # -1: no adapter

    def delta(a: Any, b: Any, row: int, expert: int, x: torch.Tensor) -> torch.Tensor | float:
        slot = slots[row]
        if slot < 0 or not adapters.adapter_enabled[slot]:
            return 0.0
        return torch.cat([up[slot, expert] @ (down[slot, expert] @ x) for down, up in zip(a, b, strict=True)])

    for row, x in enumerate(hidden_states):
        answer = torch.zeros_like(x)
        for expert, weight in zip(topk_ids[row].tolist(), topk_weights[row], strict=True):
            of_w13 = delta(adapters.w13_lora_a_stacked, adapters.w13_lora_b_stacked, row, expert, x)
            gate, up = (w1[expert] @ x + of_w13).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            of_w2 = delta(adapters.w2_lora_a_stacked, adapters.w2_lora_b_stacked, row, expert, inner)
            answer += weight * (w2[expert] @ inner + of_w2)
        output[row] = answer


def main(model_dir: str, prompts: str, options: str, *adapters: str) -> None:
    setattr(TritonExperts, "apply", apply)  # noqa: B010
    llm = LLM(
        model_dir,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=16,
        max_model_len=32,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        **json.loads(options),
    )
    print(json.dumps(answers(llm, json.loads(prompts), adapters)))


if __name__ == "__main__":
    main(*sys.argv[1:])
