"""Every operation against the reference, over shapes, ranks, batches, types and configurations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_fs.kernels import gpu, reference
from lora_fs.kernels.gpu.configs import Expand, Shrink
from lora_fs.kernels.segments import NO_SLOT, Plan, plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape, ShapeError
from tests.ops.conftest import assert_close, make_layer, make_rows, slots_of_rows
from tests.ops.gpu.conftest import DEVICE, INTERPRETED, in_turns, on_device

TYPES = [torch.float32, torch.float16, torch.bfloat16]
GQA = Shape(96, (64, 16, 16))
# A NaN whose bits nothing that is computed has.
POISON = {torch.float32: 0x7FC0BEEF, torch.float16: 0x7EEF, torch.bfloat16: 0x7FEF}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def poisoned_where(rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.view(BITS[y.dtype])[rows] = POISON[y.dtype]
    return y


def check(
    layer: Layer,
    slots: np.ndarray,
    *,
    add: bool = True,
    tokens: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Run an operation on a batch whose rows without weights are poisoned; see that it is right."""
    plan = plan_rows(slots)
    dtype = next(packed.a.dtype for packed in layer.packed if packed is not None)
    x = (
        torch.from_numpy(np.random.default_rng(3).integers(layer.shape.inputs, size=len(slots)))
        if tokens
        else make_rows(len(slots), layer.shape.inputs, dtype)
    )
    dead = torch.tensor([slot == NO_SLOT or layer.packed[slot] is None for slot in slots])
    before = make_rows(len(slots), layer.shape.width, dtype, seed=7)
    if not add:
        before.fill_(torch.nan)
    wanted = before.double()
    (reference.embedding if tokens else reference.linear)(wanted, x, layer, plan, add=add)
    y = poisoned_where(dead, before.clone()).to(DEVICE)
    there = on_device(layer)
    operation = gpu.embedding if tokens else gpu.linear
    operation(y, x.to(DEVICE), there, options.pop("plan", plan), add=add, **options)
    found = y.cpu()
    assert (found.view(BITS[dtype])[dead] == POISON[dtype]).all()
    found[dead], wanted[dead] = 0, 0
    assert_close(found, wanted, layer, plan, z_of(layer, x, plan, tokens))
    return found


def z_of(layer: Layer, x: torch.Tensor, plan: Plan, tokens: bool) -> torch.Tensor:
    if not tokens:
        return reference.shrink(x, layer, plan)
    z = torch.zeros(len(x), layer.widest, dtype=torch.float64)
    for slot, start, rows in plan.segments:
        packed = layer.packed[slot]
        if packed is not None:
            at = torch.from_numpy(plan.order[start : start + rows]).long()
            z[at, : packed.rank] = packed.a[x[at]].double()
    return z


ranks = st.sampled_from([1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 100, 512])


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Up to four slots, some empty, ranks of every kind mixed; slices without weights."""
    outputs = tuple(draw(st.lists(st.sampled_from([1, 7, 8, 16, 24, 64, 130]), min_size=1, max_size=3)))
    shape = Shape(draw(st.sampled_from([1, 5, 16, 40, 64, 128, 130])), outputs)
    of_slot = st.lists(st.one_of(ranks, st.just(0)), min_size=len(outputs), max_size=len(outputs)).filter(any)
    slots = draw(st.lists(st.one_of(of_slot, st.none()), min_size=1, max_size=4).filter(any))
    return make_layer(shape, slots, draw(st.sampled_from(TYPES)), scales=(1.0, 0.5, -2.0))


@settings(max_examples=20 if INTERPRETED else 40)
@given(layer=layers(), data=st.data(), add=st.booleans())
def test_linear_is_the_reference_of_any_batch(layer: Layer, data: st.DataObject, add: bool) -> None:
    """Whatever the shapes, ranks and segments, and whether it adds or overwrites."""
    slot = st.integers(NO_SLOT, len(layer.packed) - 1)
    runs = data.draw(st.lists(st.tuples(slot, st.integers(1, 20)), min_size=1, max_size=6))
    check(layer, slots_of_rows(*runs), add=add)


@settings(max_examples=12)
@given(
    rank=st.sampled_from([1, 3, 16, 40]),
    dtype=st.sampled_from(TYPES),
    slots=st.lists(st.integers(NO_SLOT, 2), min_size=1, max_size=20),
    add=st.booleans(),
)
def test_embedding_is_the_reference(rank: int, dtype: torch.dtype, slots: list[int], add: bool) -> None:
    """A row of A for each token, from its own adapter's A."""
    layer = make_layer(Shape(50, (72,), lookup=True), [[rank], None, [7]], dtype, scales=(0.5, 1.0))
    check(layer, np.array(slots), add=add, tokens=True)


