"""When to try a failed adapter again: exponential, with jitter, reset when its record changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import Record

Error = TypeVar("Error", bound=LoraFsError)

FIRST_S, CEILING_S = 1.0, 300.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of one generation: what happened, how often, and when to try next.

    ``error`` is to be told, and ``afresh`` to be raised: Python adds to an exception each frame that it goes
    through, and a frame keeps the request it was for.
    """

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
    return Failure(record.spec.digest, record.generation, afresh(error), attempts, now + delay)


def afresh(error: Error) -> Error:
    """The same error as if it had never been raised: without frames, and without what it was raised for."""
    kind = type(error)
    one = kind.__new__(kind, *error.args)  # an own ``__init__`` may take other arguments than it keeps
    one.__dict__.update(error.__dict__)
    return one
