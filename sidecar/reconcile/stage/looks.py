"""How copies look on the pod's disk: their names and sizes, how to see a change, and how one goes away.

Another process may remove a copy meanwhile.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lora_fs.sidecar.model import Record

REMOVED = ".removed-"
_DIGEST = "sha256:"

Signature = tuple[tuple[str, int, int, int, int], ...]


class Look(NamedTuple):
    """One look at the folder of a digest.

    Attributes:
        changed_ns: when a name came or went last.
        copies: the copy under each name, and its bytes.
    """

    changed_ns: int
    copies: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.copies.values())


def look(folder: str, before: Look | None) -> Look:
    """Look at the folder of a digest. Returns ``before`` if no name came or went since.

    Raises FileNotFoundError: another process removed it.
    """
    changed_ns = os.lstat(folder).st_mtime_ns
    if before is not None and before.changed_ns == changed_ns:
        return before
    known = before.copies if before is not None else {}
    return Look(changed_ns, {one: known.get(one) or _size_bytes(one) for one in _copies(folder)})


def _size_bytes(folder: str) -> int:
    """One under removal counts as gone."""
    size = 0
    try:
        for path, _, files in os.walk(folder):
            size += sum(os.lstat(os.path.join(path, file)).st_size for file in files)
    except FileNotFoundError:
        return 0
    return size


def _copies(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


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
    return Look(os.lstat(folder).st_mtime_ns, {copy: sum(size for _, _, size, _, _ in seen)})


def signature(copy: Path) -> Signature:
    """What a change of its files changes: names, inodes, sizes and times. Raises OSError."""
    return tuple(_row(name, os.lstat(f"{copy}/{name}")) for name in sorted(os.listdir(copy)))


def _row(name: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def discard(path: Path, folder: Path) -> None:
    """Remove a copy that nobody may write to: away from its name first, at once, within the stage folder."""
    removed = folder / f"{REMOVED}{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):
        path.chmod(0o700)
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_empty(folder: str | Path) -> bool:
    """Remove a digest's folder, unless a copy is in it; return whether it is gone."""
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def digest_of(record: Record) -> str:
    """A record's digest as a folder is named after it: without its kind."""
    return record.spec.digest.removeprefix(_DIGEST)


def copy_name(record: Record) -> str:
    """Name a record's copy in whatever stage folder: one for each name of its bytes."""
    return f"{digest_of(record)}{os.sep}{record.name}"


def digest_at(path: str) -> str:
    """The digest, without its kind, in the name of a copy's folder, in whatever stage folder."""
    return os.path.basename(os.path.dirname(path))