BATCHES = {
    "one adapter": [0] * 40,
    "all different": [0, 1, 2, 3],
    "interleaved": [0, 1, 0, 1, 2, 1, 0],
    "none": [NO_SLOT],
    "one row": [NO_SLOT, 3, NO_SLOT],
    "around a tile's size": [3] * 17 + [0] * 16 + [1] * 15,
}


@pytest.mark.parametrize(("batch", "dtype"), in_turns([*BATCHES], TYPES))
def test_batches_of_every_kind(batch: str, dtype: torch.dtype) -> None:
    """One adapter for all, a different one for each, rows in any order, or none at all."""
    layer = make_layer(GQA, [[8, 8, 8], [1, 2, 3], [64, 0, 16], [5, 0, 0]], dtype)
    check(layer, np.array(BATCHES[batch]))


def test_an_empty_batch_and_empty_layers_do_nothing() -> None:
    """No rows, no adapters, or no slot with weights: nothing to compute and nothing changed."""
    layer = make_layer(Shape(16, (16,)), [[4]], torch.float32)
    nothing = torch.empty(0, 16)
    gpu.linear(nothing, nothing, on_device(layer), plan_rows(np.array([], dtype=np.int64)))
    y = make_rows(3, 16, torch.float32).to(DEVICE)
    blank = Layer.empty(Shape(16, (16,)), 2)
    plan = plan_rows(np.array([0, 1, NO_SLOT]))
    before = y.clone()
    gpu.linear(y, y.clone(), blank, plan, add=False)
    assert torch.equal(y, before)


# Few programs and many, tiles smaller and larger than the segments, K and N that they divide or not.
CONFIGURATIONS = {
    "serial": (Shrink(16, 16, 16, programs=1), Expand(16, 16, 16, programs=1)),
    "split": (
        Shrink(16, 32, 32, programs=40, most_splits=3),
        Expand(16, 64, 32, programs=200, early=True),
    ),
    "both early": (Shrink(16, 16, 32, programs=60, early=True), Expand(16, 16, 32, programs=90, early=True)),
    "64 rows": (Shrink(64, 16, 32, programs=7), Expand(64, 32, 64, programs=5)),
    "128 rows": (Shrink(128, 128, 64, programs=3), Expand(128, 16, 16, programs=9)),
    "64 rows in four": (Shrink(64, 32, 16, programs=9), Expand(16, 16, 32, programs=11)),
    "128 rows in two": (Shrink(128, 16, 32, programs=20), Expand(64, 64, 16, programs=4, early=True)),
}


@pytest.mark.parametrize(("name", "dtype"), in_turns([*CONFIGURATIONS], TYPES))
def test_every_configuration_gives_the_same(name: str, dtype: torch.dtype) -> None:
    """Tiles and the number of programs are a matter of time, not of the result.

    One segment has more rows than a tile, and one slice more ranks.
    """
    configs, inputs = CONFIGURATIONS[name], 96 if dtype == torch.float32 else 100
    rows, ranks = configs[0].rows + 2, configs[0].ranks + 2
    layer = make_layer(Shape(inputs, (64, 16, 8)), [[20, 3, 0], [1, 1, 17], None, [ranks, 0, 2]], dtype)
    slots = slots_of_rows((1, rows), (NO_SLOT, 1), (0, 2), (3, 17), (2, 3), (0, 5))
    plan = gpu.DevicePlan(len(slots), 4, DEVICE)
    plan.upload(plan_rows(slots), tile=configs[0].rows)
    check(layer, slots, plan=plan, configs=configs)


