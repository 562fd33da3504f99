"""Where a layer's weights are, in tables that a kernel on the device can read.

A kernel gets a slot and finds there the offset of A and of every slice's B, the ranks and the
scale. What changes when adapters come and go is the tables' contents, never their addresses: a
captured CUDA graph goes on with the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from lora_fs.kernels.weights.layout import Layer, Packed, Shape, ShapeError

VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tables:
    """A layer's weights, as kernels find them. S is its number of slices.

    Attributes:
        weights: one tensor, whose beginning the offsets count from, in its elements.
        offsets: int64 ``[slots, 1 + S]``: of A, then of each slice's B.
        ends: int32 ``[slots, 1 + S]``: 0, then for each slice where its ranks end among the R: the
            last is R, 0 for a slot without weights.
        scales: fp32 ``[slots, 1]``.
        columns: int32 ``[1 + S]``: 0, then for each slice where its columns end among the N.
        capacity: the largest R that a slot may have, now or later.
        aligned: every matrix and every row of one begins at a multiple of 16 bytes.
    """

    weights: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    scales: torch.Tensor
    columns: torch.Tensor
    capacity: int
    aligned: bool


@dataclass(slots=True)
class DeviceLayer(Layer):
    """A layer whose weights lie in one storage, with tables that follow its slots."""

    tables: Tables = field(kw_only=True)

    def see(self, slot: int, packed: Packed | None) -> None:
        """Set or clear a slot. The weights were checked at their placement."""
        self.packed[slot], self.derived[slot] = packed, {}


def column_table(shape: Shape, device: torch.device) -> torch.Tensor:
    """``Tables.columns`` of a layer."""
    return torch.tensor([0, *accumulate(shape.outputs)], dtype=torch.int32, device=device)


def rows_aligned(shape: Shape, itemsize: int) -> bool:
    """Whether every row of a contiguous A and B is a multiple of 16 bytes.

    Rows of an embedding's A do not count: they are as long as a rank, and few.
    """
    lengths = shape.outputs if shape.lookup else (shape.inputs, *shape.outputs)
    return all(length * itemsize % VECTOR_BYTES == 0 for length in lengths)


def tables_of(layer: Layer) -> Tables:
    """A layer's tables: those it keeps, or else new ones, for weights that stand anywhere.

    Raises:
        ShapeError: all slots are empty, a matrix is not contiguous, or the types differ.
    """
    if isinstance(layer, DeviceLayer):
        return layer.tables
    base = next((packed.a for packed in layer.packed if packed is not None), None)
    if base is None:
        raise ShapeError("no slot has weights")
    offsets, ends, scales = [], [], []
    for packed in layer.packed:
        if packed is None:
            offsets.append([0] * (1 + len(layer.shape.outputs)))
            ends.append([0] * (1 + len(layer.shape.outputs)))
            scales.append([0.0])
        else:
            offsets.append([_offset(matrix, base) for matrix in (packed.a, *packed.b)])
            ends.append([0, *accumulate(packed.ranks)])
            scales.append([packed.scale])
    items = VECTOR_BYTES // base.itemsize
    return Tables(
        weights=base,
        offsets=torch.tensor(offsets, dtype=torch.int64, device=base.device),
        ends=torch.tensor(ends, dtype=torch.int32, device=base.device),
        scales=torch.tensor(scales, dtype=torch.float32, device=base.device),
        columns=column_table(layer.shape, base.device),
        capacity=layer.widest,
        aligned=base.data_ptr() % VECTOR_BYTES == 0
        and all(offset % items == 0 for row in offsets for offset in row)
        and rows_aligned(layer.shape, base.itemsize),
    )


def _offset(matrix: torch.Tensor | None, base: torch.Tensor) -> int:
    if matrix is None:
        return 0
    if not matrix.is_contiguous() or matrix.dtype != base.dtype or matrix.device != base.device:
        raise ShapeError(f"a matrix of {matrix.dtype} on {matrix.device}, strides {matrix.stride()}")
    offset: int = (matrix.data_ptr() - base.data_ptr()) // base.itemsize
    return offset
