"""How copies look on the pod's disk: their names, their sizes, and what tells whether one was changed.

Another process may remove a copy meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path

Signature = tuple[tuple[str, int, int, int, int], ...]


def names_of(folder: Path) -> list[str]:
    """The copy under each of its names; none where another process removed it, or it is no folder."""
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def signature(copy: Path) -> Signature:
    """What a change of its files changes: names, inodes, sizes and times. Raises OSError."""
    found = ((name, os.lstat(f"{copy}/{name}")) for name in sorted(os.listdir(copy)))
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def size_bytes(folder: Path) -> int:
    """The size of a copy under all its names; one under removal counts as gone."""
    size = 0
    try:
        for path, _, files in os.walk(folder):
            size += sum(os.lstat(os.path.join(path, file)).st_size for file in files)
    except FileNotFoundError:
        return 0
    return size
