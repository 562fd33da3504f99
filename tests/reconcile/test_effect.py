"""The judgement of an adapter's effect: never an accusation without equal bits, never noise for an effect."""

from __future__ import annotations

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
        ([Round(BASE, (BASE, BASE))], Effect.NONE),
        ([Round(BASE, (OTHER, OTHER))], Effect.SOME),
        ([Round(BASE, (BASE, BASE)), Round(BASE, (OTHER, OTHER))], Effect.SOME),
        ([Round(BASE, (BASE, NOISY))], Effect.UNKNOWN),
        ([Round(BASE, (BASE, OTHER))], Effect.UNKNOWN),
        ([Round(BASE, (OTHER, NOISY))], Effect.UNKNOWN),
        ([Round(NOISY, (OTHER, OTHER))], Effect.SOME),
        ([Round(BASE, (NOISY, NOISY))], Effect.UNKNOWN),  # the batches differed, perhaps
        ([Round((), ((), ()))], Effect.UNKNOWN),
        ([Round(BASE, (BASE[:2], BASE[:2]))], Effect.UNKNOWN),
        ([Round(BASE, ((float("nan"),) * 3,) * 2)], Effect.UNKNOWN),
    ],
)
def test_what_rounds_show(rounds: list[Round], found: Effect) -> None:
    """Equal bits everywhere are no effect, more than the noise is one, and all else is unknown."""
    assert judge(rounds) is found


@given(st.lists(st.tuples(SCORES, SCORES, SCORES), min_size=1, max_size=3))
def test_only_equal_bits_accuse(asked: list[tuple[tuple[float, ...], ...]]) -> None:
    """Whatever an engine answers, an adapter is accused only if no answer differs from any other's."""
    rounds = [Round(base, (first, second)) for base, first, second in asked]
    equal = all(len(set(one)) == 1 for one in asked)
    assert (judge(rounds) is Effect.NONE) is equal
