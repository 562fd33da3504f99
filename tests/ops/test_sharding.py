"""Tensor parallelism: the shards' outputs, side by side or summed, are the whole layer's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_fs.kernels import backends
from lora_fs.kernels.memory.arena import Arena
from lora_fs.kernels.segments import NO_SLOT, plan_rows
from lora_fs.kernels.weights.layout import Layer, Packed, Shape, ShapeError, pack
from lora_fs.kernels.weights.sharding import (
    Heads,
    Shard,
    column_bounds,
    column_packed,
    column_shape,
    column_weights,
    row_inputs,
    row_packed,
    row_shape,
    row_weights,
)
from lora_fs.kernels.weights.slabs import Weights, pack_slab
from tests.ops.conftest import EPSILON, make_rows

COUNTS = [2, 4, 8]
BACKENDS = ["reference", "torch"]
# Heads of 4 columns: q has 16; k and v have 2, fewer than most shards, or 8, a whole number for each.
QKV = Shape(64, (64, 8, 8))
WIDE_QKV = Shape(64, (64, 32, 32))
GATE_UP = Shape(64, (96, 96))
COLUMN: list[tuple[Shape, Heads | None]] = [
    (QKV, (16, 2, 2)),
    (WIDE_QKV, (16, 8, 8)),
    (GATE_UP, None),
    (Shape(40, (64,)), None),
]
ROW = [Shape(64, (48,)), Shape(112, (64,))]

batches = st.lists(st.integers(NO_SLOT, 2), min_size=1, max_size=12).map(np.array)
ranks = st.lists(st.sampled_from([0, 1, 3, 8, 33]), min_size=3, max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def make_weights(shape: Shape, of_slices: Sequence[int], dtype: torch.dtype, seed: int) -> Weights:
    """PEFT's shapes; the last slice gets a rank if none has one."""
    random = torch.Generator().manual_seed(seed)
    chosen = list(of_slices[: len(shape.outputs)])
    if not any(chosen):
        chosen[-1] = 4
    a = [torch.randn(r, shape.inputs, generator=random).to(dtype) if r else None for r in chosen]
    b = [
        torch.randn(n, r, generator=random).to(dtype) if r else None
        for r, n in zip(chosen, shape.outputs, strict=True)
    ]
    return Weights(a, b, scale=0.5)


def packed_of(shape: Shape, weights: Weights) -> Packed:
    return pack(shape, weights.a, weights.b, weights.scale)


def layer_of(shape: Shape, slots: Sequence[Packed | None]) -> Layer:
    layer = Layer.empty(shape, len(slots))
    for slot, packed in enumerate(slots):
        layer.put(slot, packed)
    return layer


def magnitude(layer: Layer, x: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """``scale·|z|·|B|`` of every row and column, fp64: what rounding is measured against."""
    positive = layer_of(
        layer.shape,
        [
            None
            if packed is None
            else Packed(packed.a, tuple(None if b is None else b.abs() for b in packed.b), packed.ranks, 0.5)
            for packed in layer.packed
        ],
    )
    reference = backends.backend("reference", "cpu")
    plan = plan_rows(slots)
    sums = torch.zeros(len(slots), layer.shape.width, dtype=torch.float64)
    reference.expand(sums, reference.shrink(x, layer, plan).abs(), positive, plan)
    return sums


def run(name: str, layer: Layer, x: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """A layer's LoRA product alone, fp64 of the reference, else of x's type."""
    dtype = torch.float64 if name == "reference" else x.dtype
    y = torch.zeros(len(slots), layer.shape.width, dtype=dtype)
    backends.backend(name, "cpu").linear(y, x, layer, plan_rows(slots))
    return y


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=5)
@given(
    kind=st.sampled_from(COLUMN),
    slots=batches,
    of_slots=st.lists(ranks, min_size=3, max_size=3),
    dtype=dtypes,
)
def test_column_parallel_is_the_concatenation(
    name: str,
    count: int,
    kind: tuple[Shape, Heads | None],
    slots: np.ndarray,
    of_slots: list[list[int]],
    dtype: torch.dtype,
) -> None:
    """Each shard computes its columns of the whole layer's output, and together all of them."""
    shape, heads = kind
    packed = [packed_of(shape, make_weights(shape, r, dtype, seed)) for seed, r in enumerate(of_slots)]
    whole, x = layer_of(shape, packed), make_rows(len(slots), shape.inputs, dtype)
    wanted, allowed = run("reference", whole, x, slots), magnitude(whole, x, slots)
    starts = np.cumsum((0, *shape.outputs))
    covered = torch.zeros(shape.width, dtype=torch.bool)
    for index in range(count):
        shard = Shard(index, count)
        part = layer_of(
            column_shape(shape, shard, heads), [column_packed(shape, one, shard, heads) for one in packed]
        )
        columns = torch.cat(
            [
                torch.arange(start + low, start + high)
                for start, (low, high) in zip(starts, column_bounds(shape, shard, heads), strict=False)
            ]
        )
        found = run(name, part, x, slots).double()
        epsilon = 2.0**-40 if name == "reference" else EPSILON[dtype]
        bound = epsilon * (wanted[:, columns].abs() + allowed[:, columns]) + 1e-5
        assert bool(((found - wanted[:, columns]).abs() <= bound).all())
        covered[columns] = True
    assert bool(covered.all())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=5)
