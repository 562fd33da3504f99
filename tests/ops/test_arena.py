"""The arena's storage: nothing overlaps, nothing is lost, and the tables say where it is."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from lora_fs.kernels import reference
from lora_fs.kernels.cpu import grouped
from lora_fs.kernels.memory.arena import Arena
from lora_fs.kernels.memory.extents import Extents, StorageFullError
from lora_fs.kernels.segments import plan_rows
from lora_fs.kernels.weights.layout import Layer, Packed, Shape, ShapeError, pack
from lora_fs.kernels.weights.slabs import ALIGN_BYTES, Weights, pack_slab, packed_at
from lora_fs.kernels.weights.tables import tables_of
from tests.ops.conftest import make_rows, slots_of_rows

SHAPES = {
    "qkv": Shape(24, (16, 8, 8)),
    "odd": Shape(7, (5,)),
    "embedding": Shape(11, (24,), lookup=True),
}
SLOTS = 5
MAX_RANK = 16


def weights(shape: Shape, ranks: list[int], seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    random = torch.Generator().manual_seed(seed)
    a = [torch.randn(r, shape.inputs, generator=random).to(dtype) if r else None for r in ranks]
    b = [
        torch.randn(n, r, generator=random).to(dtype) if r else None
        for r, n in zip(ranks, shape.outputs, strict=True)
    ]
    return Weights(a, b, scale=0.25 + seed % 4)


@st.composite
def adapters(draw: st.DrawFn) -> dict[str, Weights]:
    """Some of the layers, each with its own ranks, some slices without weights."""
    found = {}
    for name in draw(st.sets(st.sampled_from(sorted(SHAPES)))):
        count = len(SHAPES[name].outputs)
        ranks = draw(st.lists(st.integers(0, MAX_RANK), min_size=count, max_size=count))
        found[name] = weights(SHAPES[name], ranks, draw(st.integers(0, 1000)))
    return found


def packed_of(adapter: dict[str, Weights], name: str) -> Packed | None:
    if name not in adapter or all(a is None for a in adapter[name].a):
        return None
    return pack(SHAPES[name], adapter[name].a, adapter[name].b, adapter[name].scale)


def assert_same(found: Packed | None, wanted: Packed | None) -> None:
    assert (found is None) == (wanted is None)
    if found is None or wanted is None:
        return
    assert (found.ranks, found.scale) == (wanted.ranks, wanted.scale)
    assert torch.equal(found.a, wanted.a)
    for one, other in zip(found.b, wanted.b, strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))


def new_arena(size_bytes: int = 16 << 10) -> Arena:
    return Arena(SHAPES, SLOTS, size_bytes, MAX_RANK, torch.float32)


@settings(max_examples=100)
@given(adapter=adapters(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_slab_holds_what_was_packed(adapter: dict[str, Weights], dtype: torch.dtype) -> None:
    """Every matrix is there, laid out as `pack` would, aligned, and none overlaps another."""
    slab = pack_slab(SHAPES, adapter, dtype)
    assert slab.data.nbytes % ALIGN_BYTES == 0
    taken = torch.zeros(len(slab.data), dtype=torch.int32)
    for name, shape in SHAPES.items():
        wanted = packed_of(adapter, name)
        found = packed_at(shape, slab.places[name], slab.data) if name in slab.places else None
        if wanted is not None:
            b = tuple(None if matrix is None else matrix.to(dtype) for matrix in wanted.b)
            wanted = Packed(wanted.a.to(dtype), b, wanted.ranks, wanted.scale)
        assert_same(found, wanted)
        if found is not None:
            for matrix in (found.a, *found.b):
                if matrix is not None:
                    begin = matrix.storage_offset()
                    assert begin * dtype.itemsize % ALIGN_BYTES == 0
                    taken[begin : begin + matrix.numel()] += 1
    assert (taken <= 1).all()


def test_a_slab_pads_no_rank() -> None:
    """Its size is that of its matrices, each rounded up to the alignment."""
    slab = pack_slab(SHAPES, {"qkv": weights(SHAPES["qkv"], [3, 0, 16], 1)}, torch.bfloat16)
    sizes = [2 * elements for elements in (19 * 24, 3 * 16, 16 * 8)]
    assert slab.data.nbytes == sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("other", Weights([torch.zeros(1, 7)], [torch.zeros(5, 1)]), "no such layer"),
        ("odd", Weights([torch.zeros(1, 8)], [torch.zeros(5, 1)]), "the layer wants"),
        ("odd", Weights([torch.zeros(2, 7)], [torch.zeros(5, 1)]), "the layer wants"),
        ("odd", Weights([None], [torch.zeros(5, 1)]), "the layer wants"),
        ("odd", Weights([torch.zeros(1, 7)] * 2, [torch.zeros(5, 1)] * 2), "of 1 slices"),
    ],
)
def test_weights_of_another_shape_are_refused(name: str, given: Weights, told: str) -> None:
    """The layer is named, and what it wants."""
    with pytest.raises(ShapeError, match=rf"^{name}: .*{told}"):
        pack_slab(SHAPES, {name: given}, torch.float32)


class Loading(RuleBasedStateMachine):
    """More adapters than slots: they come, are shown, hidden and freed, and are moved, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = new_arena()
        self.arena._storage.fill_(torch.nan)
        self.here: dict[int, dict[str, Weights]] = {}
        self.shown: dict[int, int] = {}

    @rule(owner=st.integers(10, 17), adapter=adapters())
    def begin(self, owner: int, adapter: dict[str, Weights]) -> None:
        slab = pack_slab(SHAPES, adapter, torch.float32)
        if owner in self.here:
            with pytest.raises(ValueError, match="already"):
                self.arena.begin(owner, slab)
        elif slab.data.numel() > self.arena._extents.free:
            with pytest.raises(StorageFullError):
                self.arena.begin(owner, slab)
        else:
            self.arena.begin(owner, slab)
            self.here[owner] = adapter

    @precondition(lambda self: self.here)
    @rule(slot=st.integers(0, SLOTS - 1), data=st.data())
    def show(self, slot: int, data: st.DataObject) -> None:
        self.shown[slot] = data.draw(st.sampled_from(sorted(self.here)))
        self.arena.show(slot, self.shown[slot])

    @rule(slot=st.integers(0, SLOTS - 1))
    def hide(self, slot: int) -> None:
        self.arena.hide(slot)
        self.shown.pop(slot, None)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.here)))
        self.arena.free(owner)
        del self.here[owner]
        self.shown = {slot: other for slot, other in self.shown.items() if other != owner}

    @rule()
    def compact(self) -> None:
        self.arena.compact()

    @invariant()
    def every_layer_has_its_weights(self) -> None:
        """Views and tables agree, and both have what is shown. Of an empty slot there are no views, and its
        row is not looked at.
        """
        for name, shape in SHAPES.items():
            layer = self.arena.layer(name)
            for slot in range(SLOTS):
                wanted = packed_of(self.here[self.shown[slot]], name) if slot in self.shown else None
                assert_same(layer.packed[slot], wanted)
                ends = layer.tables.ends[slot].tolist()
                if slot in self.shown:
                    assert ends == [0, *accumulate(wanted.ranks if wanted else [0] * len(shape.outputs))]
                if wanted is not None:
                    offsets = layer.tables.offsets[slot].tolist()
                    found = layer.tables.weights[offsets[0] : offsets[0] + wanted.a.numel()]
                    assert torch.equal(found, wanted.a.flatten())
                    for offset, b in zip(offsets[1:], wanted.b, strict=True):
                        if b is not None:
                            assert torch.equal(layer.tables.weights[offset : offset + b.numel()], b.flatten())
                    assert layer.tables.scales[slot].item() == wanted.scale


