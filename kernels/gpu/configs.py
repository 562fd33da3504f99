"""Which tiles a launch is made of. Every one is right for every batch; these should be fast.

Nobody timed them: the sizes follow from the bytes under way, and a check of what the compiler
makes of them (no spills, 16-byte loads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

# Programs for each processor: of a shrink, to have loads enough under way; of an expand, to keep
# it busy while some write.
SHRINK_WAVES = 3
EXPAND_WAVES = 8
# More planes cost the expand more to read than the shrink gains.
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Shrink:
    """A program's piece of ``[rows, inputs] · [ranks, inputs]ᵀ``."""

    rows: int
    ranks: int
    inputs: int
    programs: int
    warps: int = 4
    stages: int = 3
    most_splits: int = MOST_SPLITS


@dataclass(frozen=True, slots=True)
class Expand:
    """A program's piece of ``[rows, ranks] · [ranks, columns]``.

    Attributes:
        early: launch while the shrink still runs (programmatic dependent launch, sm_90). Not the
            default until somebody times it.
    """

    rows: int
    ranks: int
    columns: int
    programs: int
    warps: int = 4
    stages: int = 2
    early: bool = False


def shrink_config(rows: int, rank: int, inputs: int, dtype: torch.dtype, processors: int) -> Shrink:
    """Choose a shrink.

    Args:
        rows: of a tile.
        rank: the largest R that a slot may have, over all slices.
        inputs: K.
        processors: of the device.
    """
    wide = dtype == torch.float32
    if rows == 16:
        ranks = 16 if rank <= 16 else 32
        k = 64 if wide else 256 if inputs % 256 == 0 else 128
        return Shrink(rows, ranks, _dividing(k, inputs), SHRINK_WAVES * processors)
    ranks = min(_power(rank), 32 if wide else 64 if rows == 64 else 128)
    k = 32 if wide else 64
    warps = 8 if rows == 128 else 4
    return Shrink(rows, ranks, _dividing(k, inputs), 2 * processors, warps, 2 if wide else 4)


def expand_config(
    rows: int, rank: int, outputs: Sequence[int], dtype: torch.dtype, processors: int
) -> Expand:
    """Choose an expand.

    Args:
        rank: the largest that one slice may have.
        outputs: N of each slice.
    """
    wide = dtype == torch.float32
    if wide:
        # 16 ranks of 128 rows would spill (Triton 3.9, sm_90).
        ranks, columns = 32 if rows == 128 else 16, 64
    else:
        ranks = min(_power(rank), 64 if rows == 16 else 32)
        columns = 256 if rows == 16 and sum(outputs) >= 16384 else 128
    common = gcd(*outputs)
    warps = 8 if rows == 128 or (wide and rows > 16) else 4
    return Expand(rows, ranks, _dividing(columns, common), EXPAND_WAVES * processors, warps)


def _power(rank: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


def _dividing(block: int, length: int) -> int:
    """The block, or a half or quarter of it that divides the length; else the block.

    Not below 16, which is the least that a product takes.
    """
    sizes = (block, block // 2, block // 4)
    return next((size for size in sizes if size >= 16 and length % size == 0), block)
