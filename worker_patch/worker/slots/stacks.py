"""vLLM's own stacks, for its own kernels, filled from an adapter's one block of memory.

vLLM keeps an adapter as a tensor a matrix: it converts, scales and page-locks each by itself, which
holds the interpreter's lock for milliseconds, and zeroes each stack before it fills it. Here one
call packs them all, and zeroes a slot only if its next adapter writes to other places than its last. On
a GPU the block goes there when a request wants the adapter, and one launch fills a slot from it.
Source: vllm/lora/layers/base_linear.py and column_parallel_linear.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.utils.torch_utils import PIN_MEMORY

from lora_fs.kernels.memory.landing import NOTHING, Landing, Piece
from lora_fs.kernels.weights.layout import Layer
from lora_fs.kernels.weights.slabs import ALIGN_BYTES, Place, Slab
from lora_fs.worker_patch.worker.slots.layers import ModelLayers, Target, enough, shape_of


class StackedLayers(ModelLayers):
    """The linear layers, which stay as they are; vLLM sets the others."""

    _finished = True
    copies = True

    def __init__(
        self, slots: int, max_rank: int, dtype: torch.dtype, device_bytes: int | None = None
    ) -> None:
        super().__init__(slots, max_rank, dtype)
        self._copied_from, self._device_bytes = PIN_MEMORY, device_bytes
        self._written: list[Mapping[str, Place] | None] = [None] * slots  # where, since it was last zeroed
        self._landing: Landing | None = None

    def take_over(self, name: str, module: Any) -> bool:
        """Fill its stacks from now on; False if it is of another kind."""
        shape = shape_of(module) if isinstance(module, BaseLinearLayerWithLoRA) else None
        if shape is None:
            return False
        self.targets[name] = Target(module, shape, writes_cache=False, layer=Layer.empty(shape, 0))
        return True

    def allocate(self) -> None:
        """Have room on the device beside the slots: for an adapter of the largest rank at least."""
        stacks = [stack for target in self.targets.values() for stack in _stacks(target.module)]
        if self._lands(stacks):
            least = sum(stack[0].nbytes + ALIGN_BYTES for stack in stacks)
            size = enough(self._device_bytes, least, "an adapter of the largest rank")
            self._landing, self.lands = Landing(stacks, size, self._pieces), True

    def _lands(self, stacks: list[torch.Tensor]) -> bool:
        """Whether adapters have a way to go."""
        return all(stack.is_cuda for stack in stacks)

    def bring(self, adapter: Slab) -> None:
        if self._landing is not None:
            self._landing.bring(adapter)

    def drop(self, adapter: Slab) -> None:
        if self._landing is not None:
            self._landing.drop(adapter)

    def fill(self, slot: int, adapter: Slab) -> None:
        if self._landing is not None:
            alike = self._written[slot] is adapter.places
            self._landing.fill(slot, adapter, whole=not alike)
            self._written[slot] = adapter.places
            return
        if self._written[slot] is not adapter.places:  # as it is of all that are alike
            for target in self.targets.values():
                target.module.reset_lora(slot)
            self._written[slot] = adapter.places
        pairs = list(self._pairs(slot, adapter))
        if pairs:
            stacks, weights = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(stacks, weights, non_blocking=True)

    def _pairs(self, slot: int, adapter: Slab) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A slot's part of each stack that the adapter has weights for, and the weights."""
        for name, packed in adapter.views.items():
            module, begin = self.targets[name].module, 0
            for part, (b, rank) in enumerate(zip(packed.b, packed.ranks, strict=True)):
                if b is None:
                    continue
                a, rows = packed.a.narrow(0, begin, rank), b.T
                yield module.lora_a_stacked[part][slot, 0, :rank, : a.shape[1]], a
                yield module.lora_b_stacked[part][slot, 0, : rows.shape[0], :rank], rows
                begin += rank

    def _pieces(self, adapter: Slab) -> Iterator[Piece]:
        """The same as a part of the adapter's block for each stack, in the order of ``_stacks``."""
        for name, target in self.targets.items():
            packed, begin = adapter.views.get(name), 0
            for part, width in enumerate(target.shape.outputs):
                b = None if packed is None else packed.b[part]
                if packed is None or b is None:
                    yield from (NOTHING, NOTHING)
                    continue
                rank, inputs = packed.ranks[part], target.shape.inputs
                yield Piece(packed.a.storage_offset() + begin * inputs, rank, inputs)
                yield Piece(b.storage_offset(), width, rank)
                begin += rank

    def empty(self, slot: int) -> None:
        """Let the old weights stay: nothing reads them until another adapter takes the slot."""

    def restore(self) -> None:
        self._written = [None] * len(self._written)
        if self._landing is not None:
            self._landing.lose()


def _stacks(module: Any) -> Iterator[torch.Tensor]:
    """Yield the stacks of A and of B, slice by slice."""
    for pair in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True):
        yield from pair
