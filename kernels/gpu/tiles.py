"""What every kernel does alike: share a batch's tiles among programs, read a tile, multiply, round.

Of a shrink's ``programs``, each tile gets an equal share. A tile's share is divided first by its
adapter's ranks, ``RANKS`` rows of A a part, then by the inputs: a rank-8 adapter is split along K
into many, a rank-512 one into few, in the same launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton compiles these functions; what their arguments are is said beside them.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share_of_tile(programs, tiles, most_parts, MOST_SPLITS: tl.constexpr):
    """The programs that each of so many tiles gets: at least one, and none that no tile has work for.

    So those with work are the first of a launch, and processors get one each before any gets two.
    """
    return tl.minimum(tl.maximum(programs // tl.maximum(tiles, 1), 1), most_parts * MOST_SPLITS)


@triton.jit
def split_inputs(share, rank, inputs, RANKS: tl.constexpr, INPUTS: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Divide a tile's share.

    Returns:
        the parts of the ranks, the splits of the inputs, the inputs of a split (a multiple of INPUTS).
    """
    parts = tl.cdiv(rank, RANKS)
    blocks = tl.cdiv(inputs, INPUTS)
    wanted = tl.minimum(tl.maximum(share // tl.maximum(parts, 1), 1), MOST_SPLITS)
    blocks_of_split = tl.cdiv(blocks, wanted)
    return parts, tl.cdiv(blocks, blocks_of_split), blocks_of_split * INPUTS


@triton.jit
def scratch_of_tile(share, most_parts, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """The floats of scratch space that each tile has: a ``[ROWS, RANKS]`` for all that it may write."""
    return tl.maximum(share, most_parts).to(tl.int64) * (ROWS * RANKS)


@triton.jit
def load_tile(plan_ptr, tile):
    """``row0, rows, slot`` of a tile. The block's layout is that of ``plan``."""
    at = plan_ptr + 1 + 3 * tile
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def load_rows(plan_ptr, tiles, row0, rows, ROWS: tl.constexpr):
    """The batch's rows of a tile, int64 ``[ROWS]``, and which of them there are."""
    offsets = tl.arange(0, ROWS)
    live = offsets < rows
    return tl.load(plan_ptr + 1 + 3 * tiles + row0 + offsets, mask=live, other=0).to(tl.int64), live


@triton.jit
def narrow(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 to ``dtype``, to the nearest; the interpreter cuts off instead (Triton 3.9, bf16)."""
    if INTERPRETED and value.dtype == tl.float32 and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def multiply(left, right, product, INTERPRETED: tl.constexpr):
    """``product + left · right``; in fp32 in the interpreter, whose bf16 products are nonsense."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, product, input_precision="ieee")
