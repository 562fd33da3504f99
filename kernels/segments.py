"""Which rows of a batch belong to which slot, worked out once a step and used by every layer.

Made from runs, one a request, in numpy: the accelerator sorts nothing and waits for
nothing. Rows without an adapter are in no segment, so that no kernel touches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

NO_SLOT = -1


class Segment(NamedTuple):
    """``rows`` rows of one slot that stand one after the other from ``start`` on."""

    slot: int
    start: int
    rows: int


class Together(NamedTuple):
    """A batch with every slot's rows side by side.

    Attributes:
        sorting: int32 ``[T]``: the rows that have an adapter, slot by slot, then the others. None where every
            slot's rows stand together as they are.
        inverse: int32 ``[T]``, undoes ``sorting``.
        pieces: slot and rows of what the batch, sorted if need be, is made of; ``NO_SLOT`` is
            for rows without an adapter.
    """

    sorting: torch.Tensor | None
    inverse: torch.Tensor | None
    pieces: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """The rows of a batch by slot.

    Attributes:
        rows: T, of the batch, rows without an adapter included.
        order: int32 ``[live]``, the batch's rows that have an adapter, slot by slot, in the
            batch's order within a slot.
        table: int32 ``[segments, 3]``: slot, first row in ``order`` and rows of each slot there is.
        most: the rows of the longest segment.
    """

    rows: int
    order: NDArray[np.int32]
    table: NDArray[np.int32]
    most: int

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """``table``, for Python."""
        return tuple(map(Segment._make, self.table.tolist()))

    @cached_property
    def together(self) -> Together:
        """What products of whole segments need, and kernels that find each row for themselves do not."""
        slots, begins, counts = self.table.T
        firsts, lasts = self.order[begins], self.order[begins + counts - 1]
        if bool((lasts - firsts + 1 == counts).all()):
            runs = sorted(zip(firsts.tolist(), slots.tolist(), counts.tolist(), strict=True))
            return Together(None, None, _pieces(runs, self.rows))
        without = np.ones(self.rows, dtype=bool)
        without[self.order] = False
        sorting = np.concatenate([self.order, np.flatnonzero(without).astype(np.int32)])
        inverse = np.empty_like(sorting)
        inverse[sorting] = np.arange(self.rows, dtype=np.int32)
        pieces = _pieces([(start, slot, rows) for slot, start, rows in self.segments], self.rows)
        return Together(torch.from_numpy(sorting), torch.from_numpy(inverse), pieces)


def plan_segments(slots: NDArray[np.integer], lengths: NDArray[np.integer]) -> Plan:
    """Plan a batch.

    Args:
        slots: ``[requests]``, the slot of each; ``NO_SLOT`` means no adapter.
        lengths: ``[requests]``, how many rows each has, in the batch's order.
    """
    if len(slots) == 1:
        return plan_one(int(slots[0]), int(lengths[0]))
    if bool((lengths == 1).all()):
        order = np.argsort(slots, kind="stable").astype(np.int32)
        order = order[np.searchsorted(slots[order], NO_SLOT, side="right") :]
        slot, total = slots[order], len(slots)
        begins = _edges(slot)
        return _planned(total, order, slot[begins], begins)
    starts = np.cumsum(lengths) - lengths
    live = np.flatnonzero((slots != NO_SLOT) & (lengths > 0))
    by_slot = live[np.argsort(slots[live], kind="stable")]
    slot, start, rows = slots[by_slot], starts[by_slot], lengths[by_slot]
    first = _edges(slot)
    begins = (np.cumsum(rows) - rows)[first]
    return _planned(int(lengths.sum()), _expand(start, rows), slot[first], begins)


def _planned(rows: int, order: NDArray[np.int32], slots: NDArray[Any], begins: NDArray[Any]) -> Plan:
    """A plan of what is in order; each slot begins where ``begins`` says."""
    table = np.empty((len(slots), 3), dtype=np.int32)
    counts = _sizes(begins, len(order))
    table[:, 0], table[:, 1], table[:, 2] = slots, begins, counts
    return Plan(rows, order, table, int(counts.max(initial=0)))


def _pieces(runs: list[tuple[int, int, int]], total: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fill what ``(start, slot, rows)`` leave uncovered of ``total`` rows."""
    slots, sizes, at = [], [], 0
    for start, slot, rows in runs:
        if start > at:
            slots.append(NO_SLOT)
            sizes.append(start - at)
        slots.append(slot)
        sizes.append(rows)
        at = start + rows
    if at < total:
        slots.append(NO_SLOT)
        sizes.append(total - at)
    return tuple(slots), tuple(sizes)


def plan_one(slot: int, rows: int) -> Plan:
    """Plan a batch whose rows are all of one slot, or have all no adapter: what most small ones are."""
    live = rows if slot != NO_SLOT else 0
    table = np.array([(slot, 0, live)] if live else [], dtype=np.int32).reshape(-1, 3)
    return Plan(rows, np.arange(live, dtype=np.int32), table, live)


def plan_rows(slots: NDArray[np.integer]) -> Plan:
    """Plan a batch from the slot of each row."""
    begins, lengths = runs_of(slots)
    return plan_segments(slots[begins], lengths)


def runs_of(values: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where each run of equal values begins, and how long it is."""
    begins = _edges(values)
    return begins, _sizes(begins, len(values))


def _edges(values: NDArray[np.integer]) -> NDArray[np.intp]:
    """Where each run of equal values begins. In a third of the time of ``np.diff`` with ``prepend``."""
    begins = np.empty(len(values), dtype=bool)
    begins[:1] = True
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    return np.flatnonzero(begins)


def _sizes(begins: NDArray[np.intp], end: int) -> NDArray[np.intp]:
    """How long each run is that begins so, the last one up to ``end``."""
    sizes = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=sizes[:-1])
    sizes[-1:] = end - begins[-1:]
    return sizes


def _expand(start: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.int32]:
    """``start[0] … start[0] + rows[0] - 1, start[1] …``"""
    offsets = (start - (np.cumsum(rows) - rows)).astype(np.int32)
    found = np.repeat(offsets, rows)
    found += np.arange(len(found), dtype=np.int32)
    return found
