"""When to try a failed adapter again: exponential, with jitter, reset when its bytes change."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_S, CEILING_S = 1.0, 300.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of one digest: what happened, how often, and when to try next."""

    digest: str
    error: Exception
    attempts: int
    retry_at: float  # on the caller's monotonic clock


def after(previous: Failure | None, digest: str, error: Exception, now: float) -> Failure:
    """Count a failure; 1 s doubling to 5 minutes, less up to a quarter of jitter."""
    attempts = previous.attempts + 1 if previous is not None and previous.digest == digest else 1
    delay = min(CEILING_S, FIRST_S * 2.0 ** min(attempts - 1, 16))
    delay *= 1 - random.uniform(0, 0.25)
    return Failure(digest, error, attempts, now + delay)
