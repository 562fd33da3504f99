"""An adapter in host memory: how vLLM's reader makes it, its parts, and its size.

The weights of layers that lora-fs took over go into one slab, whatever the files' dtype. The rest is vLLM's
own, converted as vLLM does. Source: vllm/lora/lora_model.py and model_manager.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from lora_fs.kernels.memory.host import HostMemory
from lora_fs.kernels.memory.pinned import PinnedMemory
from lora_fs.kernels.weights.slabs import ALIGN_BYTES, Slab
from lora_fs.worker_patch.versions.differences import modules_to_save


class Resident(LoRAModel):  # type: ignore[misc]
    """An adapter in the host tier.

    Attributes:
        slab: its weights for the layers that lora-fs took over; ``loras`` has the rest.
        memory: where it is, the rest in one piece. vLLM reads views of the file, which may change or go.
        alike: packed as another of its kind.
    """

    def __init__(
        self, adapter: LoRAModel, slab: Slab, memory: HostMemory | PinnedMemory, *, alike: bool = False
    ) -> None:
        taken = slab.places
        rest = {name: weights for name, weights in adapter.loras.items() if name not in taken}
        super().__init__(adapter.id, adapter.rank, rest, adapter.is_3d_lora_weight)
        self.modules_to_save = modules_to_save(adapter)
        self.slab, self.memory, self.alike = slab, memory, alike
        self._move(memory)

    def alias(self, adapter: int) -> Resident:
        """The same weights, in the same memory, as another adapter's."""
        other = copy(self)
        other.id, other.slab = adapter, replace(self.slab)  # the device knows a slab by its identity
        return other

    def _move(self, memory: HostMemory | PinnedMemory) -> None:
        """Copy the rest to one piece of ``memory``."""
        rest = list(_rest(self))
        ends = [*accumulate(_aligned(tensor.nbytes) for tensor in rest)]
        piece = memory.empty(ends[-1] if ends else 0, torch.uint8)
        begins = zip(rest, [0, *ends], strict=False)
        there = {id(one): piece[at : at + one.nbytes].view(one.dtype).view(one.shape) for one, at in begins}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return there[id(tensor)].copy_(tensor)

        _change(self.loras.values(), move)
        for full in self.modules_to_save.values():
            full.weight, full.bias = _each(full.weight, move), _each(full.bias, move)


class AsOnDisk(LoRAModel):  # type: ignore[misc]
    """vLLM's reader, without its conversions: packing does them, together with its copy.

    Attributes:
        tensors: by the file's names, what it was made of.
    """

    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> LoRAModel:
        model = super().from_lora_tensors(lora_model_id, tensors, *args, **{**kwargs, "dtype": None})
        model.tensors = tensors
        return model


def convert(weights: Iterable[LoRALayerWeights], dtype: torch.dtype) -> None:
    """Give weights the engine's type, as vLLM does before it computes anything with them."""
    _change(weights, lambda tensor: tensor.to(dtype))


def size_bytes(lora: Resident) -> int:
    """What its tensors take in host memory."""
    rest = sum(_aligned(tensor.nbytes) for tensor in _rest(lora))
    return lora.memory.taken_bytes(lora.slab.data.nbytes) + lora.memory.taken_bytes(rest)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _rest(lora: Resident) -> Iterable[torch.Tensor]:
    for weights in lora.loras.values():
        for part in (weights.lora_a, weights.lora_b):
            yield from (t for t in (part if isinstance(part, list) else [part]) if t is not None)
    for full in lora.modules_to_save.values():
        yield from (t for t in (full.weight, full.bias) if t is not None)


def _change(weights: Iterable[LoRALayerWeights], work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for one in weights:
        one.lora_a, one.lora_b = _each(one.lora_a, work), _each(one.lora_b, work)


def _each(part: Any, work: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``work`` to each slice of a layer's A or B; None stays None."""
    if isinstance(part, list):
        return [_each(one, work) for one in part]
    return part if part is None else work(part)
