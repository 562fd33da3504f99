"""Gates: conditions that a revision's figures must meet, such as ``pass_rate>=0.9 and regressions<=2``. Pure.

A condition is ``FIGURE OP BOUND``; ``and`` joins conditions. A bound is a number, or a multiple of
the other revision's figure: ``ttft_p99_ms<=1.2*baseline+50``. An unknown figure
meets no condition.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from lora_fs.sidecar.errors import InputError

# Of each of the two revisions; `baseline` may stand in their bounds.
OF_ONE: Final[dict[str, str]] = {
    "pass_rate": "Share of the cases that it passed",
    "score": "Mean score of the cases, from 0 to 1",
    "errors": "Cases that it answered with an error",
    "error_rate": "Share of such cases",
    "ttft_p50_ms": "Time to the first token, in milliseconds: median",
    "ttft_p95_ms": "Its 95th percentile",
    "ttft_p99_ms": "Its 99th percentile",
    "tokens_per_s_p50": "Tokens per second of one answer after its first token: median",
    "live_requests": "Requests of users since the canary's step began, on all replicas",
    "live_errors": "Those that were answered with an error",
    "live_error_rate": "Share of them",
}
# Of both together; `--against` gives them.
OF_BOTH: Final[dict[str, str]] = {
    "regressions": "Cases that only the other revision passed",
    "improvements": "Cases that only this revision passed",
    "difference": "Mean score less that of the other revision",
    "difference_low": "Lower end of its interval",
    "difference_high": "Upper end of its interval",
    "p_worse": "Chance of so many regressions if both revisions are equally good",
}
FIGURES: Final = {**OF_ONE, "cases": "Cases that were asked", **OF_BOTH}
MOST_CHARS: Final = 2_000
ROUNDING: Final = 1e-9  # of the largest term: shares of fewer than a billion cases differ by more

_OPS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<op>>=|<=|==|>|<)|(?P<sign>[*+\-,()%=!&|/])|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<word>[A-Za-z_]\w*))"
)
_EXAMPLE: Final = "write for example: pass_rate>=0.9 and ttft_p99_ms<=1.2*baseline"


class BadGate(InputError):
    """A gate that does not parse; the message says at which column and why."""


@dataclass(frozen=True, slots=True)
class Condition:
    """``figure op number``, or with ``factor``: ``figure op factor*baseline + number``."""

    figure: str
    op: str
    number: float
    factor: float | None
    text: str

    def unmet(self, figures: Mapping[str, float], baseline: Mapping[str, float]) -> str | None:
        """Why it is not met; None if it is."""
        value, bound, largest = figures.get(self.figure), self.number, abs(self.number)
        if value is None or math.isnan(value):
            return f"{self.text}: {self.figure} is not known"
        if self.factor is not None:
            before = baseline.get(self.figure)
            if before is None or math.isnan(before):
                return f"{self.text}: the baseline's {self.figure} is not known"
            bound += self.factor * before
            largest = max(largest, abs(self.factor * before))
        if _OPS[self.op](bound if _is_rounding(value, bound, largest) else value, bound):
            return None
        return f"{self.text}: {self.figure} is {value:.4g}, the bound is {bound:.4g}"


def _is_rounding(value: float, bound: float, largest: float) -> bool:
    """Whether a figure and its bound differ by no more than rounding. ``largest``: of the bound's terms."""
    return math.isfinite(bound) and abs(value - bound) <= ROUNDING * max(largest, abs(bound))


