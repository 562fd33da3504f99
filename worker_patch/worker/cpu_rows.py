"""On a CPU: base rows stay base rows, and an adapter's overflow stays its own.

vLLM 0.32 gives rows without an adapter the last slot's delta in a mixed batch: -1 says *no adapter*
and indexes the last slot (vllm/lora/ops/torch_ops/lora_ops.py; fixed upstream in 0.33, PR #48421).
And its attention multiplies what a recycled KV block still holds by zero, which leaves NaN where a
NaN was: one adapter's overflow would end in its neighbours' answers. None is written to the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

NONE = -1


class BaseRowsCPU(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper; a row without an adapter shrinks to zero, so that nothing is added to it."""

    _without: torch.Tensor | None = None  # which rows of this batch have no adapter; None if all have

    _kv_slices: frozenset[int] = frozenset({1, 3})

    def watch(self, modules: Iterable[Any]) -> None:
        """Learn which layers write to the KV cache: the packed q, k and v where there are such."""
        packed = any(len(getattr(module, "lora_a_stacked", ())) == 3 for module in modules)
        self._kv_slices = frozenset({3}) if packed else BaseRowsCPU._kv_slices

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        rows = self.token_lora_indices == NONE
        self._without = rows if bool(rows.any()) else None

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """vLLM's sums by vLLM's ops, with the rows' indices as they are, not made anew in each of them."""
        if self.is_prefill and self.no_lora:
            return
        x, y, offset = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), 0
        indices = self.token_lora_indices
        for lora_a, lora_b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            shrunk = torch.empty((x.size(0), lora_b.size(-1)), dtype=torch.float32, device=x.device)
            bgmv_shrink(x, lora_a, shrunk, indices, scale)
            if self._without is not None:
                shrunk[self._without] = 0
            bgmv_expand_slice(shrunk, lora_b, y, indices, offset, width, add_inputs)
            offset += width
        if len(output_slices) in self._kv_slices:
            y.nan_to_num_()

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        if self._without is not None:
            x = x.masked_fill(self._without.unsqueeze(-1), 0)
        super().add_lora_embedding(y, x, lora_b_stacked, add_inputs, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        rows = self.sampler_indices == NONE
        base = y[rows]
        super().add_lora_logits(y, *args, **kwargs)
        y[rows] = base
