"""vLLM's punica wrappers with ``kernels`` under them, for the layers that ``layers`` took over.

What is worked out once a step: which rows belong to which slot. Rows without an adapter are in no
product; vLLM 0.32 gives them the last slot's delta on a CPU, where -1 says *no adapter* and indexes
(fixed in 0.33, PR #48421). Source: vllm/lora/punica_wrapper, 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_fs.kernels.backends import backend
from lora_fs.kernels.layout import Layer
from lora_fs.kernels.segments import NO_SLOT, Plan, plan_rows, plan_segments
from lora_fs.sidecar.settings import load_settings
from lora_fs.worker_patch.worker.layers import Target

NOBODY = plan_rows(np.zeros(0, dtype=np.int64))


class Planned(PunicaWrapperBase):  # type: ignore[misc]
    """The part that is the same on every device.

    Attributes:
        theirs: some layers stayed vLLM's own, and need its metadata as well.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device=device, **kwargs)
        self._ops = backend(load_settings().kernels, device)
        self._tokens, self._sampled = NOBODY, NOBODY
        self.theirs = True

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        slots = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        self._tokens = _plan(mapping.index_mapping, slots)
        self._sampled = _plan(mapping.prompt_mapping, slots)
        if self.theirs:
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)

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
        """Add each row's delta to ``y``: the scale is the adapter's, vLLM's is always 1."""
        target: Target | None = getattr(lora_a_stacked, "target", None)
        if target is None:
            super().add_lora_linear(
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, add_inputs=add_inputs, **kwargs
            )
        elif self._tokens.segments:
            x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            y, x, plan = _within(self._tokens, y, x)
            self._ops.linear(y, x, target.layer, plan, add=add_inputs)
            if target.writes_cache:
                self.guard_cache(y)

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        target: Target | None = getattr(lora_a_stacked, "target", None)
        if target is None:
            super().add_lora_logits(y, x, lora_a_stacked, *args, **kwargs)
        elif self._sampled.segments:
            x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            plan = _of_prompt(self._sampled, x.shape[0])
            self._ops.linear(y.narrow(1, 0, target.layer.shape.width), x, target.layer, plan)

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor, layer: Layer) -> None:
        """What ``layers`` calls in the place of vLLM's embedding, which indexes padded stacks."""
        if self._tokens.segments:
            y, tokens, plan = _within(self._tokens, y.view(-1, y.shape[-1]), tokens.view(-1))
            self._ops.embedding(y, tokens, layer, plan)

    def guard_cache(self, y: torch.Tensor) -> None:
        """Look after what goes to the KV cache."""


class OnCPU(Planned, PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's attention on the CPU multiplies what a recycled KV block still holds by zero, which leaves
    NaN where a NaN was: one adapter's overflow would end in its neighbours' answers. None is written.
    """

    def guard_cache(self, y: torch.Tensor) -> None:
        y.nan_to_num_()

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **kwargs: Any
    ) -> None:
        """For layers that stayed vLLM's own: rows without an adapter shrink to zero."""
        super().add_shrink(y, x, lora_a_stacked, scale, **kwargs)
        without = self.token_lora_indices == NO_SLOT
        for one in y:
            one[without] = 0


def _plan(ids: Sequence[int], slots: Mapping[int, int]) -> Plan:
    """``ids``: the adapter of each row, 0 without one."""
    of_rows = np.asarray(ids, dtype=np.int64)
    edges = np.flatnonzero(np.diff(of_rows, prepend=-1))
    of_runs = [slots[adapter] if adapter > 0 else NO_SLOT for adapter in of_rows[edges].tolist()]
    return plan_segments(np.array(of_runs, dtype=np.int64), np.diff(edges, append=len(of_rows)))


def _of_prompt(plan: Plan, rows: int) -> Plan:
    """The plan of a batch's sampled rows, or of a whole prompt's: for its log-probabilities vLLM asks for
    the logits of one request's tokens, and does not say whose. With one adapter in the batch they are its.
    """
    if rows == plan.rows:
        return plan
    only = len(plan.segments) == 1 and plan.segments[0].rows == plan.rows
    return plan_rows(np.full(rows, plan.segments[0].slot if only else NO_SLOT))


def _within(plan: Plan, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    """The rows that are planned: a batch may be padded, and a layer may be given its beginning."""
    rows = x.shape[0]
    if rows == plan.rows:
        return y, x, plan
    if rows > plan.rows:
        return y.narrow(0, 0, plan.rows), x.narrow(0, 0, plan.rows), plan
    of_rows = np.full(plan.rows, NO_SLOT)
    for slot, start, count in plan.segments:
        of_rows[plan.order[start : start + count]] = slot
    return y, x, plan_rows(of_rows[:rows])
