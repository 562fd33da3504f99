"""A plan where kernels read it: one block of numbers at an address that stays.

``[tiles | (row0, rows, slot) for each tile | order]``, int32. A tile is up to ``tile_rows`` rows of
one slot, ``order[row0 : row0 + rows]`` of the batch. Kernels read the number of tiles from the
block, so that a captured graph computes whatever the block holds at the replay.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lora_fs.kernels.segments import Plan

HEADER = 1
FIELDS = 3
# The rows that a tensor core multiplies at once; small batches, which graphs capture, always have such tiles.
FEWEST_ROWS = 16
SMALL_ROWS = 512
LARGE_ROWS = 4096
# Copies that may be under way during the write of the next block.
RING = 2


def tile_rows(plan: Plan, rows: int, small_rows: int = SMALL_ROWS) -> int:
    """The rows of a tile that suit a batch; of one up to ``small_rows`` without a look at its contents."""
    live = len(plan.order)
    if rows <= small_rows or live <= FEWEST_ROWS * len(plan.table):
        return FEWEST_ROWS
    return 64 if live < LARGE_ROWS else 128


def tiles_of(capacity: int, small_rows: int) -> tuple[int, ...]:
    """The rows of a tile that batches of up to ``capacity`` rows may get."""
    large = (64,) if capacity < LARGE_ROWS else (64, 128)
    return (FEWEST_ROWS, *large) if capacity > small_rows else (FEWEST_ROWS,)


def most_tiles(rows: int, slots: int, of_rows: int) -> int:
    """How many tiles a batch can have at most."""
    return min(rows, -(-rows // of_rows) + min(slots, rows))


def make_block(plan: Plan, of_rows: int) -> NDArray[np.int32]:
    """Write a plan out as kernels read it."""
    slot, start, count = plan.table.T
    if plan.most > of_rows:
        pieces = -(-count // of_rows)
        nth = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        slot, left = np.repeat(slot, pieces), np.repeat(count, pieces) - nth * of_rows
        start, count = np.repeat(start, pieces) + nth * of_rows, np.minimum(left, of_rows)
    block = np.empty(HEADER + FIELDS * len(slot) + len(plan.order), dtype=np.int32)
    block[0] = len(slot)
    tiles = block[HEADER : HEADER + FIELDS * len(slot)].reshape(-1, FIELDS)
    tiles[:, 0], tiles[:, 1], tiles[:, 2] = start, count, slot
    block[HEADER + FIELDS * len(slot) :] = plan.order
    return block


class DevicePlan:
    """The current step's plan on the device. Made once; every step uploads its own.

    Args:
        small_rows: batches of so many rows always have the same tiles; at least as many as a graph captures.
    Attributes:
        block: int32, at the same address for ever.
        rows: T of the batch last uploaded, padding of a captured graph included.
        tile_rows: of the batch last uploaded.
        tiles: the most tiles that a batch of so many rows can have: what a launch is made for.
    """

    def __init__(
        self, rows: int, slots: int, device: torch.device | str, small_rows: int = SMALL_ROWS
    ) -> None:
        self.capacity = rows
        self.small_rows = small_rows
        self.slots = slots
        self.rows = 0
        self.tile_rows = FEWEST_ROWS
        self.tiles = 0
        size = HEADER + FIELDS * most_tiles(rows, slots, FEWEST_ROWS) + rows
        # A first block of no tiles: a launch before the first upload does nothing.
        self.block = torch.zeros(size, dtype=torch.int32, device=device)
        cuda = self.block.is_cuda
        self._hosts = [torch.empty(size, dtype=torch.int32, pin_memory=cuda) for _ in range(RING)]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(RING)]
        self._turn = 0

    def upload(self, plan: Plan, rows: int | None = None, tile: int | None = None) -> None:
        """Make ``plan`` what the launches from now on, and replays, work on; one copy, not waited for.

        Args:
            rows: of the batch as kernels see it, if padded; else the plan's.
            tile: rows of a tile, instead of the batch's best. A replay needs the captured one: up to
                ``small_rows`` that is always the same.
        Raises:
            ValueError: the batch has more rows or slots than this was made for.
        """
        rows = plan.rows if rows is None else rows
        of_rows = tile_rows(plan, rows, self.small_rows) if tile is None else tile
        if not plan.rows <= rows <= self.capacity or len(plan.table) > self.slots:
            raise ValueError(
                f"{plan.rows} rows of {len(plan.table)} slots, padded to {rows}; there is room for "
                f"{self.capacity} rows and {self.slots} slots"
            )
        block = make_block(plan, of_rows)
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            # Two uploads ago: already past if the host waits for a step's results.
            copied.synchronize()
        host.numpy()[: len(block)] = block
        self.block[: len(block)].copy_(host[: len(block)], non_blocking=True)
        if copied is not None:
            copied.record()
        self._turn = (self._turn + 1) % RING
        self.rows, self.tile_rows = rows, of_rows
        self.tiles = most_tiles(rows, self.slots, of_rows)


def on_device(plan: Plan | DevicePlan, device: torch.device) -> DevicePlan:
    """The plan on the device. Uploads an absent one for this call alone."""
    if isinstance(plan, DevicePlan):
        return plan
    uploaded = DevicePlan(plan.rows, max(1, len(plan.table)), device)
    uploaded.upload(plan)
    return uploaded
