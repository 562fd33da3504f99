"""What has arrived of a file: the spans cover it, however it was cut, halved and written down."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.sources.receive.spans import Spans, notes, read_notes

SIZES = st.integers(0, 1 << 20)
RANGES = st.lists(st.tuples(st.integers(-5, 1 << 20), st.integers(-5, 1 << 20)), max_size=6)


@given(st.integers(0, 1 << 20), RANGES, SIZES)
def test_notes_are_read_back_or_not_at_all(size: int, ranges: list[tuple[int, int]], there: int) -> None:
    """Ranges that overlap, are empty, out of order or beyond the file are none."""
    found = read_notes(notes(size, ranges), size, there)
    assert found in ([], ranges)
    flat = [0, *(number for one in found for number in one)]
    assert flat == sorted(flat)
    assert all(a < b for a, b in found)
    assert not found or flat[-1] <= there <= size
    assert read_notes(notes(size + 1, ranges), size, there) == []


@given(st.text())
def test_any_text_is_no_failure(text: str) -> None:
    """A crash may leave anything."""
    assert read_notes(text, 10, 10) == []


@given(st.integers(1, 1 << 20), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1 << 20)), max_size=20))
def test_the_spans_cover_the_file(size: int, steps: list[tuple[int, int]]) -> None:
    """Whatever arrives where, and however often they are halved; what is noted is what arrived."""
    spans = Spans(size)
    for which, count in steps:
        if count % 3 == 0:
            spans.halve(count % 5, 1 + count % 50)
        span = list(spans)[which % len(list(spans))]
        span.at += min(span.left, count)
        ordered = sorted(spans, key=lambda one: one.start)
        assert [one.start for one in ordered] == [0, *(one.end for one in ordered[:-1])]
        assert ordered[-1].end == size
        assert spans.arrived + spans.left == size
        assert spans.whole_up_to() <= spans.arrived
    again = Spans(size, read_notes(notes(size, spans.ranges()), size, size))
    assert (again.arrived, again.left, again.whole_up_to()) == (
        spans.arrived,
        spans.left,
        spans.whole_up_to(),
    )
