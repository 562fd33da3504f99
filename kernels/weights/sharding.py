"""One engine's part of an adapter under tensor parallelism. Pure; no engine talks to another here.

A column-parallel layer (q, k, v, gate, up) has its outputs divided: A is every engine's, B is cut by
its outputs, and the engines' outputs stand side by side. A row-parallel one (o, down) has its inputs
divided: A is cut along K, and B is every engine's. The sum that the base layer needs anyway adds the outputs
up, too. So LoRA adds no communication. Source: S-LoRA,
arXiv:2311.03285, with the cut of vLLM 0.32's ``lora/layers`` where it differs: there z is
never gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lora_fs.kernels.weights.layout import Packed, Shape, ShapeError, check_packed
from lora_fs.kernels.weights.slabs import Weights

# Of each output slice, what it may not be cut through: its heads, or None where any column will do.
Heads = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Shard:
    """Engine ``index`` of ``count``."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard {self.index} of {self.count}")


def column_shape(shape: Shape, shard: Shard, heads: Heads | None = None) -> Shape:
    """The shape of a shard of a column-parallel layer.

    Args:
        heads: of each slice. A slice of fewer heads than shards is cut into its heads, and each is
            held by as many shards as it takes: of 2 heads and 8 shards, the first four hold the first.
    Raises:
        ShapeError: a slice cannot be cut into equal parts; says which.
    """
    return Shape(
        shape.inputs, tuple(end - begin for begin, end in column_bounds(shape, shard, heads)), shape.lookup
    )


def column_weights(shape: Shape, weights: Weights, shard: Shard, heads: Heads | None = None) -> Weights:
    """A shard of PEFT-shaped weights, as views: A whole, the rows of B that give its outputs.

    Raises:
        ShapeError: as ``column_shape``; or a B has another number of rows than its slice.
    """
    _check_slices(shape, weights)
    cut = []
    for index, (b, (begin, end)) in enumerate(
        zip(weights.b, column_bounds(shape, shard, heads), strict=True)
    ):
        if b is not None and b.shape[0] != shape.outputs[index]:
            raise ShapeError(
                f"B of slice {index} has {b.shape[0]} rows, and the layer {shape.outputs[index]}"
            )
        cut.append(None if b is None else b[begin:end])
    return Weights(weights.a, cut, weights.scale)


def column_packed(shape: Shape, packed: Packed, shard: Shard, heads: Heads | None = None) -> Packed:
    """A shard of packed weights: the same A, the columns of B that are its outputs, contiguous.

    Raises:
        ShapeError: as ``column_shape``; or the weights are for another shape.
    """
    check_packed(shape, packed)
    bounds = column_bounds(shape, shard, heads)
    b = tuple(
        None if b is None else b[:, begin:end].contiguous()
        for b, (begin, end) in zip(packed.b, bounds, strict=True)
    )
    return Packed(packed.a, b, packed.ranks, packed.scale)


def column_bounds(shape: Shape, shard: Shard, heads: Heads | None = None) -> list[tuple[int, int]]:
    """Where a shard's outputs begin and end within each slice of the whole layer."""
    of_slices = [None] * len(shape.outputs) if heads is None else list(heads)
    if len(of_slices) != len(shape.outputs):
        raise ShapeError(f"the heads of {len(of_slices)} slices for a layer of {len(shape.outputs)}")
    return [
        _bounds(f"slice {index}", width, shard, count)
        for index, (width, count) in enumerate(zip(shape.outputs, of_slices, strict=True))
    ]


def row_shape(shape: Shape, shard: Shard) -> Shape:
    """The shape of a shard of a row-parallel layer.

    Raises:
        ShapeError: the inputs cannot be cut into equal parts, or are an embedding's vocabulary, of
            which an engine holds a part by leaving tokens out.
    """
    begin, end = row_bounds(shape, shard)
    return Shape(end - begin, shape.outputs)


def row_weights(shape: Shape, weights: Weights, shard: Shard) -> Weights:
    """A shard of PEFT-shaped weights, as views: the columns of A that take its inputs, B whole.

    Raises:
        ShapeError: as ``row_shape``; or an A has other inputs than the layer.
    """
    _check_slices(shape, weights)
    begin, end = row_bounds(shape, shard)
    for a in weights.a:
        if a is not None and a.shape[1] != shape.inputs:
            raise ShapeError(f"A has {a.shape[1]} inputs, and the layer {shape.inputs}")
    return Weights([None if a is None else a[:, begin:end] for a in weights.a], weights.b, weights.scale)


def row_packed(shape: Shape, packed: Packed, shard: Shard) -> Packed:
    """A shard of packed weights: the columns of A that take its inputs, contiguous, and the same B.

    Raises:
        ShapeError: as ``row_shape``; or the weights are for another shape.
    """
    check_packed(shape, packed)
    begin, end = row_bounds(shape, shard)
    return Packed(packed.a[:, begin:end].contiguous(), packed.b, packed.ranks, packed.scale)


def row_bounds(shape: Shape, shard: Shard) -> tuple[int, int]:
    """Where a shard's inputs begin and end within the whole layer's."""
    if shape.lookup:
        raise ShapeError("an embedding's vocabulary is not cut along A")
    return _bounds("the inputs", shape.inputs, shard, None)


def row_inputs(x: torch.Tensor, shape: Shape, shard: Shard) -> torch.Tensor:
    """The columns of ``x [T, K]`` that a shard of a row-parallel layer has, as a view."""
    begin, end = row_bounds(shape, shard)
    return x[:, begin:end]


def _bounds(name: str, width: int, shard: Shard, heads: int | None) -> tuple[int, int]:
    parts = shard.count if heads is None else min(heads, shard.count)
    if width % parts or shard.count % parts or (heads is not None and (heads % parts or width % heads)):
        of_heads = "" if heads is None else f" of {heads} heads"
        raise ShapeError(f"{name}: {width} columns{of_heads} for {shard.count} shards")
    size = width // parts
    begin = shard.index * parts // shard.count * size
    return begin, begin + size


def _check_slices(shape: Shape, weights: Weights) -> None:
    if not len(weights.a) == len(weights.b) == len(shape.outputs):
        raise ShapeError(
            f"{len(weights.a)} A and {len(weights.b)} B for a layer of {len(shape.outputs)} slices"
        )
