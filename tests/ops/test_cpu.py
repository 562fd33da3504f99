"""Both backends for CPUs against the reference, over shapes, ranks, types and layouts of the batch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llvmlite import binding
from numba import njit
from numba.core import caching

from lora_fs.kernels import reference
from lora_fs.kernels.backends import Backend
from lora_fs.kernels.cpu import compiled, grouped, loops, tiles
from lora_fs.kernels.segments import NO_SLOT, plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape
from tests.ops.conftest import assert_close, make_layer, make_rows

BOTH = pytest.mark.parametrize("ops", [grouped, compiled], ids=["torch", "numba"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILE, LONG = tiles.LANES * tiles.VECTORS, tiles.LANES * tiles.VECTORS_OF_ONE
ROOT = Path(__file__).parents[2]
# One slice; q, k and v of grouped-query attention; gate and up; a width nothing divides.
SHAPES = [
    Shape(48, (32,)),
    Shape(64, (64, 16, 16)),
    Shape(32, (80, 80)),
    Shape(40, (37,)),
    Shape(24, (330, 7)),
]


@pytest.fixture(autouse=True, scope="module")
def many() -> Iterator[None]:
    """From so many rows on torch, as on most processors with AVX-512; the rest is as this one has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compiled.MANY, torch.float32, 128)
        yield


batches = st.lists(st.integers(NO_SLOT, 3), max_size=90).map(lambda slots: np.array(slots, dtype=np.int64))
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


@BOTH
@settings(max_examples=300)
@given(layer=layers(), slots=batches, add=st.booleans())
def test_linear_is_the_references(ops: Backend, layer: Layer, slots: np.ndarray, add: bool) -> None:
    """Within the tolerance; rows without an adapter, or whose adapter leaves the layer alone, to the bit."""
    plan, dtype = plan_rows(slots), dtype_of(layer)
    x = make_rows(len(slots), layer.shape.inputs, dtype)
    before = make_rows(len(slots), layer.shape.width, dtype, seed=2)
    bare = [slot == NO_SLOT or layer.packed[slot] is None for slot in slots]
    before[torch.tensor(bare, dtype=torch.bool)] = torch.nan
    y, wanted = before.clone(), before.double()
    ops.linear(y, x, layer, plan, add=add)
    reference.linear(wanted, x, layer, plan, add=add)
    live = torch.tensor([not one for one in bare], dtype=torch.bool)
    assert torch.equal(y[~live].view(torch.uint8), before[~live].view(torch.uint8))
    assert not torch.isnan(y[live]).any()
    z = reference.shrink(x, layer, plan)
    clean_found, clean_wanted = y.nan_to_num(), wanted.nan_to_num()
    assert_close(clean_found, clean_wanted, layer, plan, z)


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


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [512, 320])
def test_large_ranks(ops: Backend, dtype: torch.dtype, rank: int) -> None:
    """Beyond what is done in fp32 and what is summed at a time, and many rows of one adapter."""
    wide, deep = 600, loops.DEEP + 24
    layer = make_layer(Shape(deep, (wide, 64)), [[rank, 8], [16, rank], [0, 5]], dtype)
    slots = np.array([0] * 140 + [1, 0, 1, 2, NO_SLOT])
    plan = plan_rows(slots)
    x = make_rows(len(slots), deep, dtype)
    y, wanted = (torch.zeros(len(slots), wide + 64, dtype=d) for d in (dtype, torch.float64))
    ops.linear(y, x, layer, plan)
    reference.linear(wanted, x, layer, plan)
    assert_close(y, wanted, layer, plan, reference.shrink(x, layer, plan))


@BOTH
@settings(max_examples=100)
@given(layer=layers(), slots=batches, slot=st.integers(0, 3))
def test_neighbours_do_not_matter(ops: Backend, layer: Layer, slots: np.ndarray, slot: int) -> None:
    """An adapter's rows become the same bits alone and in a batch, and in two runs.

    By torch where rows are multiples of 16 bytes, as every model's are: MKL sums in an order that
    depends on the address of what it writes, modulo 16.
    """
    dtype = dtype_of(layer)
    assume(ops is compiled or layer.shape.width * dtype.itemsize % 16 == 0)
    x = make_rows(len(slots), layer.shape.inputs, dtype)
    y = make_rows(len(slots), layer.shape.width, dtype, seed=2)
    mine = torch.from_numpy(np.flatnonzero(slots == slot))
    alone = y[mine]
    ops.linear(alone, x[mine], layer, plan_rows(slots[slots == slot]))
    again = y.clone()
    ops.linear(y, x, layer, plan_rows(slots))
    ops.linear(again, x, layer, plan_rows(slots))
    assert torch.equal(y[mine], alone)
    assert torch.equal(y, again)


