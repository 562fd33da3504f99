"""Whose copies lie in a stage folder: processes of one owner share it, those of another are refused.

Told by a lock on a file in it, so that it ends with the processes. Where a filesystem takes no
locks nobody can be asked.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.logs import event

logger = logging.getLogger(__name__)

_OWNER = ".owner"


class Claim:
    """One process's, on one folder at a time."""

    def __init__(self) -> None:
        self._file: int | None = None

    def take(self, folder: Path, owner: str) -> bool:
        """Share a folder with ``owner``'s other processes; whether there are none.

        Raises:
            InputError: a living process has it for another owner.
        """
        self._file = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            theirs = os.pread(self._file, 4096, 0).decode(errors="replace")
            if theirs == owner:
                return False
            self.release()
            raise InputError(
                f"the stage folder {folder} is in use for {theirs}, and this is {owner}: each would "
                "remove the other's copies; give each a folder of its own (--stage-dir)"
            ) from None
        except OSError as error:  # a filesystem without locks: nobody can be asked
            logger.debug("%s takes no lock: %s", folder, error, extra=event("stage.no_lock"))
            return True
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, owner.encode(), 0)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        return True

    def release(self) -> None:
        """Let another owner have it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
