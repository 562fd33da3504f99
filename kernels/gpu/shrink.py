"""x·Aᵀ for every tile, each row by its own adapter's A, all slices at once.

Split along K if there are fewer tiles than processors: every split writes its own fp32 plane,
and ``expand`` adds the planes up in their order. So it zeroes nothing before, adds nothing
atomically, and the sums come out the same every time. Source: Punica, arXiv:2310.18547;
split-K as in vLLM 0.32's ``lora_shrink``, without its atomics.
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
    scratch_of_tile,
    share_of_tile,
    split_inputs,
)


# Layers differ in nothing else than the alignment of their tables: that is no reason to compile again.
@triton.jit(
    do_not_specialize=["programs", "most_parts"],
    do_not_specialize_on_alignment=["offsets_ptr", "ends_ptr"],
)
def shrink_kernel(
    z_ptr,  # fp32 scratch, for the planes
    x_ptr,  # [T, K]
    plan_ptr,  # int32, the plan's block
    weights_ptr,  # what offsets count from
    offsets_ptr,  # int64 [slots, 1 + S]
    ends_ptr,  # int32 [slots, 1 + S]
    inputs,  # K
    programs,  # of this launch, in all
    most_parts,  # the parts of the largest R that a slot may have
    x_stride_m,
    offsets_stride_m,
    ends_stride_m,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    EVEN: tl.constexpr,  # INPUTS divides K
    ALIGN: tl.constexpr,  # every offset is a multiple of so many elements
    EARLY: tl.constexpr,  # launched before the kernel before it has ended, which may write x
    NEXT_EARLY: tl.constexpr,  # the expand may launch before this ends
    INTERPRETED: tl.constexpr,
):
    if NEXT_EARLY and not EARLY:
        gdc_launch_dependents()
    tiles = tl.load(plan_ptr)
    share = share_of_tile(programs, tiles, most_parts, MOST_SPLITS)
    tile = tl.program_id(0) // share
    if tile >= tiles:
        if EARLY:
            gdc_wait()
        return
    member = tl.program_id(0) % share
    row0, rows, slot = load_tile(plan_ptr, tile)
    rank = tl.load(ends_ptr + slot * ends_stride_m + SLICES)
    parts, splits, of_split = split_inputs(share, rank, inputs, RANKS, INPUTS, MOST_SPLITS)
    split = member // tl.maximum(parts, 1)
    if split >= splits:
        if EARLY:
            gdc_wait()
        return
    a_ptr = weights_ptr + tl.multiple_of(tl.load(offsets_ptr + slot * offsets_stride_m), ALIGN)
    batch_rows, live = load_rows(plan_ptr, tiles, row0, rows, ROWS)
    x_rows = x_ptr + batch_rows[:, None] * x_stride_m  # [ROWS, 1]
    begin = split * of_split
    end = tl.minimum(begin + of_split, inputs)
    if EARLY:
        # No program ends without this: who comes later waits for this kernel alone. The expand, which reads
        # y before it waits, begins only when whoever wrote y has ended.
        gdc_wait()
        if NEXT_EARLY:
            gdc_launch_dependents()
    # A share smaller than the parts takes several each.
    for part in range(member % tl.maximum(parts, 1), parts, share):
        ranks = part * RANKS + tl.arange(0, RANKS)
        a_rows = a_ptr + ranks[:, None].to(tl.int64) * inputs  # [RANKS, 1]
        z = tl.zeros([ROWS, RANKS], dtype=tl.float32)
        for k in range(begin, end, INPUTS):
            columns = k + tl.arange(0, INPUTS)[None, :]
            # Masked by rows alone wherever possible: a mask along K would narrow the loads.
            x_mask, a_mask = live[:, None], ranks[:, None] < rank
            if not EVEN:
                x_mask, a_mask = x_mask & (columns < inputs), a_mask & (columns < inputs)
            x = tl.load(x_rows + columns, mask=x_mask, other=0.0)
            a = tl.load(a_rows + columns, mask=a_mask, other=0.0)
            z = multiply(x.to(a.dtype), tl.trans(a), z, INTERPRETED)
        plane = z_ptr + tile * scratch_of_tile(share, most_parts, ROWS, RANKS)
        z_rows = plane + (split * ROWS + tl.arange(0, ROWS)[:, None]) * (parts * RANKS)
        tl.store(z_rows + ranks[None, :], z, mask=live[:, None] & (ranks[None, :] < rank))
