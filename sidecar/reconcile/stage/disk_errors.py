"""What to do where the stage folder is full, or its disk fails, and which errors mean a damaged copy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable

REREAD_S = 5.0  # a copy that cannot be read for so long will not be read
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of this process or host: they tell nothing of a copy
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # a file, or the folder, is not what it was


class StageFull(VolumeUnavailable):
    """No room, and nothing that may make some. ``lacks``: so many bytes."""

    def __init__(self, message: str, lacks: int = 0) -> None:
        super().__init__(message, lacks)
        self.lacks = lacks

    def __str__(self) -> str:
        return str(self.args[0])


def refused(error: OSError, what: str) -> VolumeUnavailable:
    """Say what the stage folder's own disk refused, and what to do: it is not the registry's volume."""
    advice = {
        errno.ENOSPC: "the stage folder's disk is full: give LORA_FS_STAGE_DIR a larger one, or lower "
        "--stage-max-bytes to what it has",
        errno.EDQUOT: "the stage folder's quota is used up: raise it, or lower --stage-max-bytes to it",
        errno.EMFILE: "this process has too many files open: raise its limit, ulimit -n",
        errno.ENFILE: "this host has too many files open: raise fs.file-max",
        errno.EIO: "the stage folder's disk fails: does its host's log say why?",
        errno.ENOENT: "something else removes what lies in the stage folder: let nothing but lora-fs write "
        "to LORA_FS_STAGE_DIR",
        errno.EBUSY: "another process that shares the stage folder holds its lock: end it if it hangs, or "
        "give each a folder of its own, LORA_FS_STAGE_DIR",
    }.get(error.errno or 0, "is LORA_FS_STAGE_DIR a local folder that may be written to?")
    return VolumeUnavailable(f"{what}: {os.strerror(error.errno or 0)} ({advice})")


class Unread:
    """Copies that could not be read, and since when. Any thread may ask."""

    def __init__(self) -> None:
        self._since: dict[Path, float] = {}

    def may_be_whole(self, copy: Path, error: OSError, now: float) -> bool:
        """Whether an error tells nothing of a copy: what this process lacks, or the disk's first one."""
        if error.errno in (*_LACKING, *_GONE):
            return error.errno in _LACKING
        if now - self._since.setdefault(copy, now) < REREAD_S:
            return True
        self.forget(copy)
        return False

    def forget(self, copy: Path) -> None:
        """Forget a copy's errors: a read succeeded, or another copy takes its place."""
        self._since.pop(copy, None)