TestLoading = Loading.TestCase
TestLoading.settings = settings(max_examples=40, stateful_step_count=25)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 7), st.tuples(st.integers(0, 7), st.integers(0, 60)))))
def test_extents_never_overlap(steps: list[int | tuple[int, int]]) -> None:
    """Takes and releases in any order; what does not fit anywhere fits after compaction."""
    extents = Extents(100)
    for step in steps:
        if isinstance(step, int):
            if step in extents:
                extents.release(step)
        elif step[0] not in extents:
            if step[1] > extents.free:
                with pytest.raises(StorageFullError) as caught:
                    extents.take(*step)
                assert (caught.value.wanted, caught.value.free) == (step[1], extents.free)
            elif extents.take(*step) is None:
                extents.compact()
                assert extents.take(*step) is not None
        here = [extents[owner] for owner in range(8) if owner in extents]
        taken = sorted((extent.begin, extent.end) for extent in here)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
        assert all(0 <= begin <= end <= 100 for begin, end in taken)


class Apart(TorchDispatchMode):  # type: ignore[misc]
    """Lets no copy read memory that it writes to: a GPU does not say in which order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::copy_":
            target, source = (range(one.data_ptr(), one.data_ptr() + one.nbytes) for one in args[:2])
            assert target.stop <= source.start or source.stop <= target.start
        return func(*args, **(kwargs or {}))


def test_compaction_moves_an_adapter_onto_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter longer than the gap before it keeps its contents, in pieces that are longer than it, too."""
    monkeypatch.setattr("lora_fs.kernels.memory.arena.BOUNCE_BYTES", 9 * ALIGN_BYTES)
    arena = new_arena()
    small, large = ({"qkv": weights(SHAPES["qkv"], [rank] * 3, rank)} for rank in (1, 16))
    arena.load(0, pack_slab(SHAPES, small, torch.float32))
    arena.load(1, pack_slab(SHAPES, large, torch.float32))
    arena.free(0)
    with Apart():
        arena.compact()
    found = arena.layer("qkv").packed[1]
    assert found is not None
    assert found.a.storage_offset() == 0
    assert_same(found, packed_of(large, "qkv"))


