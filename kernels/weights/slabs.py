"""An adapter as one contiguous piece of memory, laid out as the arena wants it. Pure, on the CPU.

Made by any thread that reads the adapter's files; touches nothing of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from lora_fs.kernels.weights.layout import Packed, Shape, ShapeError
from lora_fs.kernels.weights.rows import RowLayout

# A cache line of the GPU, and a multiple of what a vector load or a TMA transfer wants.
ALIGN_BYTES = 128


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
        b: for each slice, of its B.
    """

    a: int
    b: tuple[int, ...]
    ranks: tuple[int, ...]
    scale: float

    @property
    def rank(self) -> int:
        return sum(self.ranks)


class Strided(NamedTuple):
    """A matrix in a storage, as ``as_strided`` takes it; ``stride`` and ``offset`` in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Matrices(NamedTuple):
    """Where a layer's A is, and of each slice its B; None of one whose rank is 0."""

    a: Strided
    b: tuple[Strided | None, ...]

    def of(self, storage: torch.Tensor, place: Place) -> Packed:
        """As views of ``storage``, whose start the offsets count from."""
        b = tuple(None if one is None else storage.as_strided(*one) for one in self.b)
        return Packed(storage.as_strided(*self.a), b, place.ranks, place.scale)


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


@dataclass(frozen=True, slots=True)
class Outline:
    """The place of everything of an adapter: the same for all of one shape.

    Attributes:
        places: of each layer that the adapter has weights for.
        matrices: of each of them of a rank over 0.
        targets: for each slice that has weights, where its A goes and where its B, transposed.
        factors: the factor of each, to apply once it is there.
        elements: of the slab.
        row: of the tables, ``RowLayout.row``.
    """

    places: Mapping[str, Place]
    matrices: Mapping[str, Matrices]
    targets: tuple[Strided, ...]
    factors: tuple[float, ...]
    elements: int
    row: torch.Tensor

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Shape],
        adapter: Mapping[str, Weights],
        itemsize: int,
        *,
        finished: bool = False,
    ) -> Outline:
        """Lay an adapter out.

        Args:
            finished: each B as a padded stack takes it: by its rows, ``[N, r]``, and times the scale.
        Raises:
            ShapeError: a layer is unknown, or an axis disagrees with its shape; names the layer.
        """
        places: dict[str, Place] = {}
        end = 0
        for name, weights in adapter.items():
            if name not in shapes:
                raise ShapeError(f"{name}: the model has no such layer")
            left = 1.0 if finished else weights.scale
            places[name], end = _place(name, shapes[name], weights, left, end, itemsize)
        used = {name: place for name, place in places.items() if place.rank}
        matrices = {name: _matrices(shapes[name], place, by_rows=finished) for name, place in used.items()}
        targets: list[Strided] = []
        factors: list[float] = []
        for name, found in matrices.items():
            of_layer = list(_targets(shapes[name], places[name], found))
            targets += of_layer
            factors += (1.0, adapter[name].scale if finished else 1.0) * (len(of_layer) // 2)
        layers = (
            (name, [place.a, *place.b], [0, *accumulate(place.ranks)], place.scale)
            for name, place in places.items()
        )
        row = RowLayout.of(shapes).row(layers)
        return cls(places, matrices, tuple(targets), tuple(factors), end, row)


@dataclass(frozen=True, slots=True)
class Draft:
    """All that packing an adapter comes to: ``sources``, in the order of the targets, as ``dtype``."""

    outline: Outline
    dtype: torch.dtype
    sources: Sequence[torch.Tensor]

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Shape],
        adapter: Mapping[str, Weights],
        dtype: torch.dtype,
        *,
        finished: bool = False,
    ) -> Draft:
        """Lay an adapter out; arguments and errors as ``Outline.of`` has them."""
        outline = Outline.of(shapes, adapter, dtype.itemsize, finished=finished)
        sources = (
            source
            for name, weights in adapter.items()
            for a, b in zip(weights.a, weights.b, strict=True)
            if a is not None and b is not None
            for source in (a.T if shapes[name].lookup else a, b.T)
        )
        return cls(outline, dtype, tuple(source for source in sources if source.numel()))

    def slab(self, data: torch.Tensor) -> Slab:
        """Copy the weights to ``data``, all in one call: the interpreter's lock is others' meanwhile.

        Scales the unfinished parts there, one call for each scale.

        Args:
            data: ``[outline.elements]`` of ``dtype``, a storage of its own.
        """
        outline = self.outline
        views = {name: found.of(data, outline.places[name]) for name, found in outline.matrices.items()}
        if self.sources:
            targets = self._targets(data)
            torch._foreach_copy_(targets, list(self.sources))
            for factor in set(outline.factors) - {1.0}:
                its = [one for one, of_it in zip(targets, outline.factors, strict=True) if of_it == factor]
                # A plain number would be rounded to their type.
                torch._foreach_mul_(its, torch.tensor(factor, dtype=torch.float64))
        return Slab(data, outline.places, views, outline.row)

    def is_in(self, slab: Slab) -> bool:
        """Whether a slab of this outline holds these weights."""
        found = zip(self._targets(slab.data), self.sources, self.outline.factors, strict=True)
        return all(torch.equal(target, source.to(self.dtype) * factor) for target, source, factor in found)

    def _targets(self, data: torch.Tensor) -> list[torch.Tensor]:
        return [data.as_strided(*target) for target in self.outline.targets]


