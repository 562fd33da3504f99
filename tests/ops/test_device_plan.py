"""The block that kernels read, and the sizes that launches are made of; no kernel runs here."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_fs.kernels.gpu import DevicePlan
from lora_fs.kernels.gpu.configs import MOST_SPLITS, SHARED_BYTES, configs_for, most_splits
from lora_fs.kernels.gpu.plan import FEWEST_ROWS, SMALL_ROWS, make_block, most_tiles, tile_rows, tiles_of
from lora_fs.kernels.segments import plan_rows
from lora_fs.kernels.weights.layout import Shape
from tests.ops.conftest import slots_of_rows

runs = st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 90)), max_size=12)


def read_block(block: np.ndarray) -> dict[int, int]:
    """The slot of each row that has one, as a kernel would find it."""
    tiles = block[0]
    order = block[1 + 3 * tiles :]
    found: dict[int, int] = {}
    for row0, rows, slot in block[1 : 1 + 3 * tiles].reshape(-1, 3).tolist():
        for row in order[row0 : row0 + rows].tolist():
            assert row not in found
            found[row] = slot
    return found


@settings(max_examples=150)
@given(runs=runs, of_rows=st.sampled_from([16, 64, 128]))
def test_the_block_says_what_the_plan_says(runs: list[tuple[int, int]], of_rows: int) -> None:
    """Every row with an adapter is in one tile of its slot, tiles are no larger than they may be."""
    slots = slots_of_rows(*runs).astype(np.int64)
    block = make_block(plan_rows(slots), of_rows)
    assert read_block(block) == {row: slot for row, slot in enumerate(slots.tolist()) if slot >= 0}
    sizes = block[1 : 1 + 3 * block[0]].reshape(-1, 3)[:, 1]
    assert ((sizes >= 1) & (sizes <= of_rows)).all()
    assert block[0] <= most_tiles(len(slots), 6, of_rows)


@settings(max_examples=50)
@given(st.lists(runs, min_size=2, max_size=4))
def test_uploads_follow_each_other_at_one_address(batches: list[list[tuple[int, int]]]) -> None:
    """The buffer stays where it is; every upload replaces the last, longer or shorter."""
    uploaded = DevicePlan(12 * 90, 6, "cpu")
    address = uploaded.block.data_ptr()
    for batch in batches:
        plan = plan_rows(slots_of_rows(*batch).astype(np.int64))
        uploaded.upload(plan)
        wanted = make_block(plan, uploaded.tile_rows)
        assert uploaded.block.data_ptr() == address
        assert (uploaded.block[: len(wanted)].numpy() == wanted).all()
        assert wanted[0] <= uploaded.tiles


def test_a_small_batch_always_has_the_same_tiles() -> None:
    """What a graph was captured with is what its replay gets, whatever the plan."""
    for rows in (1, 64, SMALL_ROWS):
        for slots in (np.zeros(rows, dtype=np.int64), np.full(rows, -1), np.arange(rows) % 6):
            assert tile_rows(plan_rows(slots), rows) == FEWEST_ROWS


def test_graphs_may_be_captured_of_larger_batches() -> None:
    """The bound is then theirs, and no captured launch is replayed with other tiles."""
    uploaded = DevicePlan(4096, 2, "cpu", 1024)
    for rows in (SMALL_ROWS + 1, 1024):
        uploaded.upload(plan_rows(np.zeros(rows, dtype=np.int64)))
        assert (uploaded.tile_rows, uploaded.tiles) == (FEWEST_ROWS, most_tiles(rows, 2, FEWEST_ROWS))
    uploaded.upload(plan_rows(np.zeros(1025, dtype=np.int64)))
    assert uploaded.tile_rows == 64


def test_a_large_batch_of_few_adapters_has_large_tiles() -> None:
    """And one of short requests has small ones, which waste less."""
    assert tile_rows(plan_rows(np.zeros(2048, dtype=np.int64)), 2048) == 64
    assert tile_rows(plan_rows(np.zeros(16384, dtype=np.int64)), 16384) == 128
    assert tile_rows(plan_rows(np.repeat(np.arange(128), 8)), 1024) == 16


@pytest.mark.parametrize("capacity", [SMALL_ROWS, SMALL_ROWS + 1, 4095, 4096, 5000])
def test_every_tile_that_a_batch_gets_is_known_before(capacity: int) -> None:
    """And no other: a step that meets an unknown one compiles it, which takes seconds."""
    batches = {rows for rows in (1, SMALL_ROWS, SMALL_ROWS + 1, 4095, 4096, capacity) if rows <= capacity}
    found = {tile_rows(plan_rows(np.zeros(rows, dtype=np.int64)), rows) for rows in batches}
    assert found == {*tiles_of(capacity, SMALL_ROWS)}


def test_a_plan_that_does_not_fit_is_refused() -> None:
    """More rows or slots than the buffers were made for, or more rows than the padded batch."""
    uploaded = DevicePlan(8, 2, "cpu")
    for slots, rows in ((np.zeros(9, dtype=np.int64), None), (np.arange(3), None), (np.zeros(4, int), 3)):
        with pytest.raises(ValueError, match="slots"):
            uploaded.upload(plan_rows(slots), rows)


@settings(max_examples=300)
@given(
    rows=st.sampled_from([16, 64, 128]),
    rank=st.integers(1, 2048),
    inputs=st.integers(1, 20000),
    outputs=st.lists(st.integers(1, 40000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    shared_kib=st.sampled_from([227, 163, 99, 64]),  # a program's on an H100, an A100, an L4, a T4
)
def test_every_shape_has_a_configuration(
    rows: int, rank: int, inputs: int, outputs: list[int], dtype: torch.dtype, shared_kib: int
) -> None:
    """Blocks are powers of two, none below what a product takes; an expand's rows divide a plan's tile.

    What a shrink loads ahead has room in the shared memory of any GPU.
    """
    shape = Shape(inputs, tuple(outputs))
    shrink, expand = configs_for(shape, rows, rank, dtype, 132, shared_kib << 10)
    ahead = shrink.stages * (shrink.rows + shrink.ranks) * shrink.inputs * dtype.itemsize
    assert ahead <= shared_kib << 10
    assert shrink.rows == rows
    assert rows % expand.rows == 0
    for size in (shrink.ranks, shrink.inputs, expand.rows, expand.ranks, expand.columns):
        assert size >= 16
        assert size & (size - 1) == 0


@given(
    rows=st.sampled_from([16, 64, 128]),
    ranks=st.sampled_from([16, 32, 64, 128]),
    inputs=st.integers(1, 1000),
    blocks=st.integers(1, 2000),
    under_way=st.integers(1, 4),
)
def test_splits_follow_from_k_and_n(rows: int, ranks: int, inputs: int, blocks: int, under_way: int) -> None:
    """The more columns read each plane, the fewer; a split has no less of K than a program loads at once."""
    splits = most_splits(rows * ranks, inputs, blocks, under_way)
    assert splits in (1, 2, 4, 8, MOST_SPLITS)
    assert splits == 1 or splits * under_way <= inputs
    assert most_splits(rows * ranks, inputs, blocks + 1, under_way) <= splits
    assert most_splits(rows * ranks, inputs + 1, blocks, under_way) >= splits


def test_splits_of_a_models_layers() -> None:
    """Of 16-row tiles of an 8B model: so many that a program has all its part of K under way at once."""
    layers = {
        "qkv": Shape(4096, (4096, 1024, 1024)),
        "gate_up": Shape(4096, (14336, 14336)),
        "down": Shape(14336, (4096,)),
    }
    ranks = {name: 16 * len(shape.outputs) for name, shape in layers.items()}
    found = {
        name: configs_for(shape, 16, ranks[name], torch.bfloat16, 132, SHARED_BYTES)
        for name, shape in layers.items()
    }
    splits = {name: shrink.most_splits for name, (shrink, _) in found.items()}
    assert splits == {"qkv": 8, "gate_up": 8, "down": 16}


def test_small_tiles_launch_early_where_the_device_can() -> None:
    """Large ones do not: they are not bound by launches."""
    shape = Shape(4096, (4096,))
    for rows, able in product((16, 64, 128), (True, False)):
        shrink, expand = configs_for(shape, rows, 16, torch.bfloat16, 132, SHARED_BYTES, able)
        assert shrink.early == expand.early == (able and rows == 16)
