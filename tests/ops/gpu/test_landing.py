"""Slots of padded stacks, filled from the device: the same bits, and no more than three operations a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_fs.kernels.gpu import scatter as kernel
from lora_fs.kernels.memory import landing
from lora_fs.kernels.memory.extents import StorageFullError
from lora_fs.kernels.memory.landing import NOTHING, Landing, Piece
from lora_fs.kernels.weights.layout import Shape
from lora_fs.kernels.weights.slabs import Draft, Slab, Weights
from tests.ops.gpu.conftest import DEVICE

SHAPES = {"qkv": Shape(24, (16, 8, 8)), "o": Shape(16, (24,)), "odd": Shape(7, (5,))}
SLOTS, MOST = 3, 8
Ranks = Mapping[str, Sequence[int]]
VIEWS = ("aten::slice", "aten::narrow", "aten::as_strided", "aten::view", "aten::select", "aten::detach")


def outline(ranks: Ranks, seed: int) -> Draft:
    """Weights of an adapter, as ``stacks`` lays them out: B by its rows, and scaled."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, of_slices in ranks.items():
        shape = SHAPES[name]
        a = [torch.randn(r, shape.inputs, generator=random) if r else None for r in of_slices]
        b = [
            torch.randn(n, r, generator=random) if r else None
            for r, n in zip(of_slices, shape.outputs, strict=True)
        ]
        found[name] = Weights(a, b, 0.5)
    return Draft.of(SHAPES, found, torch.float32, finished=True)


def packed(draft: Draft) -> Slab:
    pinned = DEVICE.type == "cuda"
    return draft.slab(torch.empty(draft.outline.elements, dtype=torch.float32, pin_memory=pinned))


def slab(ranks: Ranks, seed: int) -> Slab:
    return packed(outline(ranks, seed))


def pieces(one: Slab) -> Iterator[Piece]:
    """Of each slice of each layer A's and B's."""
    for name, shape in SHAPES.items():
        of_layer, begin = one.views.get(name), 0
        for part in range(len(shape.outputs)):
            b = None if of_layer is None else of_layer.b[part]
            if of_layer is None or b is None:
                yield from (NOTHING, NOTHING)
                continue
            rank = of_layer.ranks[part]
            yield Piece(of_layer.a.storage_offset() + begin * shape.inputs, rank, shape.inputs)
            yield Piece(b.storage_offset(), b.shape[1], rank)
            begin += rank


@pytest.fixture
def stacks() -> list[torch.Tensor]:
    found = []
    for shape in SHAPES.values():
        for width in shape.outputs:
            found.append(torch.zeros(SLOTS, 1, MOST, shape.inputs, device=DEVICE))
            found.append(torch.zeros(SLOTS, 1, width, MOST, device=DEVICE))
    return found


def wanted(one: Slab, stacks: list[torch.Tensor]) -> list[torch.Tensor]:
    """A slot that holds an adapter and zeros."""
    found = [torch.zeros_like(stack[0, 0], device="cpu") for stack in stacks]
    for target, piece in zip(found, pieces(one), strict=True):
        flat = one.data[piece.offset : piece.offset + piece.rows * piece.columns]
        target[: piece.rows, : piece.columns] = flat.view(piece.rows, piece.columns)
    return found


def assert_slot(stacks: list[torch.Tensor], slot: int, one: Slab) -> None:
    for stack, values in zip(stacks, wanted(one, stacks), strict=True):
        assert torch.equal(stack[slot, 0].cpu(), values)


