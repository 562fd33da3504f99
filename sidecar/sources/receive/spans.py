"""The parts of a file: the arrived ones, the missing ones, and the note of them. Pure: no I/O."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Span:
    """``[start, end)`` of the file, arrived up to ``at``. Hold ``lock`` to move ``at`` or ``end``.

    Attributes:
        taken: a connection reads it.
    """

    start: int
    at: int
    end: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    taken: bool = False

    @property
    def left(self) -> int:
        return self.end - self.at


class Spans:
    """They cover ``[0, size)``; ``arrived`` are ranges in their order that are there."""

    def __init__(self, size: int, arrived: Sequence[tuple[int, int]] = ()) -> None:
        self._spans: list[Span] = []
        at = 0
        for start, to in arrived:
            if at < start:
                self._spans.append(Span(at, at, start))
            self._spans.append(Span(start, to, to))
            at = to
        if at < size:
            self._spans.append(Span(at, at, size))

    def __iter__(self) -> Iterator[Span]:
        return iter(tuple(self._spans))

    @property
    def arrived(self) -> int:
        return sum(span.at - span.start for span in self)

    @property
    def left(self) -> int:
        return sum(span.left for span in self)

    @property
    def taken(self) -> int:
        """How many are read now."""
        return sum(span.taken for span in self)

    def idle(self) -> list[Span]:
        """The incomplete spans that nobody reads."""
        return [span for span in self if span.left and not span.taken]

    def whole_up_to(self) -> int:
        """The bytes without a gap, from the beginning."""
        at = 0
        for span in sorted(self, key=lambda one: one.start):
            if span.start != at:
                break
            at = span.at
        return at

    def halve(self, most: int, least_bytes: int) -> list[Span]:
        """Cut the largest rests in two, ``most`` of them; returns the second halves.

        Args:
            least_bytes: what each half has to have.
        """
        made = []
        for span in sorted(self, key=lambda one: -one.left)[:most]:
            with span.lock:
                if span.left < 2 * least_bytes:
                    continue
                middle = span.at + span.left // 2
                second = Span(middle, middle, span.end)
                span.end = middle
            self._spans.append(second)
            made.append(second)
        return made

    def ranges(self) -> list[tuple[int, int]]:
        """The arrived ranges, in their order."""
        return sorted((span.start, span.at) for span in self if span.at > span.start)


def notes(size: int, arrived: Sequence[tuple[int, int]]) -> str:
    """The note beside a file of ``size``."""
    return json.dumps({"size_bytes": size, "arrived": arrived})


def read_notes(text: str, size: int, there: int) -> list[tuple[int, int]]:
    """The noted ranges; empty unless the note is reliable.

    Args:
        size: of the whole. there: the size that the file has now.
    """
    try:
        body = json.loads(text)
        ranges = [(int(start), int(to)) for start, to in body["arrived"]]
        known = int(body["size_bytes"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    ends = [0, *(to for _, to in ranges)]
    apart = all(before <= start < to for before, (start, to) in zip(ends, ranges, strict=False))
    return ranges if known == size and apart and ends[-1] <= there <= size else []