def pack_slab(
    shapes: Mapping[str, Shape], adapter: Mapping[str, Weights], dtype: torch.dtype, *, pinned: bool = False
) -> Slab:
    """Lay an adapter out, and copy it there.

    Args:
        shapes: of every layer that may have weights.
        adapter: what the adapter has.
        dtype: of the engine; converted to where the files have another.
        pinned: in page-locked memory, which the device copies from by itself.
    Raises:
        ShapeError: a layer is unknown, or an axis disagrees with its shape; names the layer.
    """
    draft = Draft.of(shapes, adapter, dtype)
    return draft.slab(torch.empty(draft.outline.elements, dtype=dtype, pin_memory=pinned))


def packed_at(shape: Shape, place: Place, storage: torch.Tensor, begin: int = 0) -> Packed | None:
    """The weights of one layer as views of where they stand; None if all its ranks are 0.

    Args:
        storage: ``[elements]``; the slab stands in it from ``begin`` on.
    """
    return _matrices(shape, place, begin).of(storage, place) if place.rank else None


def _matrices(shape: Shape, place: Place, begin: int = 0, *, by_rows: bool = False) -> Matrices:
    rank, inputs = place.rank, shape.inputs
    a = (inputs, rank) if shape.lookup else (rank, inputs)
    b = (
        Strided((one, width), (1, one) if by_rows else (width, 1), begin + offset) if one else None
        for offset, one, width in zip(place.b, place.ranks, shape.outputs, strict=True)
    )
    return Matrices(Strided(a, (a[1], 1), begin + place.a), tuple(b))


def _place(
    name: str, shape: Shape, weights: Weights, scale: float, end: int, itemsize: int
) -> tuple[Place, int]:
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
        offsets.append(end)
        end = _aligned(end + rank * width, itemsize)
    return Place(begin, tuple(offsets), tuple(ranks), scale), end


def _targets(shape: Shape, place: Place, found: Matrices) -> Iterator[Strided]:
    """For each slice that has weights, the place of its A among the layer's, and of its B."""
    (rows, columns), stride, begin = found.a
    for low, rank, b in zip(accumulate(place.ranks, initial=0), place.ranks, found.b, strict=False):
        if b is not None:
            part = (rows, rank) if shape.lookup else (rank, columns)
            yield Strided(part, stride, begin + (low if shape.lookup else low * columns))
            yield b


def _aligned(offset: int, itemsize: int) -> int:
    items = ALIGN_BYTES // itemsize
    return -(-offset // items) * items
