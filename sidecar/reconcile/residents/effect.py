"""From log-probabilities with and without an adapter to whether it has an effect. Pure.

Each prompt is asked four times: base model, adapter, base model, adapter. What two equal questions differ by
is the engine's noise, as other requests of the same batch make it. An adapter is cleared only by more than
the noise. It is accused where all answers are the same bits. On an engine that other requests keep noisy, it
is accused once ``MANY`` rounds show no more than a little noise. All else is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

OVER_NOISE: Final = 4.0  # so many times the noise is an effect
LEAST: Final = 1e-3  # and so much: two pairs of equal bits may differ by the batches that they were in
LITTLE: Final = 0.02  # noise, in nats: under more of it a small effect would be taken for none
MANY: Final = 12  # rounds

Scores = Sequence[float]


class Effect(Enum):
    """What is known of an adapter's effect."""

    SOME = "some"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Round:
    """How likely the next tokens of one prompt are, asked for twice with and without the adapter."""

    base: tuple[Scores, Scores]
    adapter: tuple[Scores, Scores]

    @property
    def comparable(self) -> bool:
        """Whether all four are of the same, and of any, tokens."""
        lengths = {len(scores) for scores in (*self.base, *self.adapter)}
        return len(lengths) == 1 and lengths != {0}

    @property
    def noise(self) -> float:
        return max(_apart(*self.base), _apart(*self.adapter))

    @property
    def effect(self) -> float:
        """The least difference between an answer with and one without the adapter."""
        return min(_apart(base, adapter) for base in self.base for adapter in self.adapter)


def judge(rounds: Iterable[Round]) -> Effect:
    """Say what the rounds show together."""
    known = list(rounds)
    if not known or not all(one.comparable for one in known):
        return Effect.UNKNOWN
    noise, effect = max(one.noise for one in known), max(one.effect for one in known)
    if effect > max(OVER_NOISE * noise, LEAST):
        return Effect.SOME
    is_quiet = noise == 0.0 and effect == 0.0
    is_little = len(known) >= MANY and effect <= noise <= LITTLE
    return Effect.NONE if is_quiet or is_little else Effect.UNKNOWN


def _apart(one: Scores, other: Scores) -> float:
    """The greatest difference of a token's scores; of what is no number, infinite."""
    apart = max((abs(a - b) if a != b else 0.0 for a, b in zip(one, other, strict=True)), default=0.0)
    return apart if apart == apart else float("inf")