class Counted(TorchDispatchMode):  # type: ignore[misc]
    """What a device would be asked to do: every operation that is no view, and every launch."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.startswith(VIEWS):
            self.done.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    mode, launch = Counted(), kernel.scatter

    def scatter(*args: Any, **kwargs: Any) -> None:
        mode.done.append("launch")
        with torch.utils._python_dispatch._disable_current_modes():
            launch(*args, **kwargs)

    monkeypatch.setattr(kernel, "scatter", scatter)
    return mode


FULL = {"qkv": (4, 0, 8), "o": (8,), "odd": (3,)}
SMALL = {"qkv": (1, 2, 0)}


def test_a_slot_holds_the_adapter_and_zeros(stacks: list[torch.Tensor]) -> None:
    """After any other, of other ranks and layers; slots beside it are left alone."""
    shore = Landing(stacks, 1 << 16, pieces)
    large, small = slab(FULL, 1), slab(SMALL, 2)
    shore.fill(0, large, whole=True)
    shore.fill(1, large, whole=True)
    assert_slot(stacks, 0, large)
    shore.fill(1, small, whole=True)
    assert_slot(stacks, 0, large)
    assert_slot(stacks, 1, small)
    assert not any(stack[2].any() for stack in stacks)


def test_the_next_of_a_kind_is_written_where_the_last_was(stacks: list[torch.Tensor]) -> None:
    """Nothing is zeroed for it."""
    shore = Landing(stacks, 1 << 16, pieces)
    first = outline(FULL, 1)
    one, other = packed(first), packed(Draft(first.outline, first.dtype, outline(FULL, 2).sources))
    shore.fill(0, one, whole=True)
    stacks[0][0, 0, -1, -1] = 7  # beyond the adapter's rank
    shore.fill(0, other, whole=False)
    assert stacks[0][0, 0, -1, -1] == 7
    stacks[0][0, 0, -1, -1] = 0
    assert_slot(stacks, 0, other)


def test_an_adapter_is_one_copy_and_its_slot_one_launch(stacks: list[torch.Tensor], counted: Counted) -> None:
    """Its copy begins when it is brought, and the step that needs it launches; alike or not, nothing else."""
    shore = Landing(stacks, 1 << 16, pieces)
    first = outline(FULL, 1)
    one, alike = packed(first), packed(Draft(first.outline, first.dtype, outline(FULL, 2).sources))
    shore.bring(one)  # the first of a kind says where its kind's weights are
    counted.done.clear()
    with counted:
        shore.bring(alike)
    assert counted.done == ["aten::copy_"]
    counted.done.clear()
    with counted:
        shore.bring(alike)
        shore.fill(0, alike, whole=True)
        shore.fill(1, one, whole=False)
    assert counted.done == ["launch", "launch"]
    assert_slot(stacks, 0, alike)


def test_an_adapter_that_nobody_brought_is_a_copy_and_a_launch(
    stacks: list[torch.Tensor], counted: Counted
) -> None:
    """No more than three operations, in the step itself."""
    shore = Landing(stacks, 1 << 16, pieces)
    first = outline(FULL, 1)
    shore.fill(0, packed(first), whole=True)
    late = packed(Draft(first.outline, first.dtype, outline(FULL, 3).sources))
    counted.done.clear()
    with counted:
        shore.fill(1, late, whole=True)
    assert counted.done == ["aten::copy_", "launch"]
    assert_slot(stacks, 1, late)


def test_who_stays_needs_no_copy(stacks: list[torch.Tensor], counted: Counted) -> None:
    """Where there is no gap somebody has to be dropped, whom the caller chooses."""
    made = [slab(FULL, seed) for seed in range(3)]
    shore = Landing(stacks, 2 * made[0].data.nbytes, pieces)
    for one in made[:2]:
        shore.bring(one)
    with pytest.raises(StorageFullError):
        shore.bring(made[2])
    shore.drop(made[1])
    shore.bring(made[2])
    counted.done.clear()
    with counted:
        for slot, one in enumerate((made[0], made[2])):
            shore.fill(slot, one, whole=True)
    assert counted.done == ["launch", "launch"]
    for slot, one in enumerate((made[0], made[2])):
        assert_slot(stacks, slot, one)


def test_what_is_dropped_or_lost_is_copied_again(stacks: list[torch.Tensor], counted: Counted) -> None:
    """A slot filled from it stays as it is; after a sleep nothing is taken for being there."""
    shore = Landing(stacks, 1 << 16, pieces)
    one = slab(FULL, 1)
    for dropped in (True, False):
        shore.fill(0, one, whole=True)
        if dropped:
            shore.drop(one)
        else:
            for lost in (shore._targets, *(table for _, table in shore._kinds.values())):
                lost.zero_()
            shore.lose()
        assert_slot(stacks, 0, one)
        for lost in (shore._pool, *(stack[1] for stack in stacks)):
            lost.fill_(torch.nan)
        counted.done.clear()
        with counted:
            shore.fill(1, one, whole=True)
        assert "aten::copy_" in counted.done
        assert_slot(stacks, 1, one)


def test_an_adapter_that_could_not_be_brought_takes_no_room(
    stacks: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device has no memory left for the table of the first of a kind: it is brought later."""
    one = slab(FULL, 1)
    shore = Landing(stacks, one.data.nbytes, pieces)

    def refuse(_: Slab) -> Iterator[Piece]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(shore, "_pieces", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            shore.bring(one)
    shore.fill(0, one, whole=True)
    assert_slot(stacks, 0, one)


def test_the_tables_of_a_few_kinds_are_kept(
    stacks: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were used last."""
    monkeypatch.setattr(landing, "KINDS_KEPT", 2)
    shore = Landing(stacks, 1 << 16, pieces)
    first, second, third = (slab({"o": (rank,)}, rank) for rank in (1, 2, 3))
    for one in (first, second, first, third):
        shore.bring(one)
        shore.drop(one)
    assert list(shore._kinds) == [id(first.places), id(third.places)]


def test_what_is_larger_than_all_the_room_is_refused(stacks: list[torch.Tensor]) -> None:
    """Nobody goes for it."""
    small, large = slab(SMALL, 1), slab(FULL, 2)
    shore = Landing(stacks, small.data.nbytes, pieces)
    shore.bring(small)
    with pytest.raises(StorageFullError):
        shore.bring(large)
    assert id(small) in shore._landed
