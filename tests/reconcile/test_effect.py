"""The judgement of an adapter's effect: few rounds accuse by equal bits alone, and noise is no effect."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.reconcile.residents.effect import Effect, Round, judge

BASE = (-1.5, -2.25, -0.125)
OTHER = (-1.5, -2.0, -0.125)
NOISY = (-1.5, -2.25000001, -0.125)
SCORES = st.lists(st.floats(-50, 0), min_size=3, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("rounds", "found"),
    [
        ([], Effect.UNKNOWN),
        ([Round((BASE, BASE), (BASE, BASE))], Effect.NONE),
        ([Round((BASE, BASE), (OTHER, OTHER))], Effect.SOME),
        ([Round((BASE, BASE), (BASE, BASE)), Round((BASE, BASE), (OTHER, OTHER))], Effect.SOME),
        ([Round((BASE, NOISY), (BASE, BASE))], Effect.UNKNOWN),
        ([Round((BASE, BASE), (BASE, NOISY))], Effect.UNKNOWN),
        ([Round((BASE, BASE), (BASE, OTHER))], Effect.UNKNOWN),
        ([Round((BASE, NOISY), (OTHER, OTHER))], Effect.SOME),
        ([Round((BASE, BASE), (NOISY, NOISY))], Effect.UNKNOWN),  # the batches differed, perhaps
        ([Round((BASE, BASE), (NOISY, NOISY))] * 20, Effect.UNKNOWN),  # or its effect is very small
        ([Round((BASE, NOISY), (BASE, NOISY))] * 12, Effect.NONE),
        ([Round((BASE, NOISY), (BASE, NOISY))] * 11, Effect.UNKNOWN),
        ([Round((BASE, OTHER), (BASE, OTHER))] * 20, Effect.UNKNOWN),  # so much noise hides an effect
        ([*[Round((BASE, NOISY), (BASE, NOISY))] * 20, Round((BASE, BASE), (OTHER, OTHER))], Effect.SOME),
        ([Round(((), ()), ((), ()))], Effect.UNKNOWN),
        ([Round((BASE, BASE), (BASE[:2], BASE[:2]))], Effect.UNKNOWN),
        ([Round((BASE, BASE), ((float("nan"),) * 3,) * 2)], Effect.UNKNOWN),
    ],
)
def test_what_rounds_show(rounds: list[Round], found: Effect) -> None:
    """Equal bits everywhere are no effect, more than the noise is one, and all else is unknown."""
    assert judge(rounds) is found


@given(st.lists(st.tuples(SCORES, SCORES, SCORES, SCORES), min_size=1, max_size=3))
def test_few_rounds_accuse_by_equal_bits_alone(asked: list[tuple[tuple[float, ...], ...]]) -> None:
    """Whatever an engine answers, an adapter is accused only if no answer differs from any other's."""
    rounds = [Round((one[0], one[1]), (one[2], one[3])) for one in asked]
    equal = all(len(set(one)) == 1 for one in asked)
    assert (judge(rounds) is Effect.NONE) is equal


@given(st.integers(0, 2**32))
def test_a_busy_engine_hides_nothing(seed: int) -> None:
    """Where each answer has its batch's noise, one without effect is found, and one with it is cleared."""
    draw = random.Random(seed)

    def noisy(scores: tuple[float, ...]) -> tuple[float, ...]:
        off = draw.choice((0.0, 1e-6, 3e-6, 5e-6))
        return tuple(score + off for score in scores)

    def asked(adapter: tuple[float, ...]) -> list[Round]:
        return [Round((noisy(BASE), noisy(BASE)), (noisy(adapter), noisy(adapter))) for _ in range(20)]

    assert judge(asked(BASE)) is Effect.NONE
    assert judge(asked(OTHER)) is Effect.SOME
    assert judge(asked(tuple(score + 1e-4 for score in BASE))) is Effect.UNKNOWN
