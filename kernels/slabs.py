"""An adapter as one contiguous piece of memory, laid out as the arena wants it. Pure, on the CPU.

Made wherever the adapter's files are read, in a thread; nothing of the device is touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import torch

from lora_fs.kernels.layout import Packed, Shape, ShapeError
from lora_fs.kernels.rows import RowLayout

# A cache line of the GPU, and a multiple of what a vector load or a TMA transfer wants.
ALIGN_BYTES = 128
HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer of an adapter, in PEFT's shapes.

    Attributes:
        a: for each slice ``[r, K]``; None where the adapter has none.
        b: for each slice ``[N, r]``; None together with ``a``.
    """

    a: Sequence[torch.Tensor | None]
    b: Sequence[torch.Tensor | None]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where one layer's matrices are; offsets in elements, multiples of ``ALIGN_BYTES``.

    Attributes:
        a: of A.
        b: for each slice, of its B; 0 where its rank is 0.
    """

    a: int
    b: tuple[int, ...]
    ranks: tuple[int, ...]
    scale: float

    @property
    def rank(self) -> int:
        return sum(self.ranks)


@dataclass(frozen=True, slots=True)
class Slab:
    """A whole adapter.

    Attributes:
        data: ``[elements]``, a multiple of ``ALIGN_BYTES`` long.
        places: of each layer that the adapter has weights for.
        views: the weights of those of a rank over 0, where they stand in ``data``.
        row: of the tables, ``RowLayout.row``.
    """

    data: torch.Tensor
    places: Mapping[str, Place]
    views: Mapping[str, Packed]
    row: torch.Tensor


def pack_slab(
    shapes: Mapping[str, Shape], adapter: Mapping[str, Weights], dtype: torch.dtype, *, pinned: bool = False
) -> Slab:
    """Lay an adapter out.

    Args:
        shapes: of every layer that may have weights.
        adapter: what the adapter has.
        dtype: of the engine; converted to where the files have another.
        pinned: in page-locked memory, which the device copies from by itself.
    Raises:
        ShapeError: a layer is unknown, or an axis disagrees with its shape; names the layer.
    """
    places: dict[str, Place] = {}
    end = 0
    for name, weights in adapter.items():
        if name not in shapes:
            raise ShapeError(f"{name}: the model has no such layer")
        places[name], end = _place(name, shapes[name], weights, end, dtype.itemsize)
    data = torch.empty(end, dtype=dtype, pin_memory=True) if pinned else _in_huge_pages(end, dtype)
    views: dict[str, Packed] = {}
    for name, weights in adapter.items():
        packed = packed_at(shapes[name], places[name], data)
        if packed is not None:
            _fill(packed, shapes[name], weights)
            views[name] = packed
    layers = (
        (name, [place.a, *place.b], [0, *accumulate(place.ranks)], place.scale)
        for name, place in places.items()
    )
    return Slab(data, places, views, RowLayout.of(shapes).row(layers))


def _in_huge_pages(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system with the tensor, in pages of 2 MiB where the kernel has some.

    The first touch of pages of 4 KiB takes longer than the rest of packing.
    """
    size = elements * dtype.itemsize
    if size < HUGE_PAGE_BYTES:
        return torch.empty(elements, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on Linux, or of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def packed_at(shape: Shape, place: Place, storage: torch.Tensor, begin: int = 0) -> Packed | None:
    """The weights of one layer as views of where they stand; None if all its ranks are 0.

    Args:
        storage: ``[elements]``; the slab stands in it from ``begin`` on.
    """
    if not place.rank:
        return None
    a = storage.narrow(0, begin + place.a, place.rank * shape.inputs)
    return Packed(
        a.view(shape.inputs, place.rank) if shape.lookup else a.view(place.rank, shape.inputs),
        tuple(
            storage.narrow(0, begin + offset, rank * width).view(rank, width) if rank else None
            for offset, rank, width in zip(place.b, place.ranks, shape.outputs, strict=True)
        ),
        place.ranks,
        place.scale,
    )


def _place(name: str, shape: Shape, weights: Weights, end: int, itemsize: int) -> tuple[Place, int]:
    if not len(weights.a) == len(weights.b) == len(shape.outputs):
        raise ShapeError(f"{name}: {len(weights.a)} A and {len(weights.b)} B, of {len(shape.outputs)} slices")
    ranks = []
    for a, b, width in zip(weights.a, weights.b, shape.outputs, strict=True):
        rank = 0 if a is None else a.shape[0]
        wanted = None if a is None else ((rank, shape.inputs), (width, rank))
        found = None if a is None or b is None else (tuple(a.shape), tuple(b.shape))
        if found != wanted or (a is None) != (b is None):
            raise ShapeError(f"{name}: A and B are {found}, and the layer wants {wanted}")
        ranks.append(rank)
    begin = end
    end = _aligned(begin + sum(ranks) * shape.inputs, itemsize)
    offsets = []
    for rank, width in zip(ranks, shape.outputs, strict=True):
        offsets.append(end if rank else 0)
        end = _aligned(end + rank * width, itemsize)
    return Place(begin, tuple(offsets), tuple(ranks), weights.scale), end


def _fill(packed: Packed, shape: Shape, weights: Weights) -> None:
    for (low, high), a, b, target in zip(packed.columns(), weights.a, weights.b, packed.b, strict=True):
        if a is not None and b is not None and target is not None:
            (packed.a[:, low:high].T if shape.lookup else packed.a[low:high]).copy_(a)
            target.copy_(b.T)


def _aligned(offset: int, itemsize: int) -> int:
    items = ALIGN_BYTES // itemsize
    return -(-offset // items) * items
