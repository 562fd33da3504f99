"""The audit of admin calls over HTTP: ``sidecar.audit``'s lines, written without holding up the loop."""

from __future__ import annotations

from collections.abc import Mapping
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


class Trail:
    """``file`` None: the lines go to the log alone."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._threads = file, Threads(AT_ONCE)

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
            caller: None where nobody was admitted.
        """
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
