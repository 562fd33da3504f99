"""From an adapter's one block on the device to every padded stack of a slot, in one launch.

Each program takes a share of one stack. What the adapter does not write is zeroed in the same launch. It is
left where the adapter before wrote to the same places.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

TARGET_FIELDS = 4  # address of the stack, elements of a slot, rows and columns of a slot
SOURCE_FIELDS = 3  # offset in the block, rows and columns that the adapter has; 0, 0 and 0 of none
PROGRAMS = 16  # a stack
BLOCK = 1024


@triton.jit(do_not_specialize=["slot"])
def scatter_kernel(
    block_ptr,  # the adapter's
    targets_ptr,  # int64 [stacks, TARGET_FIELDS]
    sources_ptr,  # int64 [stacks, SOURCE_FIELDS]
    slot,
    WHOLE: tl.constexpr,  # zero what is not written
    BLOCK: tl.constexpr,
):
    stack = tl.program_id(0)
    target = targets_ptr + stack * 4
    address, slot_stride = tl.load(target), tl.load(target + 1)
    rows, columns = tl.load(target + 2), tl.load(target + 3)
    source = sources_ptr + stack * 3
    offset, live_rows, live_columns = tl.load(source), tl.load(source + 1), tl.load(source + 2)
    high = rows if WHOLE else live_rows
    width = columns if WHOLE else live_columns
    y_ptr = address.to(tl.pointer_type(block_ptr.dtype.element_ty)) + slot * slot_stride
    x_ptr = block_ptr + offset
    for first in range(tl.program_id(1) * BLOCK, high * width, tl.num_programs(1) * BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < high * width
        row, column = index // width, index % width
        live = inside & (row < live_rows) & (column < live_columns)
        x = tl.load(x_ptr + row * live_columns + column, mask=live, other=0.0)
        tl.store(y_ptr + row * columns + column, x, mask=inside)


def scatter(
    block: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor, slot: int, *, whole: bool
) -> None:
    """Fill a slot of every stack.

    Args:
        block: ``[elements]``, of the stacks' type.
        targets: int64 ``[stacks, TARGET_FIELDS]``.
        sources: int64 ``[stacks, SOURCE_FIELDS]``.
        whole: zero what the adapter does not write.
    """
    grid = (targets.shape[0], PROGRAMS)
    scatter_kernel[grid](block, targets, sources, slot, WHOLE=whole, BLOCK=BLOCK, num_warps=4)
