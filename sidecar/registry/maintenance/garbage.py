"""One thing that may go, and its removal, which looks once more whether anybody needs it by now.

Ages are the volume's times against this host's clock. What the volume does not show is young.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from lora_fs.sidecar.errors import LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.registry.format.layout import TEMPORARY, Layout
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder


class What(StrEnum):
    """The kinds of garbage."""

    LEFTOVER = "leftover"  # a file or a folder that no record can come to name
    ARTIFACT = "artifact"
    REVISION = "revision"  # gc unregisters it; its files go later
    HISTORY = "history"  # generations, a tombstone or an empty revision; ``path`` first


@dataclass(frozen=True, slots=True)
class Garbage:
    """One thing that may go, and why.

    Attributes:
        size_bytes: what its going frees; of a revision, what a later gc frees.
        remove: removes it, unless somebody needs it by now.
    """

    path: Path
    what: What
    why: str
    size_bytes: int = field(compare=False)
    remove: Callable[[], object] = field(compare=False, repr=False)


def leftover(path: Path, why: str) -> Garbage:
    """A file, or a folder with all in it."""

    def remove() -> None:
        if stat.S_ISDIR(path.lstat().st_mode):
            _remove_tree(path)
        else:
            path.unlink()

    return Garbage(path, What.LEFTOVER, why, size_of(path), remove)


def artifact(layout: Layout, key: AdapterKey, why: str, still: Callable[[], bool]) -> Garbage:
    """A revision's own folder. ``still``: whether it may go, called before and after the move aside."""
    path, remove = layout.artifact(key), partial(_remove_artifact, layout, key, still)
    return Garbage(path, What.ARTIFACT, why, size_of(path), remove)


def collect(garbage: Iterable[Garbage]) -> dict[Path, LoraFsError]:
    """Remove all of it; returns what stays, each path with the reason.

    An artifact beside which a temporary name stays, stays too: the name's writer may yet link the record.
    """
    kept: dict[Path, LoraFsError] = {}
    unsafe: set[Path] = set()
    for item in garbage:
        path, folder = item.path, item.path.parent
        try:
            if item.what is What.ARTIFACT and folder in unsafe:
                raise VolumeUnavailable(f"{path} is kept: a temporary name in {folder} was not removed")
            item.remove()
        except FileNotFoundError:
            continue  # somebody else removed it
        except OSError as error:
            kept[path] = atomic.unavailable(error, f"cannot remove {path}")
            unsafe |= {folder} if path.name.startswith(TEMPORARY) else set()
        except LoraFsError as error:
            kept[path] = error
    return kept


def _remove_artifact(layout: Layout, key: AdapterKey, still: Callable[[], bool]) -> None:
    """Move it aside. Put it back if somebody registered it meanwhile.

    ``register`` looks for its artifact once more after its record: one of the two sees the other.
    """
    if not still():
        return
    path, incoming = layout.artifact(key), layout.incoming(key.scope)
    make_folder(incoming, root=layout.root)
    aside = artifacts.new_draft(layout, key.scope)
    os.rename(path, aside)
    try:
        atomic.sync_names(incoming)  # else a loss of power may bring it back, without the files that went
        goes = still()
    except LoraFsError:
        with suppress(OSError):
            os.rename(aside, path)
        raise
    if goes:
        _remove_tree(aside)
        return
    try:
        os.rename(aside, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _remove_tree(aside)  # register missed it and placed its own copy


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except RecursionError as error:
        raise VolumeUnavailable(f"{folder} is nested too deep: remove it with `rm -r`") from error


def remove_empty(folder: Path) -> None:
    """Remove a folder, unless something came into it."""
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def ahead_s(layout: Layout) -> float:
    """How far this host's clock is ahead of the volume's, in seconds; 0.0 if unknown."""
    try:
        probe = atomic.write_temporary(layout.leases, b"", sync=False)
        try:
            return max(0.0, time.time() - probe.lstat().st_mtime)
        finally:
            probe.unlink(missing_ok=True)
    except (OSError, VolumeUnavailable):
        return 0.0


def age_s(path: Path) -> float:
    """Seconds since the last change; a path that is gone or unknown is young."""
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime
    return float("-inf")


def is_older(path: Path, seconds: float) -> bool:
    """Whether it was last changed so long ago."""
    return age_s(path) >= seconds


def size_of(path: Path) -> int:
    """Sum a file's or a folder's bytes. What goes away meanwhile, or is nested too deep, counts nothing."""
    total = 0
    with suppress(OSError, RecursionError):
        for one in (path, *path.rglob("*")) if not path.is_symlink() else ():
            with suppress(OSError):
                status = one.lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
