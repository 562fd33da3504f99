"""How long one question waits for a replica that is away, and how often it doubts an error."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

PAUSE_S: Final = 0.25
MOST_PAUSE_S: Final = 5.0
MOST_REFUSED: Final = 3  # tries again after a 404 or 500 of a replica that has just come back
DOUBTED: Final = frozenset({404, 500})


@dataclass(slots=True)
class Patience:
    """The tries of one question.

    Attributes:
        limit_s: how long a replica may be away. pause_s: before the next try; it doubles.
        away_since: of the monotonic clock; None: the replica was never away.
    """

    limit_s: float
    pause_s: float = PAUSE_S
    away_since: float | None = None
    _refused: int = field(default=0, init=False)

    def is_used_up(self) -> bool:
        """Note that the replica is away; return True if it has been for longer than the limit."""
        now = time.monotonic()
        if self.away_since is None:
            self.away_since = now
        return now - self.away_since > self.limit_s

    def doubts(self, status: int) -> bool:
        """Note an error of the replica; return True if another try may end otherwise."""
        self._refused += 1
        return status in DOUBTED and self._refused < MOST_REFUSED

    async def pause(self) -> float:
        """Wait before the next try; return the seconds."""
        waited_s = self.pause_s
        await asyncio.sleep(waited_s)
        self.pause_s = min(2 * waited_s, MOST_PAUSE_S)
        return waited_s