def test_a_fragmented_arena_makes_room_by_itself() -> None:
    """What fits into all that is free is loaded, though no gap is long enough."""
    slab = pack_slab(SHAPES, {"qkv": weights(SHAPES["qkv"], [8, 8, 8], 1)}, torch.float32)
    arena = new_arena(3 * slab.data.nbytes)
    for slot in range(3):
        arena.load(slot, slab)
    arena.free(0)
    arena.free(2)
    large = {"qkv": weights(SHAPES["qkv"], [14, 14, 14], 2)}
    arena.load(3, pack_slab(SHAPES, large, torch.float32))
    assert_same(arena.layer("qkv").packed[3], packed_of(large, "qkv"))
    assert_same(arena.layer("qkv").packed[1], packed_at(SHAPES["qkv"], slab.places["qkv"], slab.data))


def test_a_compaction_without_memory_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that moves onto itself takes device memory: where there is none, all stay where they are."""
    given = {"qkv": weights(SHAPES["qkv"], [16, 16, 16], 1)}
    small = pack_slab(SHAPES, {"qkv": weights(SHAPES["qkv"], [1, 1, 1], 2)}, torch.float32)
    large = pack_slab(SHAPES, given, torch.float32)
    arena = new_arena(small.data.nbytes + 2 * large.data.nbytes)
    arena.load(0, small)
    arena.load(1, large)
    arena.free(0)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", refuse)
        patch.setattr(torch, "empty_like", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            arena.compact()
    arena.load(2, pack_slab(SHAPES, {"qkv": weights(SHAPES["qkv"], [16, 16, 16], 3)}, torch.float32))
    assert_same(arena.layer("qkv").packed[1], packed_of(given, "qkv"))


def test_what_does_not_fit_is_told_in_numbers() -> None:
    """The error says how much was wanted and how much is free, and nothing has changed."""
    slab = pack_slab(SHAPES, {"qkv": weights(SHAPES["qkv"], [16, 16, 16], 1)}, torch.float32)
    arena = new_arena(slab.data.nbytes + ALIGN_BYTES)
    arena.load(0, slab)
    with pytest.raises(StorageFullError, match=f"^{len(slab.data)} elements do not fit: 32 of") as caught:
        arena.load(1, slab)
    assert caught.value.free * 4 == ALIGN_BYTES
    assert arena.layer("qkv").packed[1] is None


def test_a_slab_for_another_engine_is_refused() -> None:
    """Another type, other layers, or a rank for which no scratch space was planned."""
    arena = new_arena()
    with pytest.raises(ValueError, match="bfloat16"):
        arena.load(0, pack_slab(SHAPES, {}, torch.bfloat16))
    with pytest.raises(ValueError, match="another model"):
        arena.load(0, pack_slab({"odd": SHAPES["odd"]}, {}, torch.float32))
    with pytest.raises(ValueError, match="17"):
        arena.load(0, pack_slab(SHAPES, {"odd": weights(SHAPES["odd"], [17], 1)}, torch.float32))


def test_rows_that_are_whole_vectors_are_told_from_others() -> None:
    """A kernel that takes 16 bytes at a time faults where they do not begin at a multiple."""
    aligned = {name: layer.tables.aligned for name, layer in new_arena().layers.items()}
    assert aligned == {"qkv": True, "odd": False, "embedding": True}
    for begin in (0, 1):
        layer, block = Layer.empty(Shape(8, (8,)), 1), torch.zeros(begin + 64)[begin:]
        layer.put(0, Packed(block[:32].view(4, 8), (block[32:].view(4, 8),), (4,)))
        assert tables_of(layer).aligned is (begin == 0)


def test_who_leaves_is_kept_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host memory would be another adapter's meanwhile."""
    arena, left = new_arena(), list[object]()
    slab = pack_slab(SHAPES, {"odd": weights(SHAPES["odd"], [2], 1)}, torch.float32)
    monkeypatch.setattr(arena._leaving, "add", lambda *of: left.append(of))
    arena.begin(7, slab)
    arena.free(7)
    assert left == [(slab, None)]


