"""The few file operations the protocols stand on, and what their failures mean.

Every file is written once, whole, under a temporary name, synced, and then given its name:
by link(), which exactly one of two writers wins; or, for hints, by rename. Who won is known
by reading the name back and finding one's own bytes, never by a return code: a server that
replays a lost reply answers EEXIST to the winner.

Names expected to be absent are never opened: on NFS that hides them for half a minute.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from lora_fs.sidecar.errors import TemporaryError, VolumeUnavailable
from lora_fs.sidecar.registry.layout import TEMPORARY

TRANSIENT = frozenset({errno.ESTALE, errno.EINTR, errno.EAGAIN})
REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
NO_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})
UNLINK_AFTER_S = 0.05  # an NFSv3 listing made earlier may hide the linked name for ever


class LinkUnsupported(TemporaryError):
    """This volume has no hard links: the caller falls back to unique names."""


class Ambiguous(TemporaryError):
    """The name could not be read back: the write may have landed."""


def unavailable(error: OSError, what: str) -> VolumeUnavailable:
    """Say what the volume refused, and what to do."""
    advice = {
        errno.ENOSPC: "the volume is full: free space or enlarge it",
        errno.EDQUOT: "the quota is used up: free space or raise it",
        errno.EROFS: "the volume is mounted read-only here",
        errno.EACCES: "permission denied: check the owner and fsGroup",
    }.get(error.errno or 0, "the volume did not answer; it is retried")
    return VolumeUnavailable(f"{what}: {os.strerror(error.errno or 0)} ({advice})")


def read_bytes(path: Path, limit_bytes: int = 4 << 20) -> bytes | None:
    """Read a whole regular file afresh; None if there is no such name.

    Raises:
        VolumeUnavailable: any failure other than absence, after three tries on ESTALE.
    """
    for attempt in range(3):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if error.errno in TRANSIENT and attempt < 2:
                continue
            raise unavailable(error, f"cannot open {path}") from error
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise VolumeUnavailable(f"{path} is not a regular file")
            with os.fdopen(handle, "rb", closefd=False) as stream:
                return stream.read(limit_bytes)
        except OSError as error:
            if error.errno not in TRANSIENT or attempt == 2:
                raise unavailable(error, f"cannot read {path}") from error
        finally:
            os.close(handle)
    raise AssertionError("unreachable")


def list_names(folder: Path) -> list[str] | None:
    """The names in a folder; None if there is no such folder.

    Raises:
        VolumeUnavailable: it exists and could not be listed.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unavailable(error, f"cannot list {folder}") from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; an existing one is fine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unavailable(error, f"cannot create {folder}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss, where the filesystem can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def _write_new(path: Path, data: bytes, *, sync: bool = True) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def write_temporary(folder: Path, data: bytes, *, sync: bool = True) -> Path:
    """Write ``data``, synced unless it is a hint, under a name nobody reads."""
    path = folder / f"{TEMPORARY}{secrets.token_hex(16)}"
    try:
        _write_new(path, data, sync=sync)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise unavailable(error, f"cannot write in {folder}") from error
    return path


class TemporaryNames:
    """Temporary names waiting to be unlinked, no sooner than UNLINK_AFTER_S after the link."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Path]] = deque()
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        with self._lock:
            self._waiting.append((self._clock() + UNLINK_AFTER_S, path))

    def sweep(self, *, wait: bool = False) -> None:
        """Unlink what is due; with ``wait`` everything. A name that stays is gc's business."""
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
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # harmless: gc removes stale temporary names


def publish(path: Path, data: bytes, names: TemporaryNames) -> bool:
    """Give ``data`` the name ``path`` if nobody has it. True: ours is there. False: another's.

    Raises:
        LinkUnsupported: no hard links on this volume.
        Ambiguous: the name cannot be read back.
        VolumeUnavailable: full, read-only, not permitted.
    """
    temporary = write_temporary(path.parent, data)
    names.add(temporary)
    failure: OSError | None = None
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in NO_LINK:
            temporary.unlink(missing_ok=True)
            raise LinkUnsupported(f"no hard links in {path.parent}") from error
        if error.errno in REFUSED:
            raise unavailable(error, f"cannot write {path}") from error
        failure = error
    for attempt in range(6):
        try:
            found = read_bytes(path)
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
        if failure is None and attempt == 5:
            break
        time.sleep(0.005 * 2**attempt)
    raise Ambiguous(f"{path} may have been written and does not show yet") from failure


def create_unique(path: Path, data: bytes) -> None:
    """Write a file whose name is ours alone (it holds a token), where link() is missing."""
    try:
        _write_new(path, data)
        sync_folder(path.parent)
    except OSError as error:
        raise unavailable(error, f"cannot write {path}") from error


def replace(path: Path, data: bytes, *, draft_in: Path | None = None) -> None:
    """Replace a hint whole. Readers see the old or the new one (or, on some, neither).

    Not synced: a hint that a power loss tears fails its seal and is made anew, and a sync would
    make every other writer of the volume wait.

    Args:
        draft_in: another folder of the volume to write it in first. A watcher of ``path``'s own
            folder is then told of one new name, not of a pair that it waits half a second for.
    """
    temporary = write_temporary(draft_in or path.parent, data, sync=False)
    try:
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise unavailable(error, f"cannot replace {path}") from error
