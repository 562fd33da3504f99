"""Statistics on simulated scorers: what is planted is found, and what is the same is not accused."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.evaluation.comparison import Histogram, Pairs, Result, Totals, interval, sign_test
from lora_fs.sidecar.model.gates import parse

CASES = 200
NOISE = 0.01  # of an engine whose batches differ: so many answers flip by themselves
GATE = parse("p_worse>=0.001")


def compare(before: float, after: float, seed: int) -> dict[str, float]:
    """Two revisions on the same cases: each case has its difficulty, and each answer a little noise."""
    dice, pairs = random.Random(seed), Pairs()
    for case in range(CASES):
        difficulty = (case + 0.5) / CASES
        scores = [float((difficulty < rate) != (dice.random() < NOISE)) for rate in (after, before)]
        pairs.add(Result(scores[0]), Result(scores[1]))
    return pairs.figures(0.95)


@pytest.mark.parametrize("seed", range(20))
def test_planted(seed: int) -> None:
    """A planted regression of 10 % over 200 cases is caught by the gate in 20 of 20 runs."""
    found = compare(0.9, 0.8, seed)
    assert GATE.unmet(found, {})
    assert found["difference_high"] < 0


@pytest.mark.parametrize("seed", range(20))
def test_identical(seed: int) -> None:
    """No gate fails between two identical revisions in 20 of 20 runs."""
    found = compare(0.9, 0.9, seed)
    assert GATE.unmet(found, {}) == ()
    assert found["difference_low"] <= 0 <= found["difference_high"]


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_coverage(rate: float) -> None:
    """Of 1,000 comparisons, at least 930 intervals of 95 % hold the true difference."""
    held = 0
    for seed in range(1_000):
        found = compare(rate, rate - 0.05, seed)
        truth = -0.05 * (1 - 2 * NOISE)
        held += found["difference_low"] <= truth <= found["difference_high"]
    assert held >= 930


@given(st.integers(0, 300), st.integers(0, 300))
def test_interval_holds_the_estimate(improved: int, regressed: int) -> None:
    """The interval lies within [-1, 1], is never empty, and is wide where no case differs."""
    cases = improved + regressed + 10
    low, high = interval(cases, improved - regressed, improved + regressed, 0.95)
    assert -1 <= low < high <= 1
    if improved == regressed:
        assert low < 0 < high


def test_interval_of_bonett_and_price() -> None:
    """12 regressions and 3 improvements in 100 cases: (4 - 13) / 102, give or take 1.96 standard errors."""
    low, high = interval(100, 3 - 12, 3 + 12, 0.95)
    error = math.sqrt(((4 + 13) / 102 - (9 / 102) ** 2) / 102)
    assert (low, high) == pytest.approx((-9 / 102 - 1.96 * error, -9 / 102 + 1.96 * error), abs=1e-5)


def test_sign_test() -> None:
    """The test is exact for few cases that differ, and continuous where the normal curve takes over."""
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 0) == 1 / 32
    assert sign_test(0, 5) == 1.0
    exact = sum(math.comb(1_002, lost) for lost in range(540, 1_003)) / 2**1_002
    assert sign_test(540, 462) == pytest.approx(exact, rel=0.02)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=300), st.sampled_from([50, 95, 99]))
def test_percentiles(values: list[float], percent: int) -> None:
    """A percentile is right to 1 %, by the nearest rank."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.011)


def test_a_percentile_counts_equal_values_each() -> None:
    """Four of seven are the largest: so is the median."""
    histogram = Histogram()
    for value in (1.0, 2.0, 3.0, 9.0, 9.0, 9.0, 9.0):
        histogram.add(value)
    assert histogram.percentile(50) == pytest.approx(9.0, rel=0.011)


def test_figures() -> None:
    """Each figure by its name; what no answer told is left out."""
    totals, pairs = Totals(), Pairs()
    assert totals.figures() == {"cases": 0, "pass_rate": 0.0, "score": 0.0, "errors": 0, "error_rate": 0.0}
    assert pairs.figures(0.95)["difference"] == 0.0
    for ms in range(1, 101):
        rate = 10.0 * ms if ms > 50 else None
        result = Result(1.0 if ms <= 90 else 0.5, error=ms > 98, ttft_ms=float(ms), tokens_per_s=rate)
        totals.add(result)
        pairs.add(result, Result(0.5))
    counted = {"cases": 100, "pass_rate": 0.9, "score": 0.95, "errors": 2, "error_rate": 0.02}
    timed = {"ttft_p50_ms": 50, "ttft_p95_ms": 95, "ttft_p99_ms": 99, "tokens_per_s_p50": 750}
    assert totals.figures() == pytest.approx(counted | timed, rel=0.011)
    compared = pairs.figures(0.95)
    assert (compared["regressions"], compared["improvements"]) == (0, 90)
    assert compared["difference"] == pytest.approx(0.45)


def test_histogram_memory() -> None:
    """Times from 1 µs to a day take fewer than 3,000 counts."""
    histogram = Histogram()
    for power in range(-300, 800):
        histogram.add(10 ** (power / 100))
    assert len(histogram.counts) < 3_000
