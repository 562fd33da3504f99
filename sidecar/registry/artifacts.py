"""An adapter's bytes: their digest, their copy onto the volume, their fingerprint.

The digest is over the *served* files (config and weights): what the engine would read and
nothing else. Copies go to a temporary folder and are renamed into place whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import InputError, VolumeUnavailable
from lora_fs.sidecar.model import FileEntry
from lora_fs.sidecar.registry import atomic

CHUNK_BYTES = 4 << 20
CARRIED = ("metadata.json", "README.md")  # copied along, not part of the digest

Progress = Callable[[int], None]


def _open_regular(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{path} is not a regular file")
    return handle


def _copy_hashing(
    source: Path, target: Path | None, progress: Progress | None, *, sync: bool = True
) -> FileEntry:
    digest = hashlib.sha256()
    size = 0
    try:
        with os.fdopen(_open_regular(source), "rb") as reader:
            writer = target.open("xb") if target is not None else None
            try:
                while chunk := reader.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    if writer is not None:
                        writer.write(chunk)
                    if progress is not None:
                        progress(len(chunk))
                if writer is not None and sync:
                    writer.flush()
                    os.fsync(writer.fileno())
            finally:
                if writer is not None:
                    writer.close()
    except OSError as error:
        raise atomic.unavailable(error, f"cannot copy {source}") from error
    return FileEntry(path=source.name, size_bytes=size, sha256=digest.hexdigest())


def hash_files(folder: Path, files: Sequence[str], progress: Progress | None = None) -> tuple[FileEntry, ...]:
    """Hash the named files of a folder."""
    return tuple(_copy_hashing(folder / name, None, progress) for name in files)


def digest_of(files: Sequence[FileEntry]) -> str:
    """One digest over paths, sizes and hashes, independent of order."""
    rows = sorted((entry.path, entry.size_bytes, entry.sha256) for entry in files)
    return "sha256:" + hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def copy_files(
    source: Path, target: Path, files: Sequence[str], progress: Progress | None = None, *, sync: bool = True
) -> tuple[FileEntry, ...]:
    """Copy and hash the served files (and those carried along) into a new folder.

    Args:
        sync: make it survive a power loss; a copy that a restart makes anew need not.
    """
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise atomic.unavailable(error, f"cannot create {target}") from error
    entries = tuple(_copy_hashing(source / name, target / name, progress, sync=sync) for name in files)
    for name in CARRIED:
        try:
            regular = stat.S_ISREG((source / name).lstat().st_mode)
        except OSError:
            continue  # not there: nothing to carry
        if regular:
            _copy_hashing(source / name, target / name, None, sync=sync)
    try:
        if sync:
            atomic.sync_folder(target)
    except OSError as error:
        raise atomic.unavailable(error, f"cannot copy {source}") from error
    return entries


def place(incoming: Path, target: Path) -> bool:
    """Rename a finished copy to its place. False if something lies there already."""
    atomic.make_folder(target.parent)
    try:
        os.rename(incoming, target)
        atomic.sync_folder(target.parent)
    except OSError as error:
        if target.is_dir():
            return False
        raise atomic.unavailable(error, f"cannot move the copy to {target}") from error
    return True


def temporary_in(folder: Path) -> Path:
    """A fresh name for a copy under way."""
    return folder / secrets.token_hex(16)


def discard(folder: Path) -> None:
    """Remove a copy that is not wanted; what stays behind is gc's business."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Sight:
    """A folder at a glance: a digest over its files' (path, size, mtime), and their names."""

    fingerprint: str
    names: frozenset[str]


def look(folder: str | Path) -> Sight | None:
    """Look at a folder without opening its files; None if it is gone, or no folder (a link is none).

    Raises:
        VolumeUnavailable: it cannot be told.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            rows = []
            with os.scandir(handle) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    rows.append((entry.name, status.st_size, status.st_mtime_ns))
        finally:
            os.close(handle)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise VolumeUnavailable(f"cannot look into {folder}: {os.strerror(error.errno or 0)}") from error
    digest = hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()
    return Sight(digest[:32], frozenset(name for name, _, _ in rows))


def fingerprint(folder: Path) -> str | None:
    """The fingerprint of a folder; None if it is gone."""
    seen = look(folder)
    return seen.fingerprint if seen is not None else None
