"""Makes folders on a volume; a registry's own only where its marker lies.

A lost mount leaves an empty folder, and a writer must not begin another registry there. What lies deeper is
not made, since there is nothing to make it in. For a folder in the root it opens the root, sees the marker in
it, and makes the folder from that handle: it comes into the registry or nowhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.registry.format.layout import MARKER
from lora_fs.sidecar.registry.volume import atomic, permissions


def make_folder(folder: Path, *, root: Path | None = None, inherit: bool = True) -> bool:
    """Create a folder and its parents, durably. Returns False if it is there.

    Args:
        root: of the registry that the folder belongs to. Required, unless the caller makes that registry.
        inherit: take the parent's modes.
    Raises:
        VolumeUnavailable: the volume does not take it, or the root holds no registry any more.
    """
    with atomic.explained(f"cannot create {folder}"):
        return _make(folder, root, inherit)


@contextmanager
def marked(root: Path) -> Iterator[int]:
    """A handle on a root in which the marker lies, for as long as the block lasts.

    Raises:
        VolumeUnavailable: the root holds no registry any more, or the volume does not say.
    """
    with atomic.explained(f"cannot open {root}"):
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _see_marker(root, MARKER, handle)
        yield handle
    finally:
        os.close(handle)


def check_marked(root: Path) -> None:
    """Raise VolumeUnavailable unless the marker lies in a root."""
    _see_marker(root, root / MARKER)


def listed(folder: Path, *, root: Path) -> list[str] | None:
    """List a registry's folder; None if it is not there, and the registry is: a lost volume has none either.

    Raises:
        VolumeUnavailable: the volume does not list it, or the registry is gone.
    """
    names = listed_once(folder, root=root)
    if names is None or (folder == root and MARKER not in names):
        names = atomic.list_names(folder)  # the volume may have come back between list and marker
    return names


def listed_once(folder: Path, *, root: Path) -> list[str] | None:
    """Do ``listed`` with one look, where a compare-and-set follows that finds what the look missed."""
    names = atomic.list_names(folder)
    if names is None or (folder == root and MARKER not in names):
        check_marked(root)
    return names


def _see_marker(root: Path, name: str | Path, start: int | None = None) -> None:
    with atomic.explained(f"cannot look at {root / MARKER}"):
        try:
            os.stat(name, dir_fd=start, follow_symlinks=False)
        except FileNotFoundError:
            told = f"{root} holds no {MARKER} any more: is its volume still mounted?"
            raise VolumeUnavailable(told) from None


def _make(folder: Path, root: Path | None, inherit: bool) -> bool:
    if folder.parent == root:
        with marked(root) as handle:
            made = _is_made(folder.name, handle)
            if made:
                if inherit:
                    permissions.share_folder(folder, root)
                atomic.sync_opened(handle)
        return made
    try:
        made = _is_made(folder)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make(folder.parent, root, inherit)
        made = _is_made(folder)  # once: /proc and automounters' folders are there, and take none
    if made:
        if inherit:
            permissions.share_folder(folder, folder.parent)
        atomic.sync_folder(folder.parent)
    return made


def _is_made(folder: Path | str, start: int | None = None) -> bool:
    """Make a folder; False if there is one."""
    try:
        os.mkdir(folder, dir_fd=start)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or not _is_folder(folder, start):
            raise
        return False
    return True


def _is_folder(path: Path | str, start: int | None) -> bool:
    with suppress(OSError):
        return stat.S_ISDIR(os.stat(path, dir_fd=start).st_mode)
    return False
