"""What every backend has to compute, row by row, in 64-bit floats. Not fast, and not meant to be.

``z[t] = A[slot[t]] · x[t]``, ``y[t] += scale · z[t] · B[slot[t]]``. Source: Punica,
arXiv:2310.18547; the rank-major layout is ours.
"""

from __future__ import annotations

import torch

from lora_fs.kernels.segments import Plan
from lora_fs.kernels.weights.layout import Layer, Packed


def shrink(x: torch.Tensor, layer: Layer, plan: Plan) -> torch.Tensor:
    """Project rows to rank space.

    Args:
        x: ``[T, K]``, of any float type.
    Returns:
        ``[T, widest]``, fp64: each row its adapter's R products, then zeros.
    """
    z = torch.zeros(x.shape[0], layer.widest, dtype=torch.float64, device=x.device)
    for packed, rows in _live(layer, plan):
        z[rows, : packed.rank] = x[rows].double() @ packed.a.double().T
    return z


def expand(y: torch.Tensor, z: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True) -> None:
    """Project rank space to the layer's outputs, into ``y``.

    Args:
        y: ``[T, N]``, changed in place: added to, or overwritten where a row has an adapter.
        z: ``[T, widest]``, as ``shrink`` gives it.
    """
    for packed, rows in _live(layer, plan):
        at = 0
        for b, (begin, end), width in zip(packed.b, packed.columns(), layer.shape.outputs, strict=True):
            old = y[rows, at : at + width].double() if add else 0.0
            delta = 0.0 if b is None else packed.scale * (z[rows, begin:end].double() @ b.double())
            y[rows, at : at + width] = (old + delta + torch.zeros(1, device=y.device)).to(y.dtype)
            at += width


def linear(y: torch.Tensor, x: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True) -> None:
    """``expand`` of ``shrink``, with nothing rounded between them."""
    expand(y, shrink(x, layer, plan), layer, plan, add=add)


def embedding(y: torch.Tensor, tokens: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True) -> None:
    """Compute ``linear`` with the one-hot vector of each row's token as its input.

    Args:
        tokens: ``[T]``, int64; ``layer.shape.lookup`` holds.
    """
    z = torch.zeros(tokens.shape[0], layer.widest, dtype=torch.float64, device=y.device)
    for packed, rows in _live(layer, plan):
        z[rows, : packed.rank] = packed.a[tokens[rows]].double()
    expand(y, z, layer, plan, add=add)


def _live(layer: Layer, plan: Plan) -> list[tuple[Packed, torch.Tensor]]:
    found = []
    for slot, start, count in plan.segments:
        packed = layer.packed[slot]
        if packed is not None:
            found.append((packed, torch.from_numpy(plan.order[start : start + count]).long()))
    return found
