"""An adapter's bytes: their digest, their copy onto the volume, their fingerprint.

The digest is over the *served* files (config and weights): what the engine reads and nothing else. A copy
goes to a temporary folder, and a rename puts it into place whole.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import Conflict, InputError, VolumeUnavailable
from lora_fs.sidecar.model import FileEntry, Scope
from lora_fs.sidecar.registry.format.layout import REGISTERING, Layout
from lora_fs.sidecar.registry.lifecycle.taking import LEAST_BYTES, Taker, writing
from lora_fs.sidecar.registry.volume import atomic, permissions
from lora_fs.sidecar.trust import BUNDLE

CHUNK_BYTES = 1 << 20
SERVED = ("adapter_config.json", "adapter_model.safetensors")
CARRIED = ("metadata.json", "README.md", BUNDLE)  # copied along, not part of the digest
MAX_CARRIED_BYTES = 1 << 20  # a larger one stays where it is
MAX_ENTRIES = 1_000  # of a dropped folder: each costs a stat at every look
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # need not be listable

Progress = Callable[[int], None]


def open_regular(path: str | Path, dir_fd: int | None = None) -> int:
    """Open a regular file to read it; follow no link, and wait for nothing."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    try:
        regular = stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    if not regular:
        os.close(handle)
        raise InputError(f"{path} is not a regular file")
    return handle


@contextmanager
def entered(start: str | Path, *names: str) -> Iterator[int]:
    """The folder that ``names`` lead to, held open for listing; neither they nor ``start`` may be a link.

    It searches the folders on the way, and lists none. Raises OSError: there is no such folder, or a link.
    """
    handle = os.open(start, _PASSED | os.O_NOFOLLOW)
    try:
        for name in (*names, "."):
            flags = _FOLDER if name == "." else _PASSED
            deeper = os.open(name, flags | os.O_NOFOLLOW, dir_fd=handle)
            handle, passed = deeper, handle
            os.close(passed)
        yield handle
    finally:
        atomic.close(handle)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A folder, held open: whatever is put in its place meanwhile, its own files are read.

    The kernel says where the open folder lies. Where that is no answer, each name on the way is opened. So a
    link that somebody put there since the resolution is found.

    Raises:
        SymbolicLink: it, or a folder on its way, is a symlink.
        VolumeUnavailable: the volume does not open it.
    """
    with ExitStack() as stack:
        try:
            handle = os.open(folder, _FOLDER | os.O_NOFOLLOW)
            stack.callback(atomic.close, handle)
            if not _lies_at(folder, handle):
                names = folder.parts[1:] if folder.anchor else folder.parts
                handle = stack.enter_context(entered(folder.anchor or ".", *names))
        except OSError as error:
            if any(map(os.path.islink, (folder, *folder.parents))):
                raise SymbolicLink(f"{folder} is a symlink or behind one, which is not followed") from error
            raise atomic.unavailable(error, f"cannot open {folder}") from error
        yield handle


def _lies_at(folder: Path, handle: int) -> bool:
    """Whether the kernel gives an open folder this very path, which has no link on it then."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}") == str(folder)
    except OSError:
        return False


class SymbolicLink(InputError):
    """A folder is a symlink or behind one, and lora-fs follows none."""


def _take(
    taker: Taker,
    source: Path,
    dir_fd: int | None = None,
    progress: Progress | None = None,
    most_bytes: int = sys.maxsize,
) -> None:
    """Read a file once. Raises InputError: it is no regular one. VolumeUnavailable: it cannot be read."""
    name = source if dir_fd is None else source.name
    with atomic.explained(f"cannot copy {source}"):
        with os.fdopen(open_regular(name, dir_fd), "rb", buffering=0) as reader:
            taker(source.name, memoryview(b""))
            for part in _parts(reader, most_bytes):
                taker(source.name, part)
                if progress is not None:
                    progress(len(part))
        taker.end()


def _parts(reader: io.FileIO, most_bytes: int) -> Iterator[memoryview]:
    """The parts of a file. As ``Taker`` allows, a part's buffer is reused two parts later."""
    size = min(CHUNK_BYTES, max(os.fstat(reader.fileno()).st_size + 1, LEAST_BYTES))
    for buffer in itertools.cycle(memoryview(bytearray(size)) for _ in range(2)):
        count, limit = 0, min(size, most_bytes)
        while count < limit and (more := reader.readinto(buffer[count:limit])):
            count += more
        if count:
            yield buffer[:count]
        if count < size:  # the file's end, or all that was wanted
            return
        most_bytes -= count


def hash_files(folder: Path, files: Sequence[str]) -> tuple[FileEntry, ...]:
    """Hash the named files of a folder."""
    with Taker(None) as taker:
        for name in files:
            _take(taker, folder / name)
    return tuple(taker.files)


def size_of_served(folder: int) -> int:
    """The least size of the served files of an open folder, in bytes; 0 if unknown."""
    found = 0
    for name in SERVED:
        with suppress(OSError):
            found += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return found


