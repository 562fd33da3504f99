"""When to try again what failed for an adapter: exponential, with jitter, reset when its record changes.

What fails by the volume is no adapter's fault: its delay stays short, for the volume may be back any time.

Delays count on a monotonic clock: setting the host's time shortens and lengthens none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from lora_fs.sidecar.errors import LoraFsError, RegistryLost, VolumeUnavailable
from lora_fs.sidecar.model import Record

Error = TypeVar("Error", bound=LoraFsError)

FIRST_S, CEILING_S = 1.0, 300.0
VOLUME_CEILING_S = 30.0

CHANCE = random.SystemRandom()  # its own: vLLM may seed the process's, on all replicas alike


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of one subject: what happened, how often, and when to try next.

    ``subject``: a record's digest and generation, for a load; a copy's path, for an unload.

    Report ``error`` and raise ``afresh``: Python adds to an exception each frame that it goes
    through, and a frame keeps the request it was for.
    """

    subject: object
    error: LoraFsError
    attempts: int
    retry_at: float  # on the caller's monotonic clock

    def concerns(self, what: Record | str) -> bool:
        """Whether it was this very record, or copy, that failed."""
        return self.subject == _subject(what)


def after(previous: Failure | None, what: Record | str, error: LoraFsError, now: float) -> Failure:
    """Count a failure; 1 s doubling to 5 minutes (the volume's: 30 s), less up to a quarter of jitter."""
    attempts = previous.attempts + 1 if previous is not None and previous.concerns(what) else 1
    ceiling = VOLUME_CEILING_S if isinstance(error, VolumeUnavailable | RegistryLost) else CEILING_S
    delay = min(ceiling, FIRST_S * 2.0 ** min(attempts - 1, 16))
    delay *= 1 - CHANCE.uniform(0, 0.25)
    return Failure(_subject(what), afresh(error), attempts, now + delay)


def _subject(what: Record | str) -> object:
    return (what.spec.digest, what.generation) if isinstance(what, Record) else what


def afresh(error: Error) -> Error:
    """A copy of the error as if never raised: without frames, cause and context."""
    kind = type(error)
    one = kind.__new__(kind, *error.args)  # an own ``__init__`` may take other arguments than it keeps
    one.__dict__.update(error.__dict__)
    return one
