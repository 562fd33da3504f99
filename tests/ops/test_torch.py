"""The torch backend against the reference, over shapes, ranks, types and layouts of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lora_fs.kernels import grouped, reference
from lora_fs.kernels.layout import Layer, Shape
from lora_fs.kernels.segments import NO_SLOT, plan_rows
from tests.ops.conftest import assert_close, make_layer, make_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One slice; q, k and v of grouped-query attention; gate and up; a width nothing divides.
SHAPES = [Shape(48, (32,)), Shape(64, (64, 16, 16)), Shape(32, (80, 80)), Shape(40, (37,))]

batches = st.lists(st.integers(NO_SLOT, 3), max_size=24).map(lambda slots: np.array(slots, dtype=np.int64))
ranks = st.lists(st.sampled_from([0, 1, 3, 8, 16, 70]), min_size=3, max_size=3)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    of_slots = []
    for _ in range(4):
        of_slices = draw(ranks)[: len(shape.outputs)]
        of_slots.append(of_slices if any(of_slices) else None)
    return make_layer(shape, of_slots, dtype, scales=(1.0, 0.5, 2.25), seed=draw(st.integers(0, 99)))


def dtype_of(layer: Layer) -> torch.dtype:
    return next((packed.a.dtype for packed in layer.packed if packed is not None), torch.float32)


@settings(max_examples=300, deadline=None)
@given(layers(), batches, st.booleans())
def test_linear_is_the_references(layer: Layer, slots: np.ndarray, add: bool) -> None:
    """Within the tolerance; rows without an adapter, or whose adapter leaves the layer alone, to the bit."""
    plan, dtype = plan_rows(slots), dtype_of(layer)
    x = make_rows(len(slots), layer.shape.inputs, dtype)
    before = make_rows(len(slots), layer.shape.width, dtype, seed=2)
    bare = [slot == NO_SLOT or layer.packed[slot] is None for slot in slots]
    before[torch.tensor(bare, dtype=torch.bool)] = torch.nan
    y, wanted = before.clone(), before.double()
    grouped.linear(y, x, layer, plan, add=add)
    reference.linear(wanted, x, layer, plan, add=add)
    live = torch.tensor([not one for one in bare], dtype=torch.bool)
    assert torch.equal(y[~live].view(torch.uint8), before[~live].view(torch.uint8))
    assert not torch.isnan(y[live]).any()
    z = reference.shrink(x, layer, plan)
    clean_found, clean_wanted = y.nan_to_num(), wanted.nan_to_num()
    assert_close(clean_found, clean_wanted, layer, plan, z)


@settings(max_examples=100, deadline=None)
@given(layers(), batches)
def test_shrink_then_expand_is_linear(layer: Layer, slots: np.ndarray) -> None:
    """Through rank space in fp32, padded to the widest adapter."""
    plan, dtype = plan_rows(slots), dtype_of(layer)
    x = make_rows(len(slots), layer.shape.inputs, dtype)
    z = grouped.shrink(x, layer, plan)
    exact = reference.shrink(x, layer, plan)
    assert z.shape == exact.shape
    bound = 2.0**-7 * make_bound(x, layer, slots) + 1e-5
    assert bool(((z.double() - exact).abs() <= bound).all())
    y, wanted = (torch.zeros(len(slots), layer.shape.width, dtype=d) for d in (dtype, torch.float64))
    grouped.expand(y, z, layer, plan)
    reference.expand(wanted, exact, layer, plan)
    assert_close(y, wanted, layer, plan, exact)


def make_bound(x: torch.Tensor, layer: Layer, slots: np.ndarray) -> torch.Tensor:
    """``|A|·|x|`` of each row."""
    bound = torch.zeros(len(slots), layer.widest, dtype=torch.float64)
    for row, slot in enumerate(slots):
        packed = layer.packed[slot] if slot != NO_SLOT else None
        if packed is not None:
            bound[row, : packed.rank] = packed.a.double().abs() @ x[row].double().abs()
    return bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [True, False])
def test_embedding(dtype: torch.dtype, add: bool) -> None:
    """A is looked up by token."""
    layer = make_layer(Shape(50, (24,), lookup=True), [[4], [9], None], dtype, scales=(2.0,))
    slots = np.array([0, 1, NO_SLOT, 0, 2, 1])
    plan, tokens = plan_rows(slots), torch.tensor([3, 49, 0, 0, 7, 3])
    before = make_rows(6, 24, dtype)
    y, wanted = before.clone(), before.double()
    grouped.embedding(y, tokens, layer, plan, add=add)
    reference.embedding(wanted, tokens, layer, plan, add=add)
    z = torch.zeros(6, 9, dtype=torch.float64)
    for row, slot in ((0, 0), (1, 1), (3, 0), (5, 1)):
        packed = layer.packed[slot]
        assert packed is not None
        z[row, : packed.rank] = packed.a[tokens[row]].double()
    assert_close(y, wanted, layer, plan, z)
    assert torch.equal(y[[2, 4]], before[[2, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [512, 320])
def test_large_ranks(dtype: torch.dtype, rank: int) -> None:
    """Beyond what is done in fp32, and many rows of one adapter."""
    layer = make_layer(Shape(512, (256, 64)), [[rank, 8], [16, rank]], dtype)
    slots = np.array([0] * 40 + [1, 0, 1])
    plan = plan_rows(slots)
    x = make_rows(len(slots), 512, dtype)
    y, wanted = (torch.zeros(len(slots), 320, dtype=d) for d in (dtype, torch.float64))
    grouped.linear(y, x, layer, plan)
    reference.linear(wanted, x, layer, plan)
    assert_close(y, wanted, layer, plan, reference.shrink(x, layer, plan))


@settings(max_examples=100, deadline=None)
@given(layers(), batches, st.integers(0, 3))
def test_neighbours_do_not_matter(layer: Layer, slots: np.ndarray, slot: int) -> None:
    """An adapter's rows become the same bits alone and in a batch, and in two runs.

    Where rows are multiples of 16 bytes, as every model's are: MKL sums in an order that depends on the
    address of what it writes, modulo 16.
    """
    dtype = dtype_of(layer)
    assume(layer.shape.width * dtype.itemsize % 16 == 0)
    x = make_rows(len(slots), layer.shape.inputs, dtype)
    y = make_rows(len(slots), layer.shape.width, dtype, seed=2)
    mine = torch.from_numpy(np.flatnonzero(slots == slot))
    alone = y[mine]
    grouped.linear(alone, x[mine], layer, plan_rows(slots[slots == slot]))
    again = y.clone()
    grouped.linear(y, x, layer, plan_rows(slots))
    grouped.linear(again, x, layer, plan_rows(slots))
    assert torch.equal(y[mine], alone)
    assert torch.equal(y, again)


def test_a_slot_filled_anew() -> None:
    """What was made from the weights before it is not used."""
    shape = Shape(48, (32,))
    layer = make_layer(shape, [[8]], torch.bfloat16)
    other = make_layer(shape, [[16]], torch.bfloat16, seed=5)
    plan, x = plan_rows(np.array([0])), make_rows(1, 48, torch.bfloat16)
    y = torch.zeros(1, 32, dtype=torch.bfloat16)
    grouped.linear(y, x, layer, plan)
    layer.put(0, other.packed[0])
    grouped.linear(y, x, layer, plan, add=False)
    wanted = torch.zeros(1, 32, dtype=torch.float64)
    reference.linear(wanted, x, other, plan)
    assert_close(y, wanted, other, plan, reference.shrink(x, other, plan))