def digest_of(files: Sequence[FileEntry]) -> str:
    """One digest over paths, sizes and hashes, independent of order."""
    rows = sorted((entry.path, entry.size_bytes, entry.sha256) for entry in files)
    return "sha256:" + hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def copy_files(
    source: Path,
    target: Path,
    files: Sequence[str],
    progress: Progress | None = None,
    *,
    root: Path | None = None,
    sync: bool = True,
    folder_fd: int | None = None,
    carried: Sequence[str] = CARRIED,
) -> tuple[FileEntry, ...]:
    """Copy and hash the served files into a new folder, and copy those carried along.

    Args:
        root: of the registry that ``target`` belongs to; None: its parent exists.
        sync: make it survive a power loss; a copy that a restart makes anew need not.
        folder_fd: ``source``, opened by the caller; None: open it, and follow no link on its way.
    Raises:
        InputError: a file is no regular one. SymbolicLink: see ``opened``.
        TargetUnavailable: writing failed. VolumeUnavailable: reading did.
    """
    with (
        opened(source) if folder_fd is None else nullcontext(folder_fd) as folder,
        Taker(target, root=root, sync=sync) as taker,
    ):
        for name in files:
            _take(taker, source / name, folder, progress)
        entries = tuple(taker.files)
        carry(source, folder, taker, carried)
    return entries


@contextmanager
def drafted(
    source: Path,
    draft: Path,
    files: Sequence[FileEntry],
    *,
    root: Path,
    folder_fd: int | None = None,
    carried: Sequence[str] = CARRIED,
) -> Iterator[Path]:
    """A private copy of known files, for as long as the block lasts. Args: see ``copy_files``.

    Raises:
        Conflict: they hold other bytes than those known. What ``copy_files`` raises.
    """
    try:
        names = [entry.path for entry in files]
        copied = copy_files(source, draft, names, root=root, folder_fd=folder_fd, carried=carried)
        if digest_of(copied) != digest_of(files):
            raise Conflict(f"{source} changed while it was copied: try again")
        yield draft
    finally:
        discard(draft)


def carry(source: Path, folder: int, taker: Taker, names: Sequence[str] = CARRIED) -> None:
    """Copy what is no part of the digest from an open folder, and sync the names of all copies."""
    for name in names:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            continue  # not there: nothing to carry
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_CARRIED_BYTES:
            _take(taker, source / name, folder, most_bytes=MAX_CARRIED_BYTES)
    taker.sync_names()


def place(draft: Path, target: Path) -> bool:
    """Rename a finished copy to its place, in a folder that is there. False if something lies there already.

    Either way what lies there survives a power loss by its name: who placed it may have died before.
    It marks a copy that no record names yet, until ``unmark``, as one that nobody dropped.
    """
    placed = True
    try:
        os.rename(draft, target)
    except OSError as error:
        if not atomic.is_folder(target):
            raise atomic.unavailable(error, f"cannot move the copy to {target}") from error
        placed = False
    atomic.sync_names(target.parent)
    return placed


def mark(draft: Path) -> None:
    """Mark a copy that others wrote into ``.incoming/``, and let whoever may read the folder read it.

    Syncs the names of its files, whose bytes are synced.
    """
    permissions.share_copy(draft, draft.parent)
    with writing(draft / REGISTERING):
        (draft / REGISTERING).touch()
        atomic.sync_folder(draft)


def unmark(folder: Path) -> None:
    """A record names it now. A mark that stays changes nothing beside one."""
    atomic.discard(folder / REGISTERING)


def new_draft(layout: Layout, scope: Scope) -> Path:
    """A fresh name in ``.incoming/`` for a copy under way."""
    return layout.incoming(scope) / secrets.token_hex(16)


def discard(folder: Path) -> None:
    """Remove an unwanted copy; what stays behind is gc's business."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Sight:
    """A folder at a glance: a digest over its files' (path, size, mtime), and their names.

    ``crowded``: it holds more than MAX_ENTRIES, and the others are unread.
    """

    fingerprint: str
    names: frozenset[str]
    crowded: bool = False


def look(folder: str | Path, folder_fd: int | None = None) -> Sight | None:
    """Look at a folder without opening its files; None if it is gone, or no folder (a link is none).

    Args:
        folder_fd: the folder, opened by the caller: its path does not count.
    Raises:
        VolumeUnavailable: the volume does not answer.
    """
    try:
        with entered(folder) if folder_fd is None else nullcontext(folder_fd) as handle:
            return _look_into(handle)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise VolumeUnavailable(f"cannot look into {folder}: {os.strerror(error.errno or 0)}") from error


def _look_into(folder: int) -> Sight:
    rows: list[tuple[str, int, int]] = []
    crowded = False
    with os.scandir(folder) as entries:
        for entry in entries:
            if crowded := len(rows) == MAX_ENTRIES:
                break
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                rows.append((entry.name, -1, -1))  # removed since: the folder is still there
                continue
            rows.append((entry.name, status.st_size, status.st_mtime_ns))
    digest = hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()
    return Sight(digest[:32], frozenset(name for name, _, _ in rows), crowded)


def fingerprint(folder: Path, folder_fd: int | None = None) -> str | None:
    """The fingerprint of a folder; None if it is gone. ``folder_fd``: see ``look``."""
    seen = look(folder, folder_fd)
    return seen.fingerprint if seen is not None else None
