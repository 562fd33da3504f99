"""From log-probabilities with and without an adapter to whether it has an effect. Pure.

The probe asks the adapter each prompt twice. The difference of both answers is the engine's noise, as other
requests of the same batch make it. The verdict accuses an adapter only if every answer has the base
model's bits. It clears an adapter only by more than the noise. All else is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

OVER_NOISE: Final = 4.0  # so many times the noise is an effect
LEAST: Final = 1e-3  # and so much: two pairs of equal bits may differ by the batches that they were in


Scores = Sequence[float]


class Effect(Enum):
    """An adapter's effect: the answers compared so far."""

    SOME = "some"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Round:
    """How likely the next tokens of one prompt are, by the base model and by two answers of the adapter."""

    base: Scores
    adapter: tuple[Scores, Scores]

    @property
    def comparable(self) -> bool:
        """Whether all three are of as many tokens, and of any."""
        lengths = {len(scores) for scores in (self.base, *self.adapter)}
        return len(lengths) == 1 and lengths != {0}

    @property
    def noise(self) -> float:
        return _apart(*self.adapter)

    @property
    def effect(self) -> float:
        """The least difference between an answer with and the one without the adapter."""
        return min(_apart(self.base, adapter) for adapter in self.adapter)


def judge(rounds: Iterable[Round]) -> Effect:
    """Say what the rounds show together."""
    known = list(rounds)
    if not known or not all(one.comparable for one in known):
        return Effect.UNKNOWN
    if any(one.effect > max(OVER_NOISE * one.noise, LEAST) for one in known):
        return Effect.SOME
    same = all(one.noise == 0.0 and one.effect == 0.0 for one in known)
    return Effect.NONE if same else Effect.UNKNOWN


def _apart(one: Scores, other: Scores) -> float:
    """The greatest difference of a token's scores; of what is no number, infinite."""
    apart = max((abs(a - b) if a != b else 0.0 for a, b in zip(one, other, strict=True)), default=0.0)
    return apart if apart == apart else float("inf")
