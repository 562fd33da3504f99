"""When to try a failed adapter again: exponential, with jitter, reset when its record changes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import Record

FIRST_S, CEILING_S = 1.0, 300.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of one generation: what happened, how often, and when to try next."""

    digest: str
    generation: int
    error: LoraFsError
    attempts: int
    retry_at: float  # on the caller's monotonic clock

    def concerns(self, record: Record) -> bool:
        """Whether it was this very record that failed."""
        return (self.digest, self.generation) == (record.spec.digest, record.generation)


def after(previous: Failure | None, record: Record, error: LoraFsError, now: float) -> Failure:
    """Count a failure; 1 s doubling to 5 minutes, less up to a quarter of jitter."""
    attempts = previous.attempts + 1 if previous is not None and previous.concerns(record) else 1
    delay = min(CEILING_S, FIRST_S * 2.0 ** min(attempts - 1, 16))
    delay *= 1 - random.uniform(0, 0.25)
    return Failure(record.spec.digest, record.generation, error, attempts, now + delay)
