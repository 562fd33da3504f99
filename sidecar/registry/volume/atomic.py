"""The file operations that the protocols use, and what their failures mean.

A writer writes a file once, whole, under a temporary name, and syncs it. link() then names it: exactly
one of two writers wins. Hints get theirs by rename. A writer reads the name back to learn whether it won: a
server that replays a lost reply returns EEXIST to the winner.

Nobody opens a name that should be absent: NFS would hide it for 30 s. And nobody lets an NFS server delegate
a file to it: see ``Delegations``.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_fs.sidecar.errors import TemporaryError, VolumeUnavailable
from lora_fs.sidecar.registry.format.layout import TEMPORARY
from lora_fs.sidecar.registry.volume import permissions
from lora_fs.sidecar.registry.volume.mounts import Delegations

TRANSIENT = frozenset({errno.ESTALE, errno.EINTR, errno.EAGAIN})
REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
NO_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})
TRIES = 3
READ_BACK_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.0)  # pauses after each look for the linked name
UNLINK_AFTER_S = 0.05  # an NFSv3 listing made earlier may hide the linked name for ever


class LinkUnsupported(TemporaryError):
    """This volume has no hard links: the caller falls back to unique names."""


class Ambiguous(TemporaryError):
    """The name could not be read back: the write may have landed."""


class NotRegular(VolumeUnavailable):
    """A folder, symlink, FIFO, socket or device lies in a file's place."""


def unavailable(error: OSError, what: str) -> VolumeUnavailable:
    """Return the error that says what the volume refused, and what to do."""
    advice = {
        errno.ENOSPC: "the volume is full: free space or enlarge it",
        errno.EDQUOT: "the quota is used up: free space or raise it",
        errno.EROFS: "the volume is mounted read-only here",
        errno.EACCES: "permission denied: check the owner and fsGroup",
        errno.EEXIST: "a file or a broken link is in the way of a folder",
        errno.ENOTDIR: "a file or a broken link is in the way of a folder",
    }.get(error.errno or 0, "is the volume mounted, and does it answer?")
    return VolumeUnavailable(f"{what}: {os.strerror(error.errno or 0)} ({advice})")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise an OSError of the block as ``unavailable`` says it."""
    try:
        yield
    except OSError as error:
        raise unavailable(error, what) from error


_delegations = Delegations()


def read_bytes(path: Path, limit_bytes: int = 4 << 20) -> bytes | None:
    """Read a whole regular file afresh; None if there is no such name.

    Raises:
        NotRegular: it is no file; the call did not wait for it.
        VolumeUnavailable: any other failure than absence, after three tries on ESTALE.
    """
    flags, name = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, str(path)
    direct = _delegations.flag(name)
    for attempt in range(TRIES):
        handle = None
        try:
            handle = os.open(path, flags | direct)
            status = os.fstat(handle)
            if not direct and status.st_dev not in _delegations.free:
                _delegations.learn(name, status.st_dev)
            if stat.S_ISREG(status.st_mode):
                return _read_all(handle, status.st_size, limit_bytes)
        except OSError as error:
            if handle is None and error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if direct and error.errno == errno.EINVAL:  # another filesystem is mounted there now
                _delegations.forget()
                return read_bytes(path, limit_bytes)
            if error.errno in TRANSIENT and attempt < TRIES - 1:
                continue
            if handle is not None or error.errno not in (errno.ELOOP, errno.ENXIO):
                raise unavailable(error, f"cannot {'open' if handle is None else 'read'} {path}") from error
        finally:
            if handle is not None:
                close(handle)
        raise NotRegular(f"{path} is not a regular file")
    raise AssertionError("unreachable")


def close(handle: int) -> None:
    """Close a handle after a read or a sync; an error of closing changes nothing."""
    with suppress(OSError):
        os.close(handle)


def _read_all(handle: int, size_bytes: int, limit_bytes: int) -> bytes:
    """Return the bytes, to the end of the file if ``size_bytes`` is out of date."""
    data = os.read(handle, min(size_bytes + 1, limit_bytes))
    while len(data) not in (size_bytes, limit_bytes) and (more := os.read(handle, limit_bytes - len(data))):
        data += more
    return data


def list_names(folder: Path) -> list[str] | None:
    """The names in a folder; None if there is no such folder.

    Raises:
        VolumeUnavailable: it exists, and the volume does not list it.
    """
    for attempt in range(TRIES):
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno not in TRANSIENT or attempt == TRIES - 1:
                raise unavailable(error, f"cannot list {folder}") from error
    raise AssertionError("unreachable")


def is_folder(path: Path) -> bool:
    """Return whether a folder is there, links followed.

    Raises:
        VolumeUnavailable: the volume does not say, which is not "no".
    """
    with explained(f"cannot look at {path}"):
        return path.is_dir()


def is_on_server(path: Path) -> bool:
    """Return whether a regular file has the name, by a hard link to it: ``open`` may answer from a cache.

    Raises:
        VolumeUnavailable: the volume does not say.
    """
    probe = path.parent / f"{TEMPORARY}{secrets.token_hex(16)}"
    try:
        os.link(path, probe, follow_symlinks=False)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ESTALE) and read_bytes(path) is not None
    discard(probe)
    return True


def real_path(path: Path) -> Path:
    """Return where ``path`` leads, links followed, whether or not something is there.

    Raises:
        VolumeUnavailable: a name on the way changed at every look, or does not answer.
    """
    for attempt in range(TRIES):
        try:
            return Path(os.path.realpath(path))
        except OSError as error:  # a link at the look, and none at the read
            if attempt == TRIES - 1:
                raise unavailable(error, f"cannot tell where {path} leads") from error
    raise AssertionError("unreachable")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the filesystem can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_opened(handle)
    finally:
        close(handle)


def sync_opened(folder: int) -> None:
    """Do ``sync_folder`` by a handle."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def sync_names(folder: Path) -> None:
    """Do ``sync_folder``; raise VolumeUnavailable if it fails."""
    with explained(f"cannot sync {folder}"):
        sync_folder(folder)


