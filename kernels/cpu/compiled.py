"""The backend for CPUs: a few rows of each adapter by loops of our own, many by torch's products.

``loops`` has one call for all adapters of a batch, where torch has two an adapter, and runs on the
calling thread; torch's products, in ``grouped``, have the processor's matrix instructions and all
threads. Where the engine computes in fp32, half-precision weights are read as they are. What an adapter's
rows become does not depend, to the bit, on which other adapters share the batch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import binding
from numpy.typing import NDArray

from lora_fs.kernels.cpu import grouped, loops
from lora_fs.kernels.cpu.grouped import embedding
from lora_fs.kernels.segments import Plan, plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape

__all__ = ["embedding", "linear", "warm_up"]

NOBODY = plan_rows(np.zeros(0, dtype=np.int64))

# From so many rows of one adapter on, torch's product is faster. Of half-precision numbers it has a fast one
# only where the processor has: elsewhere it takes 14 to 32 times as long as the loops (by hand). Of fp32 it
# has MKL's, which on Zen 5 takes 1.3 to 2.1 times as long with 128 to 512 rows (by hand).
_AVX512 = torch.backends.cpu.get_cpu_capability() not in {"NO AVX", "AVX2"}
_ZEN5 = _AVX512 and binding.get_host_cpu_name() == "znver5"
MANY = {
    torch.float32: sys.maxsize if _ZEN5 else 128 if _AVX512 else 16,
    torch.bfloat16: 32 if _AVX512 else sys.maxsize,
    torch.float16: sys.maxsize,
}
# Where torch has more threads than one: from so many multiplications with one adapter's weights on, divided
# by its threads. Measured with two.
ALONE = 1 << 26
# What ``loops`` takes numbers of a type for.
_KINDS = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Where a layer's weights are, as ``loops.linear`` wants it, for rows of one type."""

    rows: torch.dtype
    weights: NDArray[np.int64]
    scales: NDArray[np.float32]
    outputs: NDArray[np.int64]

    @classmethod
    def of(cls, layer: Layer, rows: torch.dtype) -> _Addresses:
        slots, outputs = len(layer.packed), layer.shape.outputs
        weights = np.empty((slots, 2 + 2 * len(outputs)), dtype=np.int64)
        return cls(rows, weights, np.empty(slots, np.float32), np.array(outputs, dtype=np.int64))

    def note(self, layer: Layer, slot: int) -> _Noted:
        """Write a slot's row."""
        packed, row = layer.packed[slot], self.weights[slot]
        row[:] = 0
        if packed is None:
            row[0] = -1
            return _Noted(self.rows, ())
        kind = packed.a.dtype if self.rows == torch.float32 and packed.a.dtype in _KINDS else self.rows
        kept = tuple(_dense(tensor, kind) for tensor in (packed.a, *packed.b) if tensor is not None)
        addresses = iter([tensor.data_ptr() for tensor in kept])
        row[0], row[1] = packed.rank, next(addresses)
        for place, rank in enumerate(packed.ranks):
            row[2 + 2 * place], row[3 + 2 * place] = rank, next(addresses) if rank else 0
        self.scales[slot] = packed.scale
        return _Noted(kind, kept)


def _dense(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the tensor contiguous, as ``kind``. Checks first: a needless ``to`` takes twice as long."""
    if tensor.dtype == kind and tensor.is_contiguous():
        return tensor
    return tensor.to(kind).contiguous()


class _Noted(NamedTuple):
    """The weights of a row, and the tensors that must live as long as it is in use."""

    kind: torch.dtype
    kept: tuple[torch.Tensor, ...]


def warm_up(rows: torch.dtype) -> frozenset[torch.dtype]:
    """Compile what an engine of this type needs, so that no request waits for it.

    Returns: the types that weights may have to be read as they are.
    """
    if rows not in _KINDS:
        return frozenset()
    layer, none = Layer.empty(Shape(0, (0,)), 1), torch.empty(0, 0, dtype=rows)
    kinds = frozenset(_KINDS if rows == torch.float32 else [rows])
    for kind in kinds:
        _loops(none, none, layer, NOBODY, NOBODY.table, kind, add=True)
    return kinds


def linear(y: torch.Tensor, x: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True) -> None:
    """See ``reference.linear``."""
    if y.dtype not in _KINDS or x.dtype != y.dtype or y.stride(1) != 1 or x.stride(1) != 1:
        grouped.linear(y, x, layer, plan, add=add)
        return
    if y.shape != (plan.rows, layer.shape.width) or x.shape != (plan.rows, layer.shape.inputs):
        raise ValueError(f"y {tuple(y.shape)} and x {tuple(x.shape)}, for {plan.rows} rows of {layer.shape}")
    large = _large(y.dtype, layer, plan)
    if large:
        grouped.linear(y, x, layer, plan, add=add, only=large)
    at, derived = _addresses(layer, y.dtype), layer.derived
    few: dict[torch.dtype, list[int]] = {}
    for index, (slot, _, _) in enumerate(plan.segments):
        if slot not in large:
            noted = derived[slot].get("loops")
            if noted is None:
                noted = derived[slot]["loops"] = at.note(layer, slot)
            few.setdefault(noted.kind, []).append(index)
    for kind, segments in few.items():
        all_of_them = len(segments) == len(plan.segments)
        _loops(y, x, layer, plan, plan.table if all_of_them else plan.table[segments], kind, add=add)


def _large(rows_are: torch.dtype, layer: Layer, plan: Plan) -> set[int]:
    """The slots whose rows torch does: each by itself, so that no neighbour changes what does them."""
    many, threads = MANY[rows_are], torch.get_num_threads()
    if threads == 1:
        return {slot for slot, _, rows in plan.segments if rows >= many} if plan.most >= many else set()
    each = ALONE // threads // (layer.shape.inputs + layer.shape.width)
    ranks = {slot: 0 if (packed := layer.packed[slot]) is None else packed.rank for slot, *_ in plan.segments}
    return {slot for slot, _, rows in plan.segments if rows >= many or rows * ranks[slot] > each}


def _addresses(layer: Layer, rows: torch.dtype) -> _Addresses:
    if not isinstance(layer.made, _Addresses) or layer.made.rows != rows:
        layer.made = _Addresses.of(layer, rows)
        for made in layer.derived:
            made.pop("loops", None)
    return layer.made


def _loops(
    y: torch.Tensor,
    x: torch.Tensor,
    layer: Layer,
    plan: Plan,
    segments: NDArray[np.int32],
    kind: torch.dtype,
    *,
    add: bool,
) -> None:
    at = _addresses(layer, y.dtype)
    loops.linear(
        y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), plan.rows, layer.shape.inputs,
        _KINDS[y.dtype], _KINDS[kind], at.outputs, at.weights, at.scales, segments, plan.order, add,
    )  # fmt: skip
