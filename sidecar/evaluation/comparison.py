"""From scores and times to figures: percentiles, and two revisions compared case by case. Pure.

Memory does not grow with the cases. The interval is that of Bonett and Price for paired proportions: it adds
one case won and one lost, so that it is wide where few cases differ. Source: Bonett and Price,
"Adjusted Wald confidence interval for a difference of binomial proportions based on paired data", 2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

STEP: Final = 1.01  # a percentile is right to 1 %
PASS: Final = 1.0  # a case passes with this score


@dataclass(slots=True)
class Histogram:
    """Positive numbers, counted in steps of 1 %."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        step = math.floor(math.log(max(value, 1e-9), STEP))
        self.counts[step] = self.counts.get(step, 0) + 1

    def percentile(self, percent: float) -> float | None:
        """The nearest-rank percentile; None of nothing."""
        rank = math.ceil(sum(self.counts.values()) * percent / 100)
        for step in sorted(self.counts):
            rank -= self.counts[step]
            if rank <= 0:
                return float(STEP ** (step + 0.5))
        return None


@dataclass(frozen=True, slots=True)
class Result:
    """One revision's answer to one case. ``ttft_ms``, ``tokens_per_s``: None if there was none."""

    score: float
    error: bool = False
    ttft_ms: float | None = None
    tokens_per_s: float | None = None

    @property
    def passed(self) -> bool:
        return self.score >= PASS


@dataclass(slots=True)
class Totals:
    """The counts of one revision."""

    cases: int = 0
    passed: int = 0
    score: float = 0.0
    errors: int = 0
    ttft_ms: Histogram = field(default_factory=Histogram)
    tokens_per_s: Histogram = field(default_factory=Histogram)

    def add(self, result: Result) -> None:
        self.cases += 1
        self.passed += result.passed
        self.score += result.score
        self.errors += result.error
        if result.ttft_ms is not None:
            self.ttft_ms.add(result.ttft_ms)
        if result.tokens_per_s is not None:
            self.tokens_per_s.add(result.tokens_per_s)

    def figures(self) -> dict[str, float]:
        """The figures by the names that gates have for them, without unknown ones."""
        count = max(1, self.cases)
        found: dict[str, float | None] = {
            "cases": self.cases,
            "pass_rate": self.passed / count,
            "score": self.score / count,
            "errors": self.errors,
            "error_rate": self.errors / count,
            **{f"ttft_p{percent}_ms": self.ttft_ms.percentile(percent) for percent in (50, 95, 99)},
            "tokens_per_s_p50": self.tokens_per_s.percentile(50),
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(slots=True)
class Pairs:
    """The comparison of two revisions over the same cases."""

    cases: int = 0
    regressions: int = 0
    improvements: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, result: Result, baseline: Result) -> None:
        self.cases += 1
        self.regressions += baseline.passed and not result.passed
        self.improvements += result.passed and not baseline.passed
        difference = result.score - baseline.score
        self.total += difference
        self.squares += difference * difference

    def figures(self, confidence: float) -> dict[str, float]:
        """By the names that gates have for them. ``confidence``: of the interval, between 0 and 1."""
        low, high = interval(self.cases, self.total, self.squares, confidence)
        return {
            "regressions": self.regressions,
            "improvements": self.improvements,
            "difference": self.total / max(1, self.cases),
            "difference_low": low,
            "difference_high": high,
            "p_worse": sign_test(self.regressions, self.improvements),
        }


def interval(cases: int, total: float, squares: float, confidence: float) -> tuple[float, float]:
    """The interval of a mean of paired differences in [-1, 1], from their sum and their squares' sum."""
    count = cases + 2
    mean = total / count
    variance = max(0.0, (squares + 2) / count - mean * mean)
    wide = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance / count)
    return max(-1.0, mean - wide), min(1.0, mean + wide)


def sign_test(regressions: int, improvements: int) -> float:
    """The exact chance of so many regressions or more among the cases that differ, if each is a toss."""
    count = regressions + improvements
    if count > 1_000:  # the sum of exact terms takes long, and the normal curve is as good
        deviation = (regressions - 0.5 - count / 2) / math.sqrt(count / 4)
        return 1.0 - NormalDist().cdf(deviation)
    ways = sum(math.comb(count, lost) for lost in range(regressions, count + 1))
    return ways / 2**count if count else 1.0
