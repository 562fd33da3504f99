"""How copies look on the pod's disk: their names, their sizes, and how to see that one changed.

Another process may remove a copy meanwhile.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

Signature = tuple[tuple[str, int, int, int, int], ...]


class Look(NamedTuple):
    """One look at a copy's folder.

    Attributes:
        changed_ns: when a name came or went last.
        size_bytes: what the copy takes under all its names.
        copies: the copy under each of them.
    """

    changed_ns: int
    size_bytes: int
    copies: tuple[str, ...]


def look(folder: str, before: Look | None) -> Look:
    """Look at a copy's folder. Returns ``before`` if no name came or went since.

    Raises FileNotFoundError: another process removed it.
    """
    changed_ns = os.lstat(folder).st_mtime_ns
    if before is not None and before.changed_ns == changed_ns:
        return before
    return Look(changed_ns, _size_bytes(folder), _names(folder))


def _size_bytes(folder: str) -> int:
    """One under removal counts as gone."""
    size = 0
    try:
        for path, _, files in os.walk(folder):
            size += sum(os.lstat(os.path.join(path, file)).st_size for file in files)
    except FileNotFoundError:
        return 0
    return size


def _names(folder: str) -> tuple[str, ...]:
    try:
        return tuple(os.path.join(folder, name) for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def close(copy: str) -> Signature:
    """Let nobody write to a new copy's files any more; returns its signature."""
    rows = []
    for name in sorted(os.listdir(copy)):
        path = f"{copy}/{name}"
        os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) & ~0o222)
        rows.append(_row(name, os.lstat(path)))
    return tuple(rows)


def placed(folder: str, copy: str, seen: Signature) -> Look:
    """Return the look at a folder that has this copy alone."""
    return Look(os.lstat(folder).st_mtime_ns, sum(size for _, _, size, _, _ in seen), (copy,))


def signature(copy: Path) -> Signature:
    """What a change of its files changes: names, inodes, sizes and times. Raises OSError."""
    return tuple(_row(name, os.lstat(f"{copy}/{name}")) for name in sorted(os.listdir(copy)))


def _row(name: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
