"""The page-locked arena of the host tier: extents never overlap, all come back, nothing is locked later."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_fs.kernels.memory.leaving import Leaving
from lora_fs.kernels.memory.pinned import PAGE_BYTES, PinnedMemory, powers_of_two
from lora_fs.kernels.weights.layout import Shape
from lora_fs.kernels.weights.slabs import Slab, Weights, pack_slab

PAGES = 23


class Locked:
    """Stands in for the system, which locks nothing without a GPU, and counts what it is asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size_bytes: int) -> torch.Tensor:
        self.sizes.append(size_bytes)
        return torch.zeros(size_bytes, dtype=torch.uint8)


def span(data: torch.Tensor) -> tuple[int, int]:
    return data.data_ptr(), data.data_ptr() + data.nbytes


@given(st.integers(0, 1 << 45))
def test_an_arena_is_few_powers_of_two(size: int) -> None:
    """As torch locks them: no more than an eighth beyond what is wanted, but for the first page."""
    found = powers_of_two(size)
    assert len(found) <= 5
    assert all(one & (one - 1) == 0 for one in found)
    assert found == sorted(set(found), reverse=True)
    assert size <= sum(found) <= max(size + size // 8, PAGE_BYTES * -(-size // PAGE_BYTES), PAGE_BYTES)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 9), st.integers(0, 12 * PAGE_BYTES)))))
def test_extents_never_overlap_and_all_come_back(steps: list[int | tuple[int, int]]) -> None:
    """Any order of loads and unloads, of any sizes; nothing is locked after the start."""
    locked = Locked()
    memory = PinnedMemory(PAGES * PAGE_BYTES, locked)
    parts, whole = list(locked.sizes), memory.size_bytes
    spans = [span(part.memory) for part in memory._parts]
    held: dict[int, torch.Tensor] = {}

    def load(owner: int, size: int) -> None:
        free, gaps = memory.free_bytes, len(held) + len(parts)
        data = held[owner] = memory.empty(size, torch.uint8).fill_(owner)
        inside = any(begin <= data.data_ptr() and span(data)[1] <= end for begin, end in spans)
        # Every gap is smaller than a request that fails; there are no more gaps than extents and parts.
        assert inside or not size or memory.taken_bytes(size) * gaps > free
        assert memory.free_bytes == free - (memory.taken_bytes(size) if inside else 0)

    for step in steps:
        held.pop(step if isinstance(step, int) else step[0], None)
        if not isinstance(step, int):
            load(*step)
        taken = sorted(span(one) for one in held.values() if one.nbytes)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert all((data == owner).all() for owner, data in held.items())
    held.clear()
    assert memory.free_bytes == whole
    # Coalesced: each part is one gap again.
    every = [memory.empty(size, torch.uint8) for size in parts]
    assert memory.free_bytes == 0
    assert sorted(map(span, every)) == sorted(spans)
    assert locked.sizes == parts


@given(st.integers(1, 5), st.lists(st.integers(0, 40), max_size=60))
def test_adapters_of_one_size_leave_no_holes(pages: int, steps: list[int]) -> None:
    """Whoever leaves, another one of the size fits in its place."""
    memory = PinnedMemory(32 * PAGE_BYTES, Locked())
    room = 32 // pages
    held = [memory.empty(pages * PAGE_BYTES, torch.uint8) for _ in range(room)]
    free = memory.free_bytes
    for step in steps:
        held.pop(step % room)
        held.append(memory.empty(pages * PAGE_BYTES, torch.uint8))
        assert memory.free_bytes == free


def test_an_extent_is_taken_until_its_last_view_is_gone() -> None:
    """A slab's views are tensors of their own; the arena outlives its owner, too."""
    memory = PinnedMemory(4 * PAGE_BYTES, Locked())
    data = memory.empty(PAGE_BYTES // 4, torch.float32)
    view = data[3:].view(-1)
    whole = memory.size_bytes
    del data
    assert memory.free_bytes == whole - PAGE_BYTES
    view.fill_(7)
    arena = weakref.ref(memory._parts[0])
    del memory
    gc.collect()
    assert arena() is not None
    assert (view == 7).all()
    del view
    gc.collect()
    assert arena() is None


def test_an_adapter_that_finds_no_gap_is_in_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    """It is served all the same, the log tells, and no memory is locked for it."""
    locked = Locked()
    memory = PinnedMemory(4 * PAGE_BYTES, locked)
    begin, end = span(memory._parts[0].memory)
    kept = [memory.empty(PAGE_BYTES, torch.uint8) for _ in range(4)]
    del kept[1], kept[1]
    there = memory.empty(2 * PAGE_BYTES, torch.uint8)
    assert begin <= there.data_ptr() < end
    assert not caplog.records
    elsewhere = memory.empty(PAGE_BYTES + 1, torch.uint8)
    assert not begin <= elsewhere.data_ptr() < end
    assert "page-locked" in caplog.text
    assert len(locked.sizes) == 1


def test_memory_that_cannot_be_locked_is_told() -> None:
    """As torch tells it where there is no device."""

    def refuse(size_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(MemoryError, match="12288 bytes of page-locked memory: CUDA error"):
        PinnedMemory(3 * PAGE_BYTES, refuse)


class Copied:
    """An event of a device's."""

    done = False

    def query(self) -> bool:
        return self.done


def slab_in(memory: PinnedMemory) -> Slab:
    draft = pack_slab({"o": Shape(64, (32,))}, {"o": weights()}, torch.float32)
    data = memory.empty(draft.data.numel(), torch.float32)
    return Slab(data, draft.places, {}, draft.row)


def weights() -> Weights:
    return Weights([torch.ones(8, 64)], [torch.ones(32, 8)])


def test_what_the_device_still_copies_is_nobody_elses() -> None:
    """An adapter that leaves before it has arrived keeps its extent until then."""
    memory = PinnedMemory(4 * PAGE_BYTES, Locked())
    leaving, copied = Leaving(), Copied()
    leaving.add(slab_in(memory), copied)
    taken = memory.size_bytes - memory.free_bytes
    assert taken > 0
    leaving.add(slab_in(memory), None)
    leaving.clear()
    assert (len(leaving), memory.size_bytes - memory.free_bytes) == (1, taken)
    copied.done = True
    leaving.clear()
    assert (len(leaving), memory.free_bytes) == (0, memory.size_bytes)
