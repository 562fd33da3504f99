"""The loops of the CPU's backend, compiled by numba: rows against their adapters' weights.

Four rows at a time, a row left over by itself. Rows stay where they are and nothing is gathered: callers pass
rows by number and weights by address, since numba needs longer to look at an array than a small product
takes. Between A and B everything is fp32.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit

from lora_fs.kernels.cpu import tiles
from lora_fs.kernels.cpu.tiles import (
    LANES,
    RANKS,
    RANKS_OF_ONE,
    ROWS,
    VECTORS,
    VECTORS_OF_ONE,
    expand_four,
    expand_one,
    expand_thin,
    narrow,
    pointer,
    shrink_four,
    shrink_one,
    wide,
)

logger = logging.getLogger(__name__)

# Numbers of a row of x at a time, and rows that B is read for at once: what they take stays in the nearest
# cache.
DEEP = 2048
TOGETHER = 32


@njit
def _padded(rank: int) -> Any:
    return (rank + RANKS_OF_ONE - 1) // RANKS_OF_ONE * RANKS_OF_ONE


@njit
def _shrink(z: Any, x: Any, block: Any, a: Any, weights: Any) -> None:
    """``z[:rows]``, each slice's ranks from a multiple of RANKS_OF_ONE on. ``weights``: a slot's row."""
    rows, inputs = len(block), a.shape[1]
    z[:rows] = 0
    for low in range(0, inputs, DEEP):
        high = min(inputs, low + DEEP)
        whole = (high - low) // LANES * LANES
        of_x = x.ctypes.data + low * x.itemsize, x.shape[1], block.ctypes.data, rows
        first = begin = 0
        for place in range(2, len(weights), 2):
            end = first + weights[place]
            for rank in range(first, end, RANKS_OF_ONE if rows == 1 else RANKS):
                at = begin + rank - first
                of_z = z.ctypes.data + 4 * at, z.shape[1]
                of_a = weights[1] + (rank * inputs + low) * a.itemsize, inputs, end - rank
                if rows == 1:
                    shrink_one(*of_z, *of_x, *of_a, whole, x, a)
                else:
                    shrink_four(*of_z, *of_x, *of_a, whole, x, a)
            for k in range(low + whole, high):
                for row in range(rows):
                    for rank in range(first, end):
                        z[row, begin + rank - first] += wide(x[block[row], k]) * wide(a[rank, k])
            first, begin = end, begin + _padded(end - first)


@njit
def _expand_number(
    y: Any, block: Any, z: Any, at: int, b: Any, left: int, n: int, scale: Any, add: bool
) -> None:
    """The number at ``n`` of a slice that begins at ``left``, of each row of y."""
    for row in range(len(block)):
        total = np.float32(0)
        for rank in range(b.shape[0]):
            total += z[row, at + rank] * wide(b[rank, n])
        number = block[row], left + n
        before = wide(y[number]) if add else np.float32(0)
        y[number] = narrow(before + scale * total, y[number])


@njit
def _step(more: int, rows: int) -> int:
    """How many numbers of rows of y are done at a time, of so many that are left."""
    for step in (LANES * VECTORS_OF_ONE if rows == 1 else LANES * VECTORS, LANES * VECTORS, LANES):
        if step <= more:
            return step
    return 1


@njit
def _segment(
    y: Any, x: Any, block: Any, z: Any, a: Any, weights: Any, outputs: Any, scale: Any, add: bool
) -> None:
    """One adapter's product with up to TOGETHER rows."""
    rows, y_apart, z_apart = len(block), y.shape[1], z.shape[1]
    y_at, z_at, order_at = y.ctypes.data, z.ctypes.data, block.ctypes.data
    for row in range(0, rows, ROWS):
        _shrink(z[row:], x, block[row : row + ROWS], a, weights)
    left = at = 0
    for part, width in enumerate(outputs):
        rank, b_at = weights[2 + 2 * part], weights[3 + 2 * part]
        b = carray(pointer(b_at), (rank, width), a.dtype)
        n = 0
        while n < width and (rank or not add):
            step = _step(width - n, rows)
            if step == 1:
                _expand_number(y, block, z, at, b, left, n, scale, add)
            for row in range(0, rows if step > 1 else 0, ROWS):
                of_y = y_at + (left + n) * y.itemsize, y_apart, order_at + 4 * row, rows - row
                of_z = z_at + 4 * (row * z_apart + at), z_apart
                of_b = b_at + n * b.itemsize, width, rank
                if step == LANES * VECTORS_OF_ONE:
                    expand_one(*of_y, *of_z, *of_b, scale, add, y, b)
                elif step == LANES * VECTORS:
                    expand_four(*of_y, *of_z, *of_b, scale, add, y, b)
                else:
                    expand_thin(*of_y, *of_z, *of_b, scale, add, y, b)
            n += step
        at, left = at + _padded(rank), left + width


def _kept(function: Any) -> Any:
    """Compile on the first call, and let numba keep it where it keeps such things, if it may write there.

    numba checks whether this file changed. It compiles ``tiles`` along, whose hash is in the name.
    """
    function.__qualname__ += "-" + hashlib.sha256(Path(tiles.__file__).read_bytes()).hexdigest()[:16]
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:  # no folder for it
        logger.debug("what is compiled is not kept: %s", error)
        return njit(nogil=True)(function)


@_kept
def linear(
    y_at: int, y_apart: int, x_at: int, x_apart: int, rows: int, inputs: int, of_rows: Any, of_weights: Any,
    outputs: Any, weights: Any, scales: Any, segments: Any, order: Any, add: bool,
) -> None:  # fmt: skip
    """Every segment's product.

    Args:
        y_at, x_at: addresses of ``[rows, ≥ N]`` and ``[rows, ≥ K]``; ``y_apart``, ``x_apart``: from one row
            to the next, in numbers.
        rows, inputs: T and K.
        of_rows, of_weights: empty arrays of what numbers they are of.
        outputs: int64, N of each slice.
        weights: int64 ``[slots, 2 + 2 × slices]``: R, or -1 of an empty slot, the address of A, and of each
            slice its rank and the address of its B.
        scales: fp32 ``[slots]``.
        segments, order: as the plan has them.
        add: to y; else overwrite y where a row has an adapter.
    """
    y = carray(pointer(y_at), (rows, y_apart), of_rows.dtype)
    x = carray(pointer(x_at), (rows, x_apart), of_rows.dtype)
    most = widest = 0
    for slot, _, count in segments:
        padded = 0
        for place in range(2, weights.shape[1], 2):
            padded += _padded(weights[slot, place])
        widest, most = max(widest, padded), max(most, min(count, TOGETHER))
    z = np.empty((most + ROWS, widest), np.float32)
    for slot, start, count in segments:
        if weights[slot, 0] < 0:
            continue
        a = carray(pointer(weights[slot, 1]), (weights[slot, 0], inputs), of_weights.dtype)
        for begin in range(start, start + count, TOGETHER):
            block = order[begin : min(begin + TOGETHER, start + count)]
            _segment(y, x, block, z, a, weights[slot], outputs, scales[slot], add)