@dataclass(frozen=True, slots=True)
class Gate:
    """Conditions, all of which must be met."""

    text: str
    conditions: tuple[Condition, ...]

    @property
    def needs_baseline(self) -> bool:
        """Whether only a comparison of two revisions can meet it."""
        return any(one.factor is not None or one.figure in OF_BOTH for one in self.conditions)

    @property
    def needs_live(self) -> bool:
        """Whether it asks for what users' requests of a canary's step came to."""
        return any(one.figure.startswith("live_") for one in self.conditions)

    def unmet(self, figures: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[str, ...]:
        """The conditions that fail, a sentence each; none: the revision passes."""
        found = (one.unmet(figures, baseline) for one in self.conditions)
        return tuple(why for why in found if why is not None)


def parse(text: str) -> Gate:
    """Parse a gate; raises BadGate."""
    if len(text) > MOST_CHARS:
        raise BadGate(f"the gate has {len(text)} characters: {MOST_CHARS} are the most that is read")
    reader = _Reader(text)
    conditions = [reader.condition()]
    while reader.kind is not None:
        if reader.word not in ("and", ","):
            reader.fail("expected 'and'")
        reader.next()
        conditions.append(reader.condition())
    return Gate(text, tuple(conditions))


class _Reader:
    """The tokens of a gate, one ahead."""

    def __init__(self, text: str) -> None:
        self._text, self._end = text, 0
        self.kind: str | None = None
        self.word, self.at = "", 0
        self.next()

    def next(self) -> None:
        """Go to the next token; ``kind`` None: there is none."""
        self._last = self._end
        found = _TOKEN.match(self._text, self._end)
        if found is None and self._text[self._end :].strip():
            rest = self._text[self._end :]
            self.at = self._end + len(rest) - len(rest.lstrip())
            self.kind, self.word = "other", self._text[self.at]
            self.fail("this character has no meaning here")
        self.kind = found.lastgroup if found is not None else None
        self.word = found[self.kind] if found is not None and self.kind is not None else ""
        self.at = found.start(self.kind) if found is not None and self.kind is not None else len(self._text)
        self._end = found.end() if found is not None else len(self._text)

    def fail(self, why: str) -> NoReturn:
        got = f"found {self.word!a}" if self.kind is not None else "the gate ends here"
        raise BadGate(
            f"the gate {self._text[:200]!a} cannot be read at column {self.at + 1}: {why}; {got}: {_EXAMPLE}"
        )

    def condition(self) -> Condition:
        start = self.at
        figure = self._figure()
        op = self.word
        if self.kind != "op":
            self.fail(f"expected one of {' '.join(_OPS)}")
        self.next()
        factor, number = self._bound(figure)
        return Condition(figure, op, number, factor, self._text[start : self._last].strip())

    def _figure(self) -> str:
        figure = self.word
        if self.kind != "word" or figure in ("and", "baseline"):
            self.fail("expected a figure")
        if figure not in FIGURES:
            import difflib  # for this sentence alone

            near = difflib.get_close_matches(figure, FIGURES, 1)
            also = f"did you mean {near[0]}?" if near else f"one of {', '.join(FIGURES)}"
            self.fail(f"there is no such figure, {also}")
        self.next()
        return figure

    def _bound(self, figure: str) -> tuple[float | None, float]:
        """``N``, ``[N*]baseline[±N]`` or ``baseline*N[±N]``."""
        if self.word != "baseline":
            number = self._number()
            if self.word != "*":
                return None, number
            self.next()
            self._baseline(figure)
            return number, self._more()
        self._baseline(figure)
        if self.word != "*":
            return 1.0, self._more()
        self.next()
        return self._number(), self._more()

    def _baseline(self, figure: str) -> None:
        if self.word != "baseline":
            self.fail("expected 'baseline'")
        if figure not in OF_ONE:
            self.fail(f"{figure} has no baseline")
        self.next()

    def _more(self) -> float:
        if self.word not in ("+", "-"):
            return 0.0
        return self._number()

    def _number(self) -> float:
        sign = 1.0
        if self.word in ("+", "-"):
            sign = -1.0 if self.word == "-" else 1.0
            self.next()
        if self.kind != "number":
            self.fail("expected a number or 'baseline'")
        value = float(self.word)
        if math.isinf(value):
            self.fail("this number is too large")
        self.next()
        return sign * value
