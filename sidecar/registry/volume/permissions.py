"""Gives new files and folders the read bits of the folder that they lie in.

A umask belongs to the caller, not to the volume: with 077 one ``register`` would close a scope to every other
user. The root keeps its maker's umask. This module adds bits and never removes any. If a filesystem has no
modes, or refuses to change them, it leaves them as they are, without an error.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

READ_BY_ALL = 0o644  # asked for when a file is made: who replaces it needs the folder's leave, not its own
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def share_folder(folder: Path, parent: Path) -> None:
    """Give a new folder the bits of ``parent``, setgid included.

    Under a sticky bit, group and others get no write bit.
    """
    with suppress(OSError):
        own, above = os.stat(folder).st_mode, os.stat(parent).st_mode
        granted = above & (stat.S_ISGID | 0o777)
        if above & stat.S_ISVTX:
            granted &= ~_WRITE_BY_OTHERS
        _add(folder, own, granted)


def share_file(file: Path | int, folder: Path) -> None:
    """Give a new file in ``folder``, or its handle, the folder's read bits."""
    with suppress(OSError):
        own = os.stat(file).st_mode
        if stat.S_ISREG(own) and ~own & READ_BY_ALL:
            _add(file, own, os.stat(folder).st_mode & READ_BY_ALL)


def share_copy(incoming: Path, parent: Path) -> None:
    """Give a folder of files that moves into ``parent`` that folder's bits."""
    share_folder(incoming, parent)
    with suppress(OSError):
        for name in os.listdir(incoming):
            share_file(incoming / name, incoming)


def _add(path: Path | int, own: int, granted: int) -> None:
    if granted & ~own:
        os.chmod(path, stat.S_IMODE(own | granted))