@given(
    shape=st.sampled_from(ROW),
    slots=batches,
    of_slots=st.lists(ranks, min_size=3, max_size=3),
    dtype=dtypes,
)
def test_row_parallel_is_the_sum(
    name: str, count: int, shape: Shape, slots: np.ndarray, of_slots: list[list[int]], dtype: torch.dtype
) -> None:
    """Every shard takes its inputs; the outputs' sum is the whole layer's, within each one's rounding."""
    packed = [packed_of(shape, make_weights(shape, r, dtype, seed)) for seed, r in enumerate(of_slots)]
    whole, x = layer_of(shape, packed), make_rows(len(slots), shape.inputs, dtype)
    total = torch.zeros(len(slots), shape.width, dtype=torch.float64)
    bound = torch.full_like(total, 1e-5)
    for index in range(count):
        shard = Shard(index, count)
        part = layer_of(row_shape(shape, shard), [row_packed(shape, one, shard) for one in packed])
        mine = row_inputs(x, shape, shard)
        found = run(name, part, mine, slots).double()
        epsilon = 2.0**-40 if name == "reference" else EPSILON[dtype]
        bound += epsilon * (found.abs() + magnitude(part, mine, slots)) + 1e-5
        total += found
    assert bool(((total - run("reference", whole, x, slots)).abs() <= bound).all())


@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=6)
@given(kind=st.sampled_from(COLUMN), of_slices=ranks)
def test_packed_and_files_are_cut_alike(
    count: int, kind: tuple[Shape, Heads | None], of_slices: list[int]
) -> None:
    """Cutting PEFT's tensors and packing gives the numbers that packing and cutting gives."""
    shape, heads = kind
    weights = make_weights(shape, of_slices, torch.float32, 3)
    for shard in (Shard(index, count) for index in range(count)):
        whole = packed_of(shape, weights)
        pairs = [(column_weights(shape, weights, shard, heads), column_packed(shape, whole, shard, heads))]
        shapes = [column_shape(shape, shard, heads)]
        if shape.inputs % count == 0:
            pairs.append((row_weights(shape, weights, shard), row_packed(shape, whole, shard)))
            shapes.append(row_shape(shape, shard))
        for (files, cut), small in zip(pairs, shapes, strict=True):
            packed = packed_of(small, files)
            assert packed.ranks == cut.ranks
            assert torch.equal(packed.a, cut.a)
            for one, other in zip(packed.b, cut.b, strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(one, other)


def test_heads_fewer_than_shards_are_replicated() -> None:
    """Of 2 heads over 8 shards, four neighbours hold each; q is cut into eighths all the same."""
    of_shards = [column_bounds(QKV, Shard(index, 8), (16, 2, 2)) for index in range(8)]
    assert [bounds[0] for bounds in of_shards] == [(8 * index, 8 * index + 8) for index in range(8)]
    assert [bounds[1] for bounds in of_shards] == [(0, 4)] * 4 + [(4, 8)] * 4
    assert column_shape(QKV, Shard(5, 8), (16, 2, 2)) == Shape(64, (8, 4, 4))


def test_a_shard_fits_an_arena() -> None:
    """Views of the files, not copies, are packed into the slab that an engine loads."""
    shapes = {"qkv": column_shape(QKV, Shard(1, 4), (16, 2, 2)), "o": row_shape(ROW[0], Shard(1, 4))}
    qkv = make_weights(QKV, [8, 4, 2], torch.float32, 0)
    o = make_weights(ROW[0], [5], torch.float32, 1)
    adapter = {
        "qkv": column_weights(QKV, qkv, Shard(1, 4), (16, 2, 2)),
        "o": row_weights(ROW[0], o, Shard(1, 4)),
    }
    assert qkv.b[0] is not None
    assert adapter["qkv"].b[0] is not None
    assert adapter["qkv"].b[0].untyped_storage().data_ptr() == qkv.b[0].untyped_storage().data_ptr()
    arena = Arena(shapes, slots=1, size_bytes=1 << 16, max_rank=16, dtype=torch.float32)
    arena.load(0, pack_slab(shapes, adapter, torch.float32))
    slots, x = np.array([0, 0]), make_rows(2, 64, torch.float32)
    whole = run("reference", layer_of(QKV, [packed_of(QKV, qkv)]), x, slots)
    torch.testing.assert_close(
        run("torch", arena.layer("qkv"), x, slots).double(),
        torch.cat([whole[:, 16:32], whole[:, 64:68], whole[:, 72:76]], 1),
        rtol=1e-5,
        atol=1e-4,
    )


def test_what_cannot_be_cut_is_named() -> None:
    """Columns or heads that the shards do not divide, an embedding's vocabulary, another layer's weights."""
    with pytest.raises(ShapeError, match="slice 0: 6 columns for 4 shards"):
        column_shape(Shape(8, (6,)), Shard(0, 4))
    with pytest.raises(ShapeError, match="slice 1: 24 columns of 6 heads for 4 shards"):
        column_shape(Shape(8, (16, 24)), Shard(0, 4), (4, 6))
    with pytest.raises(ShapeError, match="the inputs: 6 columns for 4 shards"):
        row_shape(Shape(6, (8,)), Shard(0, 4))
    with pytest.raises(ShapeError, match="vocabulary"):
        row_shape(Shape(8, (8,), lookup=True), Shard(0, 2))
    with pytest.raises(ShapeError, match="heads of 1 slices for a layer of 2"):
        column_shape(GATE_UP, Shard(0, 2), (4,))
    weights = make_weights(GATE_UP, [4, 4], torch.float32, 0)
    with pytest.raises(ShapeError, match="2 A and 2 B for a layer of 1 slices"):
        column_weights(ROW[0], weights, Shard(0, 2))
    with pytest.raises(ShapeError, match="B of slice 0 has 96 rows, and the layer 64"):
        column_weights(Shape(64, (64, 96)), weights, Shard(0, 2))
    with pytest.raises(ShapeError, match="A has 64 inputs, and the layer 32"):
        row_weights(Shape(32, (96, 96)), weights, Shard(0, 2))
    with pytest.raises(ValueError, match="shard 2 of 2"):
        Shard(2, 2)