@BOTH
def test_a_slot_filled_anew(ops: Backend) -> None:
    """What was made from the weights before it is not used, and is let go."""
    shape = Shape(48, (32,))
    layer = make_layer(shape, [[8]], torch.bfloat16)
    other = make_layer(shape, [[16]], torch.bfloat16, seed=5)
    plan, x = plan_rows(np.array([0])), make_rows(1, 48, torch.bfloat16)
    y = torch.zeros(1, 32, dtype=torch.bfloat16)
    ops.linear(y, x, layer, plan)
    assert layer.packed[0] is not None
    before = weakref.ref(layer.packed[0].a)
    layer.put(0, other.packed[0])
    assert before() is None
    ops.linear(y, x, layer, plan, add=False)
    wanted = torch.zeros(1, 32, dtype=torch.float64)
    reference.linear(wanted, x, other, plan)
    assert_close(y, wanted, other, plan, reference.shrink(x, other, plan))


@settings(max_examples=200)
@given(layer=layers(), slots=batches, seed=st.integers(0, 99))
def test_rows_do_not_matter(layer: Layer, slots: np.ndarray, seed: int) -> None:
    """By numba, a row's own numbers are the only ones it depends on: a NaN in another stays there."""
    dtype = dtype_of(layer)
    assume(len(slots) > 0)
    x = make_rows(len(slots), layer.shape.inputs, dtype)
    ill = np.random.default_rng(seed).integers(len(slots))
    y = torch.zeros(len(slots), layer.shape.width, dtype=dtype)
    clean = y.clone()
    compiled.linear(clean, x, layer, plan_rows(slots))
    x[ill] = torch.nan
    compiled.linear(y, x, layer, plan_rows(slots))
    others = np.arange(len(slots)) != ill
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_of_the_loops(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's product is slower, the loops have an adapter with many rows, too: block after block."""
    layer = make_layer(Shape(64, (64, 16, 16)), [[8, 8, 4], [16, 0, 8]], dtype)
    slots = np.random.default_rng(3).permutation([0] * 150 + [1] * 65)
    plan = plan_rows(slots)
    x, y = make_rows(len(slots), 64, dtype), make_rows(len(slots), 96, dtype, seed=2)
    wanted = y.double()
    monkeypatch.setitem(compiled.MANY, dtype, sys.maxsize)
    monkeypatch.setattr(grouped, "linear", None)
    compiled.linear(y, x, layer, plan)
    reference.linear(wanted, x, layer, plan)
    assert_close(y, wanted, layer, plan, reference.shrink(x, layer, plan))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_few_rows_beside_many(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has the adapter with many rows, and leaves those with a few to the loops; none is done twice."""
    layer = make_layer(Shape(64, (64, 16, 16)), [[8, 8, 4], [16, 0, 8], [4, 4, 4]], dtype)
    slots = np.random.default_rng(3).permutation([0] * 150 + [1] * 9 + [2] * 5 + [NO_SLOT] * 4)
    plan = plan_rows(slots)
    x, before = make_rows(len(slots), 64, dtype), make_rows(len(slots), 96, dtype, seed=2)
    y, wanted = before.clone(), before.double()
    monkeypatch.setitem(compiled.MANY, dtype, 128)
    monkeypatch.setattr(compiled, "ALONE", 2 * 12 * 9 * (64 + 96))  # with two threads less than slot 1 has
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled.linear(y, x, layer, plan)
    finally:
        torch.set_num_threads(usual)
    reference.linear(wanted, x, layer, plan)
    assert_close(y, wanted, layer, plan, reference.shrink(x, layer, plan))
    assert torch.equal(y[slots == NO_SLOT], before[slots == NO_SLOT])
    assert "loops" in layer.derived[2]
    assert ("loops" in layer.derived[1]) == (threads == 1)


def test_a_narrow_part_of_wider_rows() -> None:
    """As the logits are: rows that are further apart than they are long; nothing beyond them changes."""
    layer = make_layer(Shape(48, (32,)), [[8], [3]], torch.float32)
    plan, x = plan_rows(np.array([1, 0, 1])), make_rows(3, 60, torch.float32)[:, :48]
    wider = torch.full((3, 50), 7.0)
    wanted = torch.full((3, 32), 7.0, dtype=torch.float64)
    compiled.linear(wider[:, :32], x, layer, plan)
    reference.linear(wanted, x, layer, plan)
    assert_close(wider[:, :32], wanted, layer, plan, reference.shrink(x, layer, plan))
    assert bool((wider[:, 32:] == 7.0).all())


def test_rows_that_are_not_the_plans() -> None:
    """Memory is told by address: what does not fit is refused before it is touched."""
    layer = make_layer(Shape(48, (32,)), [[8]], torch.float32)
    plan = plan_rows(np.array([0, 0]))
    for y, x in (((2, 31), (2, 48)), ((2, 32), (2, 47)), ((1, 32), (1, 48)), ((3, 32), (3, 48))):
        with pytest.raises(ValueError, match="for 2 rows"):
            compiled.linear(torch.zeros(y), torch.zeros(x), layer, plan)
    with pytest.raises(IndexError):
        compiled.linear(torch.zeros(2, 32), torch.zeros(2, 48), layer, plan_rows(np.array([0, 1])))


@BOTH
@settings(max_examples=100)
@given(layer=layers(), other=layers(), slots=batches, many=st.booleans())
def test_half_precision_weights_of_an_fp32_engine(
    ops: Backend, layer: Layer, other: Layer, slots: np.ndarray, many: bool
) -> None:
    """They are read as they are, beside wider ones, and nothing is rounded to their type."""
    if other.shape == layer.shape:
        layer.put(2, other.packed[2])
    slots = np.repeat(slots, 40 if many else 1)
    plan, x = plan_rows(slots), make_rows(len(slots), layer.shape.inputs, torch.float32)
    before = make_rows(len(slots), layer.shape.width, torch.float32, seed=2)
    y, wanted = before.clone(), before.double()
    ops.linear(y, x, layer, plan)
    reference.linear(wanted, x, layer, plan)
    assert_close(y, wanted, layer, plan, reference.shrink(x, layer, plan))


def test_numbers_of_sixteen_bits() -> None:
    """Every bfloat16 and float16, and what lies between two of them, as torch has it."""
    for dtype, kind in ((torch.bfloat16, np.uint16), (torch.float16, np.int16)):
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        wanted = bits.view(dtype).float()
        found = np.empty(1 << 16, dtype=np.float32)
        widened(bits.numpy().view(kind), found)
        assert_same(found, wanted.numpy())
        words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
        ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
        values = np.concatenate([words, ties, ties - 1, ties + 1]).view(np.float32)
        back = np.empty(len(values), dtype=kind)
        narrowed(values, back)
        rounded = torch.from_numpy(back.view(np.int16)).view(dtype).float()
        assert_same(rounded.numpy(), torch.from_numpy(values).to(dtype).float().numpy())


@njit
def widened(bits: np.ndarray, found: np.ndarray) -> None:
    for place in range(len(bits)):
        found[place] = tiles.wide(bits[place])


@njit
def narrowed(values: np.ndarray, found: np.ndarray) -> None:
    for place in range(len(values)):
        found[place] = tiles.narrow(values[place], found[place])


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """To the bit, but for which NaN it is."""
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    numbers = ~np.isnan(wanted)
    assert np.array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 31, 32, 33, 36, 70])
def test_every_way_through_the_loops(rows: int) -> None:
    """Blocks of rows, ranks and columns of all sizes that the tiles are, and one more and one less."""
    random = np.random.default_rng(rows)
    for dtype in DTYPES:
        for inputs in (1, tiles.LANES, tiles.LANES + 1, loops.DEEP + tiles.LANES - 1):
            widths = [n + more for n in (tiles.LANES, TILE, LONG) for more in (-1, 0, 1)]
            shape = Shape(inputs, (1, *random.choice(widths, 3).tolist()))
            ranks = [random.choice([0, 1, 3, 4, 5, 8, 9], 4).tolist() for _ in range(2)]
            layer = make_layer(shape, [one if any(one) else None for one in ranks], dtype, scales=(0.5, 2.0))
            slots = random.choice([NO_SLOT, 0, 0, 1], rows)
            plan, x = plan_rows(slots), make_rows(rows, inputs, dtype)
            before = make_rows(rows, shape.width, dtype, seed=2)
            for add in (True, False):
                y, wanted = before.clone(), before.double()
                compiled.linear(y, x, layer, plan, add=add)
                reference.linear(wanted, x, layer, plan, add=add)
                assert_close(y, wanted, layer, plan, reference.shrink(x, layer, plan))


def test_tiles_for_another_processor() -> None:
    """Without AVX-512 vectors are shorter and tiles smaller: the same, in a process that has none."""
    had = binding.get_host_cpu_features()
    left = {name: on and not name.startswith("avx512") for name, on in had.items()}
    code = (
        f"import sys, pytest, llvmlite.binding as b; b.get_host_cpu_features = lambda: {left!r};"
        "from lora_fs.kernels.cpu import tiles; assert tiles.LANES == 8;"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/ops/test_cpu.py', '-k', 'the_loops']))"
    )
    features = ",".join(f"{'+' if on else '-'}{name}" for name, on in left.items())
    target = {"NUMBA_CPU_NAME": "x86-64-v3"} if platform.machine() == "x86_64" else {}
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **target, "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]


def test_no_folder_to_keep_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose files are read-only: each process compiles for itself."""

    def seven() -> int:
        return 7

    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    alone = loops._kept(seven)
    assert alone() == 7
    assert isinstance(alone._cache, caching.NullCache)


def test_what_is_kept_is_told_by_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change of ``tiles`` is not answered by what was compiled before it."""

    def eight() -> int:
        return 8

    changed = tmp_path / "tiles.py"
    changed.write_text("# another")
    before = loops._kept(eight)._cache._impl.filename_base
    monkeypatch.setattr(tiles, "__file__", str(changed))
    eight.__qualname__ = eight.__qualname__.rpartition("-")[0]
    assert loops._kept(eight)._cache._impl.filename_base != before