def _write_new(path: Path, data: bytes, *, sync: bool = True) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, permissions.READ_BY_ALL)
    try:
        permissions.share_file(handle, path.parent)
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def write_temporary(folder: Path, data: bytes, *, sync: bool = True) -> Path:
    """Write ``data`` under a temporary name. ``sync``: False for hints."""
    path = folder / f"{TEMPORARY}{secrets.token_hex(16)}"
    try:
        _write_new(path, data, sync=sync)
    except OSError as error:
        discard(path)
        raise unavailable(error, f"cannot write in {folder}") from error
    return path


def discard(path: Path) -> bool:
    """Remove a file that nobody needs; False if that failed. gc removes what stays on a volume."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


class TemporaryNames:
    """Temporary names, each to be unlinked UNLINK_AFTER_S after its link or later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Path]] = deque()
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        with self._lock:
            self._waiting.append((self._clock() + UNLINK_AFTER_S, path))

    def sweep(self, *, wait: bool = False) -> None:
        """Unlink the names that are due; with ``wait`` all. gc removes a name that stays."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                due, path = self._waiting[0]
                remaining = due - self._clock()
                if remaining > 0 and not wait:
                    return
                self._waiting.popleft()
            if remaining > 0:
                time.sleep(remaining)
            discard(path)


def publish(path: Path, data: bytes, names: TemporaryNames) -> bool:
    """Give ``data`` the name ``path`` if it is free. Returns True if our bytes have it, False if another's.

    Raises:
        LinkUnsupported: no hard links on this volume.
        Ambiguous: the name cannot be read back.
        VolumeUnavailable: full, read-only, not permitted.
    """
    temporary = write_temporary(path.parent, data)
    failure: OSError | None = None
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in REFUSED:
            discard(temporary)
            raise unavailable(error, f"cannot write {path}") from error
        failure = error
    try:
        return _is_ours(path, data, failure)
    finally:
        names.add(temporary)


def _is_ours(path: Path, data: bytes, failure: OSError | None) -> bool:
    for pause_s in READ_BACK_S:
        try:
            found = read_bytes(path)
        except NotRegular:
            return False
        except VolumeUnavailable as error:
            raise Ambiguous(f"{path} may have been written and cannot be read back") from error
        if found == data:
            try:
                sync_folder(path.parent)
            except OSError as error:
                raise Ambiguous(f"{path} was written and could not be synced") from error
            return True
        if found:
            return False
        if failure is not None and failure.errno in NO_LINK:  # sshfs answers EPERM to losers, too
            raise LinkUnsupported(f"no hard links in {path.parent}") from failure
        time.sleep(pause_s)
    raise Ambiguous(f"{path} may have been written and does not show yet") from failure


def create_unique(path: Path, data: bytes) -> None:
    """Write a file whose name no other writer uses (it holds a token), where link() is missing.

    Raises:
        Ambiguous: the file may lie there, and could not be taken back.
        VolumeUnavailable: it does not.
    """
    try:
        _write_new(path, data)
        sync_folder(path.parent)
    except OSError as error:
        if not isinstance(error, FileExistsError) and not discard(path):
            raise Ambiguous(f"{path} may have been written") from error
        raise unavailable(error, f"cannot write {path}") from error


def replace(
    path: Path, data: bytes, *, draft_in: Path | None = None, into: int | None = None, sync: bool = False
) -> None:
    """Replace a file whole. Readers see the old or the new one (or, on some, neither).

    Args:
        draft_in: another folder of the volume to write it in first. A watcher of ``path``'s own
            folder then gets one new name, not a pair that it waits half a second for.
        into: a handle on ``path``'s folder: it comes into that one, whatever is mounted meanwhile.
        sync: let it survive a power loss. Not for hints: a hint that a power loss tears fails its seal
            and is made anew. A sync would make every other writer of the volume wait.
    """
    temporary = write_temporary(draft_in or path.parent, data, sync=sync)
    try:
        os.replace(temporary, path if into is None else path.name, dst_dir_fd=into)
    except OSError as error:
        discard(temporary)
        raise unavailable(error, f"cannot replace {path}") from error
    if sync:
        sync_names(path.parent)
