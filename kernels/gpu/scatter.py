"""From an adapter's one block on the device to every padded stack of a slot, in one launch.

Each program takes a share of one stack, 16 bytes at a time where rows are multiples of that. The same launch
zeroes what the adapter does not write. It skips that if the adapter before wrote to the same places.
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
    WHOLE: tl.constexpr,  # zero the places that no weight covers
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements in 16 bytes
):
    stack = tl.program_id(0)
    target = targets_ptr + stack * 4
    address, slot_stride = tl.load(target), tl.load(target + 1)
    rows, columns = tl.load(target + 2), tl.load(target + 3)
    source = sources_ptr + stack * 3
    offset, live_rows, live_columns = tl.load(source), tl.load(source + 1), tl.load(source + 2)
    high = rows if WHOLE else live_rows
    width = columns if WHOLE else live_columns
    y_stacks = address.to(tl.pointer_type(block_ptr.dtype.element_ty))
    uneven = offset % VECTOR + live_columns % VECTOR + columns % VECTOR + slot_stride % VECTOR
    if uneven + address % 16 == 0:  # every row is whole vectors, here and there
        # What the compiler cannot see: the stacks, and each row, begin at whole vectors.
        y_stacks = tl.multiple_of(address.to(tl.pointer_type(block_ptr.dtype.element_ty)), 16)
        lanes = tl.arange(0, VECTOR)[None, :]
        share: tl.constexpr = BLOCK // VECTOR
        of_row = width // VECTOR
        for first in range(tl.program_id(1) * share, high * of_row, tl.num_programs(1) * share):
            index = first + tl.arange(0, share)
            inside = index < high * of_row
            row, column = index // of_row, index % of_row * VECTOR
            live = inside & (row < live_rows) & (column < live_columns)
            x_begin = tl.multiple_of(row * live_columns + column + offset, VECTOR)
            y_begin = tl.multiple_of(row * columns + column + slot * slot_stride, VECTOR)
            x = tl.load(block_ptr + x_begin[:, None] + lanes, mask=live[:, None], other=0.0)
            tl.store(y_stacks + y_begin[:, None] + lanes, x, mask=inside[:, None])
    else:
        for first in range(tl.program_id(1) * BLOCK, high * width, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            inside = index < high * width
            row, column = index // width, index % width
            live = inside & (row < live_rows) & (column < live_columns)
            x = tl.load(block_ptr + offset + row * live_columns + column, mask=live, other=0.0)
            tl.store(y_stacks + slot * slot_stride + row * columns + column, x, mask=inside)


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
    sizes = {"BLOCK": BLOCK, "VECTOR": 16 // block.itemsize}
    scatter_kernel[grid](block, targets, sources, slot, WHOLE=whole, **sizes, num_warps=4)
