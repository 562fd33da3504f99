"""vLLM's punica wrappers with ``kernels`` under them, for the layers that ``layers`` took over.

Each step computes once which rows belong to which slot. Rows without an adapter are in no
product; vLLM 0.32 gives them the last slot's delta on a CPU, where -1 says *no adapter* and indexes
(fixed in 0.33, PR #48421). Source: vllm/lora/punica_wrapper, 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_fs.kernels.backends import backend, warm_up
from lora_fs.kernels.segments import NO_SLOT, Plan, plan_one, plan_rows, plan_segments, runs_of
from lora_fs.sidecar.settings import load_settings
from lora_fs.worker_patch.worker.slots.layers import Target

logger = logging.getLogger(__name__)

NOBODY = plan_rows(np.zeros(0, dtype=np.int64))


def check_whole_steps(vllm_config: Any) -> None:
    """Raise ValueError where vLLM computes a step in parts: its mapping is the whole step's.

    vLLM's own kernels give the second part's rows the adapters of the first's.
    """
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            "vLLM computes each part of a step with the adapters of its first rows where a step is cut "
            "(--enable-dbo, --ubatch-size): start it without these options, or without --enable-lora"
        )


class Planned(PunicaWrapperBase):  # type: ignore[misc]
    """What is the same on every device.

    Attributes:
        tokens: the plan of the step's rows; sampled: the plan of its sampled rows.
        theirs: some layers stayed vLLM's own, and need its metadata as well.
        sampled_is_next: nothing asked for the step's logits yet. vLLM asks for those of the sampled rows
            first, then for those of one prompt after the other.
    """

    sampled_is_next = True

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device=device, **kwargs)
        # Imported now and not before: when vLLM 0.32's worker starts on a CPU it looks through all modules
        # there are (``triton_utils/dispatcher.py``), and fails at llvmlite, which numba stands on.
        self.ops = backend(load_settings().kernels, device)
        self.tokens, self.sampled = NOBODY, NOBODY
        self.theirs = True

    def prepare(self, rows: torch.dtype, captured: int = 0) -> frozenset[torch.dtype]:
        """Make the kernels ready for rows of a type; returns which weights they read as they are.

        Never uses an ``auto`` choice that does not compile here: better slower than not at all.

        Args:
            captured: the rows of the largest batch that gets a CUDA graph.
        """
        try:
            return warm_up(self.ops, rows)
        except Exception:
            if load_settings().kernels != "auto":
                raise
            logger.exception("the kernels cannot be compiled for this processor: torch's products are used")
            self.ops = backend("torch", "cpu")
            return frozenset()

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        slots = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        self.tokens = _plan(mapping.index_mapping, slots)
        decode = mapping.prompt_mapping == mapping.index_mapping
        self.sampled = self.tokens if decode else _plan(mapping.prompt_mapping, slots)
        if self.theirs:
            mapping = in_slots(mapping, lora_index_to_id)
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)

    def plan_of_logits(self, rows: int) -> Plan:
        """The plan of the sampled rows, or of one prompt's: told apart by their turn, not their number."""
        is_sampled, self.sampled_is_next = self.sampled_is_next, False
        return self.sampled if is_sampled and rows == self.sampled.rows else of_prompt(self.sampled, rows)

    def bind(self, path: str, target: Target) -> Any:
        """What one layer calls in the place of this; ``path``: the layer's in the model."""
        return Bound(self, target)

    def warm(self, targets: Iterable[Target]) -> None:
        """Have ready what the first steps of these layers need; ``prepare`` did on a CPU."""

    def guard_cache(self, y: torch.Tensor) -> None:
        """Look after what goes to the KV cache."""


class OnCPU(Planned, PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's attention on the CPU multiplies a recycled KV block's values by zero, which leaves
    NaN where a NaN was: one adapter's overflow would end in its neighbours' answers. So this writes none.
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


class Bound:
    """A wrapper as one layer sees it. The scale is the adapter's; vLLM's is always 1."""

    def __init__(self, wrapper: Planned, target: Target) -> None:
        self._wrapper, self._target = wrapper, target

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """Add each row's delta to ``y [T, N]``, or put it there."""
        if self._wrapper.tokens.segments:
            y, x, plan = _within(self._wrapper.tokens, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]))
            self._wrapper.ops.linear(y, x, self._target.layer, plan, add=add_inputs)
            if self._target.writes_cache:
                self._wrapper.guard_cache(y)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The same for the sampled rows; ``y`` may be padded on its right."""
        if self._wrapper.sampled.segments:
            x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            plan = self._wrapper.plan_of_logits(x.shape[0])
            self._wrapper.ops.linear(y.narrow(1, 0, self._target.shape.width), x, self._target.layer, plan)

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor) -> None:
        """What ``layers`` calls in the place of vLLM's embedding, which indexes padded stacks."""
        if self._wrapper.tokens.segments:
            y, tokens, plan = _within(self._wrapper.tokens, y.view(-1, y.shape[-1]), tokens.view(-1))
            self._wrapper.ops.embedding(y, tokens, self._target.layer, plan)


def _plan(ids: Sequence[int], slots: Mapping[int, int]) -> Plan:
    """``ids``: the adapter of each row, 0 without one. One without a slot runs as the base model."""
    if ids and ids.count(ids[0]) == len(ids):
        return plan_one(slots.get(ids[0], NO_SLOT), len(ids))
    of_rows = np.asarray(ids, dtype=np.int64)
    begins, lengths = runs_of(of_rows)
    of_runs = [slots.get(adapter, NO_SLOT) for adapter in of_rows[begins].tolist()]
    return plan_segments(np.array(of_runs, dtype=np.int64), lengths)


def in_slots(mapping: Any, lora_index_to_id: Sequence[int | None]) -> Any:
    """A mapping for vLLM's own metadata: an adapter without a slot, which ends a step there, is none."""
    rows = mapping.index_mapping, mapping.prompt_mapping
    lost = {adapter for one in rows for adapter in {*one} if adapter > 0 and adapter not in lora_index_to_id}
    if not lost:
        return mapping
    found = copy(mapping)
    found.index_mapping, found.prompt_mapping = (
        tuple(0 if adapter in lost else adapter for adapter in one) for one in rows
    )
    return found


def of_prompt(plan: Plan, rows: int) -> Plan:
    """The plan of a whole prompt's rows, in a batch with that plan: for its log-probabilities vLLM asks for
    the logits of one request's tokens, and does not say whose. With one adapter in the batch they are its.
    """
    only = len(plan.segments) == 1 and plan.segments[0].rows == plan.rows
    return plan_rows(np.full(rows, plan.segments[0].slot if only else NO_SLOT))


def _within(plan: Plan, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    """The planned rows: a batch may be padded, and a layer may get only its beginning."""
    rows = x.shape[0]
    if rows == plan.rows:
        return y, x, plan
    if rows > plan.rows:
        return y.narrow(0, 0, plan.rows), x.narrow(0, 0, plan.rows), plan
    of_rows = np.full(plan.rows, NO_SLOT)
    for slot, start, count in plan.segments:
        of_rows[plan.order[start : start + count]] = slot
    return y, x, plan_rows(of_rows[:rows])
