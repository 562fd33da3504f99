"""The audit of admin calls over HTTP: ``sidecar.audit``'s lines, written without holding up the loop."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from lora_fs.sidecar import audit
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.auth import Caller

WRITE_WAIT_S: Final = 2.0


class Trail:
    """``file`` None: the lines go to the log alone."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

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
        with anyio.move_on_after(WRITE_WAIT_S, shield=True) as scope:
            await anyio.to_thread.run_sync(partial(audit.write, self._file, text), abandon_on_cancel=True)
        if scope.cancelled_caught:
            told = event("audit.not_written", file=str(self._file))
            audit.logger.warning("the audit line is not in %s: it did not answer", self._file, extra=told)
