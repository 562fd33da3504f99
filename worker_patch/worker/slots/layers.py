"""The model's LoRA layers as ``kernels`` sees them, in the place of vLLM's padded stacks.

On a CPU a slot refers to an adapter's weights where they are, in host memory: filling it copies
nothing, and no memory is set aside. On a GPU it is a place in an arena, filled by one copy. Layers of
other kinds (experts, classification heads, fully sharded ones) stay vLLM's own.
Source: vllm/lora/layers, 0.32.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights

from lora_fs.kernels.memory.arena import Arena
from lora_fs.kernels.memory.host import HostMemory
from lora_fs.kernels.memory.pinned import PinnedMemory, page_locked
from lora_fs.kernels.weights.layout import Layer, Shape
from lora_fs.kernels.weights.slabs import ALIGN_BYTES, Draft, Slab, Weights
from lora_fs.worker_patch.versions.layers import LINEAR, TAKEN_OVER, whole_outputs
from lora_fs.worker_patch.worker.slots.shares import Part

_CACHED = ("qkv", "k_proj", "v_proj", "kv_a_proj", "kv_b_proj", "query_key_value", "c_attn")


@dataclass(slots=True)
class Target:
    """One layer of the model.

    Attributes:
        writes_cache: its output goes into the KV cache.
    """

    module: Any
    shape: Shape
    writes_cache: bool
    layer: Layer


class ModelLayers:
    """The layers taken over, by name, on a CPU.

    ``read``: the types of weights that may stay what they are.
    """

    _finished = False  # whether packing finishes adapters as ``Outline.of`` has them for padded stacks
    lands = False  # whether an adapter goes to a device's memory before a slot means it
    copies = False  # whether a slot is a copy of what is there
    _copied_from = False  # whether a device copies adapters from host memory

    def __init__(
        self, slots: int, max_rank: int, dtype: torch.dtype, read: Collection[torch.dtype] = ()
    ) -> None:
        self._read = read
        self.memory: HostMemory | PinnedMemory = HostMemory()
        self._slots, self._max_rank, self._dtype = slots, max_rank, dtype
        self.targets: dict[str, Target] = {}

    def take_over(self, name: str, module: Any) -> bool:
        """Let go of a module's stacks, and be in their place; False if it is of another kind."""
        shape = shape_of(module)
        if shape is None:
            return False
        cached = any(part in name.rsplit(".", 1)[-1].lower() for part in _CACHED)
        self.targets[name] = Target(module, shape, cached, Layer.empty(shape, self._slots))
        a = tuple(self._stand_in(self._max_rank, shape.inputs) for _ in shape.outputs)
        b = tuple(self._stand_in(width, self._max_rank) for width in shape.outputs)
        linear = isinstance(module, BaseLinearLayerWithLoRA)
        module.lora_a_stacked, module.lora_b_stacked = (a, b) if linear else (a[0], b[0])
        if shape.lookup:
            module.lora_a_stacked_2d = None
            module.forward = types.MethodType(_embed, module)
        return True

    def _stand_in(self, rows: int, columns: int) -> torch.Tensor:
        """A tensor of a stack's shape, for those who ask for it, without its memory."""
        return torch.zeros(1, dtype=self._dtype).expand(self._slots, 1, rows, columns)

    def allocate(self) -> None:
        """Allocate the memory of the slots, once every layer is taken over."""

    def draft(
        self,
        weights: Mapping[str, LoRALayerWeights],
        scales: Mapping[str, float],
        *,
        whole: bool = True,
    ) -> Draft:
        """Lay an adapter out for one block of memory; any thread may.

        Args:
            weights: by layer, as vLLM read them.
            scales: by layer, alpha / r where it is not in B.
            whole: of the whole model, of which this takes this rank's share; else they are the share.
        Raises:
            ShapeError: names the layer and the axis.
        """
        shapes = {name: target.shape for name, target in self.targets.items()}
        taken = {
            name: _weights(self.targets[name], found, scales.get(name, 1.0), whole=whole)
            for name, found in weights.items()
        }
        return Draft.of(shapes, taken, self._dtype_for(taken), finished=self._finished)

    def pack(self, draft: Draft, memory: HostMemory | None = None) -> Slab:
        """Copy the weights to where the draft has them; any thread may. ``memory``: in place of the own."""
        return draft.slab((memory or self.memory).empty(draft.outline.elements, draft.dtype))

    def lock(self, host_bytes: int) -> None:
        """Have the memory of the host tier page-locked, if a device copies from it: all of it, now.

        Args:
            host_bytes: ``LORA_FS_HOST_BYTES``. An eighth is added for loads that others have yet to make room
                for.
        Raises:
            MemoryError: the system does not lock so much; says what to do.
        """
        if self._copied_from:
            try:
                self.memory = PinnedMemory(host_bytes + host_bytes // 8, page_locked)
            except MemoryError as error:
                raise MemoryError(f"{error}: set a smaller LORA_FS_HOST_BYTES, now {host_bytes}") from error

    def parts(self, names: Callable[[str], Sequence[str]]) -> dict[str, Part]:
        """How much of each layer this rank has.

        Args:
            names: of a layer's slices, as an adapter has them; else of the layer.
        """
        found: dict[str, Part] = {}
        for layer, target in self.targets.items():
            module, shape = target.module, target.shape
            linear = isinstance(module, BaseLinearLayerWithLoRA)
            inputs = module.base_layer.input_size if linear else shape.inputs
            outputs = whole_outputs(module) if linear else shape.outputs
            slices = names(layer)
            if not len(slices) == len(outputs) == len(shape.outputs):  # all are in one matrix
                slices, local, whole = [layer], [shape.width], [sum(outputs)]
            else:
                local, whole = [*shape.outputs], [*outputs]
            for name, here, width in zip(slices, local, whole, strict=True):
                found[name] = Part(shape.inputs + here, inputs + width)
        return found

    def prepare(self, size: int, room: int) -> None:
        """Have memory ready for the next adapter of so many bytes; for a thread with nothing else to do.

        Args:
            room: bytes that it may take.
        """
        self.memory.prepare(size, room)

    def give_back(self) -> None:
        """Keep no memory ready for a next adapter, except what is page-locked for good."""
        self.memory.drop()

    def _dtype_for(self, adapter: Mapping[str, Weights]) -> torch.dtype:
        """The type that an adapter is kept in: of one with weights of several types the engine's."""
        tensors = (t for weights in adapter.values() for t in (*weights.a, *weights.b) if t is not None)
        kinds = {tensor.dtype for tensor in tensors}
        return self.kept(kinds.pop()) if len(kinds) == 1 else self._dtype

    def kept(self, files: torch.dtype) -> torch.dtype:
        """The type that weights of one type are kept in: a narrower one as it is, half the memory to read."""
        narrower = files in self._read and files.itemsize < self._dtype.itemsize
        return files if narrower else self._dtype

    def bring(self, adapter: Slab) -> None:
        """Start to copy an adapter to the device, unless it is there; on a CPU it is where it has to be.

        Raises:
            StorageFullError: there is no room beside those that are there.
        """

    def drop(self, adapter: Slab) -> None:
        """Free an adapter's copy there; no slot means it."""

    def fill(self, slot: int, adapter: Slab) -> None:
        """Let a slot mean an adapter; empties layers that it leaves alone."""
        for name, target in self.targets.items():
            target.layer.put(slot, adapter.views.get(name))

    def empty(self, slot: int) -> None:
        """Let a slot mean nothing, and let go of its weights."""
        for target in self.targets.values():
            target.layer.put(slot, None)

    def restore(self) -> None:
        """Write the parts again that the device gets only once, after its memory was lost."""


class DeviceLayers(ModelLayers):
    """The same, in an arena on the device: a slot is a row of a table. ``bring`` and ``drop`` alone say who
    is in the arena.

    Args:
        device_bytes: of the arena; None: what padded stacks would take, which is the least it may have.
    """

    lands = True

    def __init__(
        self,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        device_bytes: int | None = None,
    ) -> None:
        super().__init__(slots, max_rank, dtype)
        self._device, self._copied_from, self._device_bytes = device, device.type == "cuda", device_bytes
        self._brought: dict[int, Slab] = {}  # by their identity, which is theirs while they are here

    def allocate(self) -> None:
        shapes = {name: target.shape for name, target in self.targets.items()}
        pairs = ((shape.inputs, width) for shape in shapes.values() for width in shape.outputs)
        most = sum(self._max_rank * (k + n) * self._dtype.itemsize + 2 * ALIGN_BYTES for k, n in pairs)
        total = enough(self._device_bytes, self._slots * most, f"{self._slots} adapters of the largest rank")
        self._arena = Arena(shapes, self._slots, total, self._max_rank, self._dtype, self._device)
        for name, target in self.targets.items():
            target.layer = self._arena.layer(name)

    def bring(self, adapter: Slab) -> None:
        if id(adapter) not in self._brought:
            self._arena.begin(id(adapter), adapter)
            self._brought[id(adapter)] = adapter

    def drop(self, adapter: Slab) -> None:
        if self._brought.pop(id(adapter), None) is not None:
            self._arena.free(id(adapter))

    def fill(self, slot: int, adapter: Slab) -> None:
        self.bring(adapter)
        self._arena.show(slot, id(adapter))

    def empty(self, slot: int) -> None:
        self._arena.hide(slot)

    def restore(self) -> None:
        for adapter in list(self._brought.values()):
            self.drop(adapter)
        self._arena.restore()


def enough(wanted: int | None, least: int, what: str) -> int:
    """The bytes of the device's pool.

    Args:
        wanted: ``LORA_FS_DEVICE_BYTES``, if it is set.
        least: what a step may need.
    Raises:
        ValueError: it is less.
    """
    if wanted is not None and wanted < least:
        raise ValueError(
            f"LORA_FS_DEVICE_BYTES is {wanted}, and {what} take {least}: set at least that, leave it out, or "
            "start vLLM with a smaller --max-loras or --max-lora-rank"
        )
    return least if wanted is None else wanted


def shape_of(module: Any) -> Shape | None:
    """The sizes of a layer that lora-fs can take over; None for any other."""
    if type(module) not in TAKEN_OVER:
        return None
    if type(module) in LINEAR:
        return Shape(module.input_size, tuple(module.output_slices))
    base: Any = module.base_layer
    if isinstance(module, LogitsProcessorWithLoRA):
        return Shape(module.hidden_size, (base.vocab_size,))
    return Shape(base.org_vocab_size, (base.embedding_dim,), lookup=True)


def _weights(target: Target, weights: LoRALayerWeights, scale: float, *, whole: bool) -> Weights:
    """This tensor-parallel rank's share of the whole model's, or what is that already."""
    module, a, b = target.module, weights.lora_a, weights.lora_b
    if not isinstance(module, BaseLinearLayerWithLoRA):
        # A vocabulary that vLLM padded is longer than the adapter's.
        if target.shape.lookup and target.shape.inputs > a.shape[1]:
            a = pad(a, (0, target.shape.inputs - a.shape[1]))
        elif not target.shape.lookup and target.shape.width > b.shape[0]:
            b = pad(b, (0, 0, 0, target.shape.width - b.shape[0]))
    elif whole:
        if isinstance(b, list) and len(b) != module.n_slices:
            a, b = module.expand_packed_lora(a, b)
        if getattr(module, "tp_size", 1) > 1:
            a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    return Weights(a, b, scale) if isinstance(a, list) else Weights([a], [b], scale)


def _embed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``VocabParallelEmbeddingWithLoRA.forward``, with A looked up where the adapter is."""
    output = self.base_layer.forward(tokens)
    self.punica_wrapper.add_embedding(output, tokens)
    return output