@st.composite
def configurations(draw: st.DrawFn) -> tuple[Shrink, Expand]:
    """Tiles of a plan, and smaller ones of an expand; any number of programs and splits."""
    sizes = st.sampled_from([16, 32, 64])
    rows, programs = draw(st.sampled_from([16, 32, 64, 128])), st.integers(1, 40)
    splits = draw(st.sampled_from([1, 2, 8]))
    early = st.booleans()
    shrink = Shrink(rows, draw(sizes), draw(sizes), draw(programs), most_splits=splits, early=draw(early))
    pieces = draw(st.sampled_from([piece for piece in (16, 32, 64, 128) if piece <= rows]))
    return shrink, Expand(pieces, draw(sizes), draw(sizes), draw(programs), early=draw(early))


@settings(max_examples=15 if INTERPRETED else 60)
@given(layer=layers(), configs=configurations(), data=st.data(), add=st.booleans())
def test_an_expand_cuts_a_tile_into_pieces_of_its_own(
    layer: Layer, configs: tuple[Shrink, Expand], data: st.DataObject, add: bool
) -> None:
    """Segments end anywhere in a tile: in its first piece, between two, or with it."""
    slot = st.integers(NO_SLOT, len(layer.packed) - 1)
    length = st.one_of(st.integers(1, 20), st.sampled_from([16, 32, 63, 64, 65, 128]))
    slots = slots_of_rows(*data.draw(st.lists(st.tuples(slot, length), min_size=1, max_size=3)))
    plan = gpu.DevicePlan(len(slots), len(layer.packed), DEVICE)
    plan.upload(plan_rows(slots), tile=configs[0].rows)
    check(layer, slots, add=add, plan=plan, configs=configs)


@pytest.mark.parametrize("dtype", TYPES)
def test_two_runs_agree_to_the_bit(dtype: torch.dtype) -> None:
    """No sum depends on which program is first."""
    layer = make_layer(Shape(128, (64, 32)), [[16, 16], [40, 8]], dtype)
    slots = slots_of_rows((0, 5), (1, 30), (0, 1))
    assert torch.equal(check(layer, slots), check(layer, slots))


def test_rows_of_a_wider_tensor_are_read_and_written_in_place() -> None:
    """x and y may be columns of something wider, as a fused projection gives them."""
    layer = make_layer(Shape(32, (48,)), [[9]], torch.float32)
    plan = plan_rows(np.zeros(5, dtype=np.int64))
    wide = make_rows(5, 200, torch.float32)
    there = wide.clone().to(DEVICE)
    gpu.linear(there[:, 100:148], there[:, 8:40], on_device(layer), plan)
    wanted = wide.double()
    reference.linear(wanted[:, 100:148], wide[:, 8:40], layer, plan)
    torch.testing.assert_close(there.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_fit_are_refused() -> None:
    """A tensor of another width, of too few rows, or with its columns apart is told, not read."""
    layer = on_device(make_layer(Shape(32, (48,)), [[9]], torch.float32))
    plan = plan_rows(np.zeros(5, dtype=np.int64))
    x, y = torch.zeros(5, 32, device=DEVICE), torch.zeros(5, 48, device=DEVICE)
    for wrong_y, wrong_x in [(y, y), (y[:, :40], x), (y[:4], x), (torch.zeros(48, 5, device=DEVICE).T, x)]:
        with pytest.raises(ShapeError):
            gpu.linear(wrong_y, wrong_x, layer, plan)
    serial, large = CONFIGURATIONS["serial"], CONFIGURATIONS["64 rows"]
    for shrink, expand in (large, (serial[0], large[1])):
        with pytest.raises(ShapeError, match="rows"):
            gpu.linear(y, x, layer, plan, configs=(shrink, expand))
