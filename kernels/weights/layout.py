"""What one layer's LoRA weights look like: no padding to a largest rank, ranks along the first axis.

An adapter's layer holds its A as ``[R, K]``, the A of all its output slices stacked, and each
slice's B transposed, ``[r, N]``. So a rank is a number of whole rows. A kernel that stops at a
rank reads whole rows, and reads nothing that is zero by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch


class ShapeError(ValueError):
    """Two axes that have to agree do not; names both."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The layer of the base model.

    Attributes:
        inputs: K, the input features; of an embedding, its vocabulary.
        outputs: N of each output slice: one, three for a packed q, k and v, two for gate and up.
        lookup: an embedding: tokens index A, whose layout is ``[K, R]``.
    """

    inputs: int
    outputs: tuple[int, ...]
    lookup: bool = False

    @property
    def width(self) -> int:
        return sum(self.outputs)


@dataclass(frozen=True, slots=True)
class Packed:
    """One adapter's weights for one layer. Slices of rank 0 have no weights.

    Attributes:
        a: ``[R, K]``, or ``[K, R]`` of an embedding; R is the sum of ``ranks``.
        b: for each slice ``[r, N]``; None where its rank is 0.
        ranks: for each slice.
        scale: the product's factor, alpha / r unless B already contains it.
    """

    a: torch.Tensor
    b: tuple[torch.Tensor | None, ...]
    ranks: tuple[int, ...]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """R, over all slices."""
        return sum(self.ranks)

    def columns(self) -> list[tuple[int, int]]:
        """For each slice, where its ranks begin and end among the R."""
        ends = list(accumulate(self.ranks, initial=0))
        return list(pairwise(ends))


@dataclass(slots=True)
class Layer:
    """One layer of the model with every slot's weights.

    Attributes:
        packed: for each slot; None where the slot is empty or its adapter leaves this layer alone.
        derived: for each slot, what each backend made of its weights for itself; gone with them.
        made: what a backend keeps of the layer as a whole, no weights.
    """

    shape: Shape
    packed: list[Packed | None] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(init=False)
    made: Any = None

    def __post_init__(self) -> None:
        self.derived = [{} for _ in self.packed]

    @classmethod
    def empty(cls, shape: Shape, slots: int) -> Layer:
        return cls(shape, [None] * slots)

    @property
    def widest(self) -> int:
        """The largest R of any slot, 0 if all are empty."""
        return max((packed.rank for packed in self.packed if packed is not None), default=0)

    def put(self, slot: int, packed: Packed | None) -> None:
        """Set or clear a slot.

        Raises:
            ShapeError: the weights are not for this layer.
        """
        if packed is not None:
            check_packed(self.shape, packed)
        self.packed[slot] = packed
        self.derived[slot] = {}


def pack(
    shape: Shape, a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None], scale: float = 1.0
) -> Packed:
    """Pack an adapter's weights for a layer, from PEFT's shapes.

    Args:
        a: for each slice ``[r, K]``; None where the adapter has none.
        b: for each slice ``[N, r]``; None together with ``a``.
    Raises:
        ShapeError: an axis disagrees with ``shape`` or with its counterpart.
    """
    if not len(a) == len(b) == len(shape.outputs):
        raise ShapeError(f"{len(a)} A and {len(b)} B for a layer of {len(shape.outputs)} slices")
    given = [x for x in a if x is not None]
    if not given:
        raise ShapeError("no slice has weights")
    ranks = tuple(0 if x is None else x.shape[0] for x in a)
    stacked = given[0].contiguous() if len(given) == 1 else torch.cat(given)
    if shape.lookup:
        stacked = stacked.T.contiguous()
    packed = Packed(stacked, tuple(None if x is None else x.T.contiguous() for x in b), ranks, scale)
    check_packed(shape, packed)
    return packed


def check_packed(shape: Shape, packed: Packed) -> None:
    """Raise ShapeError unless the weights are for a layer of this shape."""
    expected_a = (shape.inputs, packed.rank) if shape.lookup else (packed.rank, shape.inputs)
    if tuple(packed.a.shape) != expected_a:
        raise ShapeError(f"A is {tuple(packed.a.shape)}, and the layer wants {expected_a}")
    if not len(packed.b) == len(packed.ranks) == len(shape.outputs):
        raise ShapeError(f"{len(packed.b)} B for a layer of {len(shape.outputs)} slices")
    for index, (b, rank, width) in enumerate(zip(packed.b, packed.ranks, shape.outputs, strict=True)):
        found = None if b is None else tuple(b.shape)
        expected = (rank, width) if rank else None
        if found != expected:
            raise ShapeError(f"B of slice {index} is {found}, and the layer wants {expected}")
