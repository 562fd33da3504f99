"""The plan of a batch: every live row once, slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.kernels.segments import NO_SLOT, Plan, plan_one, plan_rows, plan_segments

runs = st.lists(st.tuples(st.integers(NO_SLOT, 5), st.integers(0, 4)), max_size=12)


def planned(batch: list[tuple[int, int]]) -> tuple[Plan, np.ndarray]:
    slots = np.array([slot for slot, _ in batch], dtype=np.int64)
    lengths = np.array([rows for _, rows in batch], dtype=np.int64)
    return plan_segments(slots, lengths), np.repeat(slots, lengths)


@given(runs)
def test_segments_name_each_live_row_once(batch: list[tuple[int, int]]) -> None:
    """Under its slot, in the batch's order."""
    plan, of_rows = planned(batch)
    assert plan.rows == len(of_rows)
    assert sorted(plan.order) == list(np.flatnonzero(of_rows != NO_SLOT))
    assert [segment.slot for segment in plan.segments] == sorted({*of_rows.tolist()} - {NO_SLOT})
    for slot, start, rows in plan.segments:
        assert list(plan.order[start : start + rows]) == list(np.flatnonzero(of_rows == slot))


@given(runs)
def test_pieces_cover_the_batch(batch: list[tuple[int, int]]) -> None:
    """Sorted or as it is, every row is in one piece, of its slot."""
    plan, of_rows = planned(batch)
    sorting, inverse, (slots, sizes) = plan.together
    assert sum(sizes) == plan.rows
    rows = of_rows
    if sorting is not None and inverse is not None:
        rows = of_rows[sorting]
        assert list(sorting[inverse]) == list(range(plan.rows))
    assert list(np.repeat(np.array(slots, dtype=int), np.array(sizes, dtype=int))) == list(rows)
    assert len([slot for slot in slots if slot != NO_SLOT]) == len(plan.segments)


@given(runs)
def test_rows_and_runs_give_the_same_plan(batch: list[tuple[int, int]]) -> None:
    """A row at a time or a request at a time."""
    plan, of_rows = planned(batch)
    by_row = plan_rows(of_rows)
    assert by_row.segments == plan.segments
    assert list(by_row.order) == list(plan.order)
    assert by_row.together.pieces == plan.together.pieces


@pytest.mark.parametrize("lengths", [[1] * 99, [1, 2] * 33])
def test_a_large_batch_keeps_the_order_of_each_slots_rows(lengths: list[int]) -> None:
    """From 17 requests on numpy's usual sort does not."""
    plan, of_rows = planned([(request % 3, rows) for request, rows in enumerate(lengths)])
    for slot, start, rows in plan.segments:
        assert list(plan.order[start : start + rows]) == list(np.flatnonzero(of_rows == slot))


@given(st.integers(NO_SLOT, 5), st.integers(0, 4), st.integers(0, 4))
def test_one_request_is_planned_as_two_halves_of_it(slot: int, one: int, other: int) -> None:
    """By a shorter way."""
    plan, halves = plan_one(slot, one + other), plan_segments(np.array([slot] * 2), np.array([one, other]))
    assert (plan.rows, plan.segments, plan.most) == (halves.rows, halves.segments, halves.most)
    for one_way, other_way in ((plan.order, halves.order), (plan.table, halves.table)):
        np.testing.assert_array_equal(one_way, other_way, strict=True)
    assert plan.together == halves.together
    assert plan.together.sorting is plan.together.inverse is None


def test_a_batch_whose_slots_stand_together_is_left_in_place() -> None:
    """Nothing is sorted, also with rows without an adapter in between."""
    plan = plan_segments(np.array([2, NO_SLOT, 0, 0]), np.array([3, 2, 1, 1]))
    assert plan.together == (None, None, ((2, NO_SLOT, 0), (3, 2, 2)))
