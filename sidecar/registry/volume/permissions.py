"""Who may read what is made in the registry: whoever may read the folder that it lies in.

A umask is the caller's and says nothing of the volume: with 077 one ``register`` would close a scope
to every other user. The root itself is as its maker's umask has it. Bits are added, none is taken
away. A filesystem that has no modes, or refuses to change them, is left as it is: nothing fails for it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

READ_BY_ALL = 0o644  # asked for when a file is made: who replaces it needs the folder's leave, not its own
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def share_folder(folder: Path, parent: Path) -> None:
    """Let a new folder have the bits of ``parent``, setgid too: others write in it as in that one.

    Where a sticky bit keeps users from each other's names, it is not opened for their writes.
    """
    with suppress(OSError):
        own, above = os.stat(folder).st_mode, os.stat(parent).st_mode
        granted = above & (stat.S_ISGID | 0o777)
        if above & stat.S_ISVTX:
            granted &= ~_WRITE_BY_OTHERS
        _add(folder, own, granted)


def share_file(file: Path | int, folder: Path) -> None:
    """Let a new file in ``folder``, or its handle, be read by who may read the folder."""
    with suppress(OSError):
        own = os.stat(file).st_mode
        if stat.S_ISREG(own) and ~own & READ_BY_ALL:
            _add(file, own, os.stat(folder).st_mode & READ_BY_ALL)


def share_copy(incoming: Path, parent: Path) -> None:
    """Let whoever may read ``parent`` read a folder of files that is to lie there."""
    share_folder(incoming, parent)
    with suppress(OSError):
        for name in os.listdir(incoming):
            share_file(incoming / name, incoming)


def _add(path: Path | int, own: int, granted: int) -> None:
    if granted & ~own:
        os.chmod(path, stat.S_IMODE(own | granted))
