"""Which tiles a launch is made of. Every one is right for every batch; these should be fast.

Some sizes of half types were chosen by what each gave alone on an H100, of an 8B model's layers
(docs/kernels.md); the others follow from the bytes under way, and nobody timed them. A test checks what the
compiler makes of them: no spills, 16-byte loads, and room on a processor for all programs that a launch
counts on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, log2, sqrt

import torch

from lora_fs.kernels.gpu.plan import FEWEST_ROWS
from lora_fs.kernels.weights.layout import Shape

# More planes cost the expand more to read than the shrink gains.
MOST_SPLITS = 16
# An H100's, as predicted: from a load to its data, and what its second cache gives all processors.
LATENCY_NS = 800.0
CACHE_BYTES_PER_NS = 5500.0
# What a program on an H100 may have. On an A100 it is 163 KiB; on an L4, an L40S or an RTX 4090 99.
SHARED_BYTES = 227 << 10
# Of a batch that splits are chosen for: tiles with an adapter.
USUAL_TILES = 8


@dataclass(frozen=True, slots=True)
class Shrink:
    """A program's piece of ``[rows, inputs] · [ranks, inputs]ᵀ``.

    Attributes:
        rows: of the plan's tiles.
        programs: the most of a launch; no more than run at once.
        early: launch while the kernel before still runs (programmatic dependent launch, sm_90).
    """

    rows: int
    ranks: int
    inputs: int
    programs: int
    warps: int = 4
    stages: int = 3
    most_splits: int = MOST_SPLITS
    early: bool = False


@dataclass(frozen=True, slots=True)
class Expand:
    """A program's piece of ``[rows, ranks] · [ranks, columns]``.

    Attributes:
        rows: a divisor of those of the plan's tiles.
        programs: the most of a launch; no more than run at once.
        early: launch while the shrink still runs, and let the next kernel do so.
    """

    rows: int
    ranks: int
    columns: int
    programs: int
    warps: int = 4
    stages: int = 2
    early: bool = False


@cache
def configs_for(
    shape: Shape,
    rows: int,
    capacity: int,
    dtype: torch.dtype,
    processors: int,
    shared_bytes: int,
    early: bool = False,
) -> tuple[Shrink, Expand]:
    """Choose the two launches of a layer; every step of every layer asks.

    Args:
        rows: of the plan's tiles.
        capacity: the largest R that a slot may have, over all slices.
        processors: of the device.
        shared_bytes: the most that a program may have there.
        early: whether it can launch a kernel before the one before it has ended.
    """
    slices = shape.outputs
    expand = expand_config(rows, -(-capacity // len(slices)), slices, dtype, processors)
    blocks = sum(-(-width // expand.columns) for width in slices)
    shrink = shrink_config(rows, capacity, shape.inputs, blocks, dtype, processors, shared_bytes)
    # A step of large tiles is not bound by launches: there it cost more than it gained.
    early = early and rows == FEWEST_ROWS
    return replace(shrink, early=early), replace(expand, early=early)


def shrink_config(
    rows: int,
    rank: int,
    inputs: int,
    blocks: int,
    dtype: torch.dtype,
    processors: int,
    shared_bytes: int,
) -> Shrink:
    """Choose a shrink.

    Args:
        rows: of a tile.
        rank: the largest R that a slot may have, over all slices.
        inputs: K.
        blocks: of columns that the expand has, over all slices: each reads all planes of a tile.
        processors: of the device.
        shared_bytes: has room for as many blocks of x and A as a program has stages.
    """
    wide = dtype == torch.float32
    if rows == FEWEST_ROWS:
        ranks = 16 if rank <= 16 else 32
        k = 64 if wide else 256 if inputs % 256 == 0 else 128
        warps, stages, waves = 4, 3, 3
    else:
        # In half types one such program has as much under way as a processor can get of the memory.
        ranks = min(_power(rank), 32 if wide else 64 if rows == 64 else 128)
        k = 32 if wide else 64
        warps, stages, waves = 8 if rows == 128 else 4, 2 if wide else 4, 1
        if wide and rows * ranks <= 2048:
            waves = 2
        if rows == 128 and not wide and ranks <= 64:
            deep = 4 if ranks <= 32 else 3  # what an A100's shared memory has room for
            if deep * (rows + ranks) * 128 * dtype.itemsize <= shared_bytes:
                k, stages = 128, deep
    k = _dividing(k, inputs)
    stages = max(2, min(stages, shared_bytes // ((rows + ranks) * k * dtype.itemsize)))
    total = -(-inputs // k)
    if rows == FEWEST_ROWS:
        splits = min(MOST_SPLITS, _power_below(total // (stages - 1)))
        # One block more under way where a split has more of them, and they are small.
        stages += not wide and ranks == 16 and total > splits * (stages - 1)
    else:
        splits = most_splits(rows * ranks, total, blocks, stages - 1)
    return Shrink(rows, ranks, k, waves * processors, warps, stages, splits)


def most_splits(plane: int, inputs: int, blocks: int, under_way: int) -> int:
    """The most planes that a tile's inputs are worth, a power of two.

    A plane more shortens the shrink and lengthens the expand, every program of which reads all planes. The
    sum is least at the root of what one plane takes by what another costs.

    Args:
        plane: fp32 numbers in one.
        inputs: blocks of K.
        blocks: of N, each of which reads every plane.
        under_way: blocks of K that a program loads at once; no split has fewer.
    """
    reading_ns = USUAL_TILES * plane * 4 * blocks / CACHE_BYTES_PER_NS
    best = sqrt(LATENCY_NS * inputs / (under_way * reading_ns))
    rounded: int = 1 << max(0, round(log2(best)))
    while rounded > 1 and rounded * under_way > inputs:
        rounded //= 2
    return min(rounded, MOST_SPLITS)


def expand_config(
    rows: int, rank: int, outputs: Sequence[int], dtype: torch.dtype, processors: int
) -> Expand:
    """Choose an expand.

    Args:
        rows: of a tile, which this one cuts into pieces. Small ones let many programs have their y under
            way at once.
        rank: the largest that one slice may have.
        outputs: N of each slice.
    """
    if dtype == torch.float32:
        ranks, columns, warps = 16, 64, 4 if rows == 16 else 8
        waves = 4 if rows == 16 else 2
        return Expand(min(rows, 64), ranks, _dividing(columns, gcd(*outputs)), waves * processors, warps)
    ranks = min(_power(rank), 64)
    if rows > FEWEST_ROWS and ranks > 16:
        # Small pieces would read so much of B once for each.
        return Expand(64, ranks, _dividing(64, gcd(*outputs)), 2 * processors)
    # Ranks up to 16 are one block, with nothing to load ahead.
    waves, warps, stages = (4, 4, 1) if ranks == 16 else (2, 8, 2)
    return Expand(FEWEST_ROWS, ranks, _dividing(256, gcd(*outputs)), waves * processors, warps, stages)


def _power(rank: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


def _dividing(block: int, length: int) -> int:
    """The block, or a half or quarter of it that divides the length; else the block.

    Not below 16, which is the least that a product takes.
    """
    sizes = (block, block // 2, block // 4)
    return next((size for size in sizes if size >= 16 and length % size == 0), block)


def _power_below(number: int) -> int:
    """The power of two that is not above it, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
