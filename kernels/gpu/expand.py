"""y += scale · z·B for every tile, each row by its own adapter's B, all slices in one launch.

Every program takes a piece of a tile and a block of columns of one slice, then the next. A piece is ``ROWS``
of the plan's ``TILE_ROWS`` rows: how many rows the shrink takes at once is its own matter. z has one
of two sources: the planes of a split shrink, or the rows of A for an embedding's tokens. Source: Punica,
arXiv:2310.18547.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton compiles these functions; what their arguments are is said beside them.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_fs.kernels.gpu.tiles import (
    load_rows,
    load_tile,
    multiply,
    narrow,
    scratch_of_tile,
    share_of_tile,
    split_inputs,
)


@triton.jit
def find_slice(columns_ptr, block, SLICES: tl.constexpr, COLUMNS: tl.constexpr):
    """The slice that a block of columns belongs to, and the first block of that slice."""
    index, first, before = 0, 0, 0
    for i in tl.static_range(SLICES - 1):
        width = tl.load(columns_ptr + i + 1) - tl.load(columns_ptr + i)
        before += tl.cdiv(width, COLUMNS)
        index = tl.where(block >= before, i + 1, index)
        first = tl.where(block >= before, before, first)
    return index, first


@triton.jit
def sum_planes(
    z_rows,
    ranks,
    live,
    high,
    splits,
    plane,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """The planes' sum, always in the same order, fp32 ``[ROWS, RANKS]``; 0 from rank ``high`` on."""
    # Planes under way at once: no more than there may be, or than registers have room for.
    FITTING: tl.constexpr = 4 if ROWS * RANKS <= 512 else 2 if ROWS * RANKS <= 1024 else 1
    UNROLL: tl.constexpr = FITTING if FITTING < MOST_SPLITS else MOST_SPLITS
    z = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    for split in range(0, splits, UNROLL):
        for i in tl.static_range(UNROLL):
            # Not a scalar mask: the interpreter (Triton 3.9) makes integers of one.
            end = tl.where(split + i < splits, high, 0)
            z_ptrs = z_rows + (split + i) * plane + ranks[None, :]
            z += tl.load(z_ptrs, mask=live[:, None] & (ranks[None, :] < end), other=0.0)
    return z


