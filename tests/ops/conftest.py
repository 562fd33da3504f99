"""Layers, batches and the tolerance that every backend is held to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lora_fs.kernels.segments import Plan
from lora_fs.kernels.weights.layout import Layer, Shape, pack

EPSILON = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def make_layer(
    shape: Shape,
    ranks: Sequence[Sequence[int] | None],
    dtype: torch.dtype,
    *,
    scales: Sequence[float] = (1.0,),
    seed: int = 0,
) -> Layer:
    """A layer with one slot for each entry of ``ranks``: the ranks of its slices, None if empty."""
    random = torch.Generator().manual_seed(seed)
    layer = Layer.empty(shape, len(ranks))
    for slot, of_slices in enumerate(ranks):
        if of_slices is None:
            continue
        a = [_weights(random, dtype, r, shape.inputs) if r else None for r in of_slices]
        b = [
            _weights(random, dtype, n, r) if r else None
            for r, n in zip(of_slices, shape.outputs, strict=True)
        ]
        layer.put(slot, pack(shape, a, b, scales[slot % len(scales)]))
    return layer


def _weights(random: torch.Generator, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=random) * columns**-0.5).to(dtype)


def make_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(
    found: torch.Tensor, wanted: torch.Tensor, layer: Layer, plan: Plan, z: torch.Tensor
) -> None:
    """``|err| ≤ ε·|y| + ε·scale·(|z|·|B|) + 1e-5``, row by row, with ε of the outputs' type.

    Args:
        wanted: fp64, before it is rounded to the outputs' type.
        z: fp64, the reference's.
    """
    epsilon = EPSILON[found.dtype]
    magnitude = torch.zeros_like(wanted)
    for segment in plan.segments:
        packed = layer.packed[segment.slot]
        if packed is None:
            continue
        rows = torch.from_numpy(plan.order[segment.start : segment.start + segment.rows]).long()
        at = 0
        for b, (begin, end), width in zip(packed.b, packed.columns(), layer.shape.outputs, strict=True):
            if b is not None:
                product = z[rows, begin:end].abs() @ b.double().abs()
                magnitude[rows, at : at + width] = abs(packed.scale) * product
            at += width
    allowed = epsilon * wanted.abs() + epsilon * magnitude + 1e-5
    excess = (found.double() - wanted).abs() - allowed
    assert not torch.isnan(found).any()
    assert excess.max().item() <= 0 if excess.numel() else True, f"beyond tolerance by {excess.max().item()}"


def slots_of_rows(*runs: tuple[int, int]) -> np.ndarray:
    """``(slot, rows)`` of each request → the slot of each row."""
    return np.repeat([slot for slot, _ in runs], [rows for _, rows in runs])
