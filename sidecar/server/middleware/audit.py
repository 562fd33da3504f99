"""The audit of admin calls over HTTP: ``sidecar.audit``'s lines, written without holding up the loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from lora_fs.sidecar import audit
from lora_fs.sidecar.concurrency import AllTaken, Threads
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.middleware.access import Caller

WRITE_WAIT_S: Final = 2.0
AT_ONCE: Final = 4
WINDOW_S: Final = 10.0
MOST_OF_ONE: Final = 20  # refused calls of one address that are logged in WINDOW_S
MOST: Final = 100  # of all addresses


class Refused:
    """Counts refused calls, and bounds their log lines: a caller may repeat them without end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total = self.left_out = 0
        self._told_left_out = 0
        self._since = float("-inf")
        self._of: Counter[str] = Counter()  # lines by address, in this window

    def count(self, address: str) -> int | None:
        """Count one. Return how many were left out since the last logged one; None: leave this one out."""
        self.total += 1
        if (now := self._clock()) - self._since >= WINDOW_S:
            self._since = now
            self._of.clear()
        if self._of[address] >= MOST_OF_ONE or self._of.total() >= MOST:
            self.left_out += 1
            return None
        self._of[address] += 1
        before, self._told_left_out = self._told_left_out, self.left_out
        return self.left_out - before


class Trail:
    """``file`` None: the lines go to the log alone."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._threads = file, Threads(AT_ONCE)
        self.refused = Refused()

    async def tell(
        self,
        act: str,
        caller: Caller | None,
        address: str,
        outcome: str,
        why: str,
        what: Mapping[str, object],
    ) -> None:
        """Tell one line. A file that takes none, or does not answer in time, fails nothing and is said so.

        Args:
            caller: None if nobody was admitted.
        """
        if outcome == "denied":
            left_out = self.refused.count(address)
            if left_out is None:
                return
            what = {**what, "left_out": left_out or None}
        who = "anonymous" if caller is None or caller.token is None else f"token:{caller.token}"
        text = audit.line(str(act), who=who, source=address, outcome=outcome, why=why, what=what)
        if self._file is None:
            audit.write(None, text)
            return
        try:
            with anyio.CancelScope(shield=True):
                await self._threads.run(partial(audit.write, self._file, text), WRITE_WAIT_S)
        except TimeoutError as error:
            if isinstance(error, AllTaken):
                audit.write(None, text)
            told = event("audit.not_written", file=str(self._file))
            audit.logger.warning("the audit line is not in %s: it did not answer", self._file, extra=told)