@triton.jit(
    do_not_specialize=["programs", "most_parts", "blocks"],
    do_not_specialize_on_alignment=["offsets_ptr", "ends_ptr", "scales_ptr", "columns_ptr"],
)
def expand_kernel(
    y_ptr,  # [T, N]
    z_ptr,  # fp32: the planes; not read if LOOKUP
    tokens_ptr,  # int64 [T] if LOOKUP
    plan_ptr,  # int32, the plan's block
    weights_ptr,  # what offsets count from
    offsets_ptr,  # int64 [slots, 1 + S]
    ends_ptr,  # int32 [slots, 1 + S]
    scales_ptr,  # fp32 [slots, 1]
    columns_ptr,  # int32 [1 + S]
    blocks,  # of columns, over all slices
    inputs,  # K, programs and most_parts: those of the shrink that wrote the planes
    programs,
    most_parts,
    y_stride_m,
    offsets_stride_m,
    ends_stride_m,
    scales_stride_m,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # of the plan's tiles, and so of the planes; a multiple of ROWS
    PLANE_RANKS: tl.constexpr,  # RANKS, INPUTS, MOST_SPLITS of the shrink
    PLANE_INPUTS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    LOOKUP: tl.constexpr,  # z is a row of A for each token
    EARLY: tl.constexpr,  # launched before the shrink has ended, and the next kernel before this one
    ADD: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides every slice's N
    ALIGN: tl.constexpr,  # every offset is a multiple of so many elements
    INTERPRETED: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    tiles = tl.load(plan_ptr)
    share = share_of_tile(programs, tiles, most_parts, MOST_SPLITS)
    of_tile = TILE_ROWS // ROWS
    for item in range(tl.program_id(0), tiles * of_tile * blocks, tl.num_programs(0)):
        piece, block = item // blocks, item % blocks
        tile, above = piece // of_tile, piece % of_tile * ROWS
        row0, rows, slot = load_tile(plan_ptr, tile)
        index, first_block = find_slice(columns_ptr, block, SLICES, COLUMNS)
        rank = tl.load(ends_ptr + slot * ends_stride_m + SLICES)
        low = tl.load(ends_ptr + slot * ends_stride_m + index)
        high = tl.load(ends_ptr + slot * ends_stride_m + index + 1)
        # A slice of rank 0 adds nothing; overwritten it becomes 0, unless the slot has no weights.
        # A tile that is not full may have no rows left for this piece.
        if ((high > low) if ADD else (rank > 0)) & (above < rows):
            start = tl.multiple_of(tl.load(columns_ptr + index), ALIGN)
            width = tl.multiple_of(tl.load(columns_ptr + index + 1) - start, ALIGN)
            b_offset = tl.load(offsets_ptr + slot * offsets_stride_m + 1 + index)
            b_ptr = weights_ptr + tl.multiple_of(b_offset, ALIGN)
            batch_rows, live = load_rows(plan_ptr, tiles, row0 + above, rows - above, ROWS)
            local = (block - first_block) * COLUMNS + tl.arange(0, COLUMNS)
            y_ptrs = y_ptr + batch_rows[:, None] * y_stride_m + (start + local)[None, :]
            # Masked by rows alone wherever possible: a mask along N would narrow the loads.
            y_mask = live[:, None]
            if not EVEN:
                y_mask = y_mask & (local < width)[None, :]
            if LOOKUP:
                tokens = tl.load(tokens_ptr + batch_rows, mask=live, other=0)
                a_ptr = weights_ptr + tl.load(offsets_ptr + slot * offsets_stride_m)
                z_rows = a_ptr + tokens[:, None] * rank
            else:
                parts, splits, of_split = split_inputs(
                    share, rank, inputs, PLANE_RANKS, PLANE_INPUTS, MOST_SPLITS
                )
                pad = parts * PLANE_RANKS
                planes = z_ptr + tile * scratch_of_tile(share, most_parts, TILE_ROWS, PLANE_RANKS)
                z_rows = planes + (above + tl.arange(0, ROWS)[:, None]) * pad
            # Now, to be on its way during the sum of the planes and the product.
            if ADD:
                old = tl.load(y_ptrs, mask=y_mask, other=0.0)
            product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for r in range(low, high, RANKS):
                ranks = r + tl.arange(0, RANKS)
                b_mask = ranks[:, None] < high
                if not EVEN:
                    b_mask = b_mask & (local < width)[None, :]
                b_rows = b_ptr + (ranks - low)[:, None].to(tl.int64) * width
                b = tl.load(b_rows + local[None, :], mask=b_mask, other=0.0)
                if EARLY:
                    # What comes before, y and the weights included, is not the shrink's.
                    gdc_wait()
                if LOOKUP:
                    z_mask = live[:, None] & (ranks[None, :] < high)
                    z = tl.load(z_rows + ranks[None, :], mask=z_mask, other=0.0)
                else:
                    z = sum_planes(
                        z_rows, ranks, live, high, splits, TILE_ROWS * pad, ROWS, RANKS, MOST_SPLITS
                    )
                product = multiply(narrow(z, b.dtype, INTERPRETED), b, product, INTERPRETED)
            product *= tl.load(scales_ptr + slot * scales_stride_m)
            if ADD:
                product += old.to(tl.float32)
            tl.store(y_ptrs, narrow(product, y_ptr.dtype.element_ty, INTERPRETED), mask=y_mask)
    if EARLY:
        # Whoever comes after this waits for this alone, and may write where the shrink still works.
        gdc_wait()
