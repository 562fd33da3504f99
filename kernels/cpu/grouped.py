"""The operations for CPUs, in plain torch: one matrix product a slot, on rows that stand together.

Weights are not gathered: each adapter's are read once for all of its rows. Rows that are not neighbours
are brought together first. An adapter's rows become the same whichever other
adapters share the batch: to the bit, where rows of ``y`` are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from lora_fs.kernels.segments import NO_SLOT, Plan
from lora_fs.kernels.weights.layout import Layer, Packed

# oneDNN takes 16 µs to begin a product of half-precision matrices, and 3 µs for one of fp32. Up to
# this many multiplications the product is fp32, with a copy of the weights that the slot keeps.
SMALL = 1 << 18
# Larger matrices get no copy: they come from memory, and twice the bytes take twice the time.
KEPT = 1 << 17


@dataclass(slots=True)
class _Matrix:
    """The right side of a product: the weights as they are, and in fp32 once a product wanted that.

    An fp32 engine widens half-precision weights for each product: ``compiled`` has few here.
    """

    as_is: torch.Tensor
    wide: torch.Tensor | None = None

    def for_rows(self, rows: int, of_rows: torch.dtype) -> torch.Tensor:
        numbers = self.as_is.numel()
        if of_rows == torch.float32 or numbers > KEPT or rows * numbers > SMALL:
            return self.as_is.to(of_rows)
        if self.wide is None:
            # Keeps the strides: a transposed view stays one.
            self.wide = self.as_is.float()
        return self.wide


@dataclass(frozen=True, slots=True)
class _Weights:
    """A slot's weights, made ready once: ``a`` is ``[K, R]``, each of ``b`` ``[r, N]``."""

    a: _Matrix
    b: tuple[_Matrix | None, ...]
    ranks: tuple[int, ...]
    scale: float

    @classmethod
    def of(cls, packed: Packed) -> _Weights:
        b = tuple(None if b is None else _Matrix(b) for b in packed.b)
        return cls(_Matrix(packed.a.T), b, packed.ranks, packed.scale)


def linear(
    y: torch.Tensor,
    x: torch.Tensor,
    layer: Layer,
    plan: Plan,
    *,
    add: bool = True,
    only: Container[int] | None = None,
) -> None:
    """See ``reference.linear``. ``only``: the slots whose rows change, if not all do."""
    widths = layer.shape.outputs

    def project(y: torch.Tensor, x: torch.Tensor, weights: _Weights) -> None:
        _expand(y, _shrunk(x, weights), weights, widths, add)

    _each_slot(plan, y, x, layer, project, only)


def embedding(y: torch.Tensor, tokens: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True) -> None:
    """See ``reference.embedding``."""

    def project(y: torch.Tensor, tokens: torch.Tensor, weights: _Weights) -> None:
        _expand(y, weights.a.as_is.T[tokens], weights, layer.shape.outputs, add)

    _each_slot(plan, y, tokens, layer, project)


def _each_slot(
    plan: Plan,
    out: torch.Tensor,
    x: torch.Tensor,
    layer: Layer,
    project: Callable[[torch.Tensor, torch.Tensor, _Weights], None],
    only: Container[int] | None = None,
) -> None:
    """Have ``project`` change each slot's rows of ``out``."""
    sorting, inverse, pieces = plan.together
    if sorting is None or inverse is None:
        _each_piece(pieces, out, x, layer, project, only)
    else:
        # Two whole copies of ``out`` take half the time of one index_copy_ of some of its rows.
        together = out.index_select(0, sorting)
        _each_piece(pieces, together, x.index_select(0, sorting), layer, project, only)
        torch.index_select(together, 0, inverse, out=out)


def _each_piece(
    pieces: tuple[tuple[int, ...], tuple[int, ...]],
    out: torch.Tensor,
    x: torch.Tensor,
    layer: Layer,
    project: Callable[[torch.Tensor, torch.Tensor, _Weights], None],
    only: Container[int] | None,
) -> None:
    slots, sizes = pieces
    for slot, out_rows, x_rows in zip(slots, out.split(sizes), x.split(sizes), strict=True):
        if slot == NO_SLOT or (only is not None and slot not in only):
            continue
        if (packed := layer.packed[slot]) is not None:
            weights = layer.derived[slot].get("grouped")
            if weights is None:
                weights = layer.derived[slot]["grouped"] = _Weights.of(packed)
            project(out_rows, x_rows, weights)


def _shrunk(x: torch.Tensor, weights: _Weights) -> torch.Tensor:
    a = weights.a.for_rows(x.shape[0], x.dtype)
    return torch.mm(x if x.dtype == a.dtype else x.to(a.dtype), a)


def _expand(y: torch.Tensor, z: torch.Tensor, weights: _Weights, widths: tuple[int, ...], add: bool) -> None:
    if len(widths) == 1 and weights.b[0] is not None:
        _product(y, z, weights.b[0], weights.scale, add)
        return
    for b, y_slice, z_slice in zip(weights.b, y.split(widths, 1), z.split(weights.ranks, 1), strict=True):
        if b is not None:
            _product(y_slice, z_slice, b, weights.scale, add)
        elif not add:
            y_slice.zero_()


def _product(y: torch.Tensor, z: torch.Tensor, matrix: _Matrix, scale: float, add: bool) -> None:
    b = matrix.for_rows(z.shape[0], y.dtype)
    if z.dtype != b.dtype:
        z = z.to(b.dtype)
    if b.dtype == y.dtype:
        y.addmm_(z, b, beta=1 if add else 0, alpha=scale)
        return
    delta = torch.mm(z, b)
    if scale != 1.0:
        delta *= scale
    if add:
        y.add_(delta)
    else:
        y.copy_(delta)