def test_a_slot_is_emptied_without_the_device() -> None:
    """Which has no memory while an engine sleeps; who comes next has nothing of what was there."""
    arena = new_arena()
    arena.load(1, pack_slab(SHAPES, {"qkv": weights(SHAPES["qkv"], [4, 0, 9], 1)}, torch.float32))
    written = [tensor._version for tensor in (arena._rows, arena._storage)]
    arena.free(1)
    assert written == [tensor._version for tensor in (arena._rows, arena._storage)]
    assert all(layer.packed[1] is None for layer in arena.layers.values())
    arena._rows.fill_(-1)
    arena.load(1, pack_slab(SHAPES, {"odd": weights(SHAPES["odd"], [2], 1)}, torch.float32))
    assert arena.layer("qkv").tables.ends[1].tolist() == [0, 0, 0, 0]
    assert arena.layer("odd").tables.ends[1].tolist() == [0, 2]
    assert (arena._rows[[0, 2, 3, 4]] == -1).all()


def test_a_device_that_lost_its_memory() -> None:
    """What no load writes is written again, where it was."""
    arena = new_arena()
    tables = [layer.tables.columns for layer in arena.layers.values()]
    addresses = [table.data_ptr() for table in tables]
    for table in tables:
        table.fill_(77)
    arena.restore()
    assert [table.tolist() for table in tables] == [[0, 16, 24, 32], [0, 5], [0, 24]]
    assert addresses == [layer.tables.columns.data_ptr() for layer in arena.layers.values()]


def test_the_torch_backend_works_on_the_arena() -> None:
    """An arena's layer is a layer: its views are what every backend reads."""
    arena = new_arena()
    for slot in (0, 2):
        adapter = {"qkv": weights(SHAPES["qkv"], [4, 0, 9], slot)}
        arena.load(slot, pack_slab(SHAPES, adapter, torch.float32))
    slots = slots_of_rows((2, 3), (-1, 2), (0, 1), (2, 1), (1, 1))
    x, y = make_rows(len(slots), 24, torch.float32), make_rows(len(slots), 32, torch.float32)
    wanted = y.double()
    layer, plan = arena.layer("qkv"), plan_rows(slots)
    reference.linear(wanted, x, layer, plan)
    grouped.linear(y, x, layer, plan)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    assert tables_of(layer) is layer.tables
    assert layer.tables.capacity == 3 * MAX_RANK
