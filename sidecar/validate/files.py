"""Open an adapter's files without ever blocking, following a link or mapping memory.

It refuses a FIFO, a socket, a device and a symlink by the ``fstat`` of the opened file.
An absent or unreadable file is ``Refused`` with a finding's code; every other
failure of the volume is VolumeUnavailable: it is never read as "missing".
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable

SMALL_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_ESTALE_TRIES = 3  # NFS: somebody replaced the file behind the handle; the name resolves anew
# Of one file. No training leaves as many zeros, and reading them would take minutes.
MAX_HOLE_BYTES = 16 << 30
_MAX_EXTENTS = 10_000
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Refused(Exception):
    """A file is unusable; becomes a finding and never leaves ``validate``."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


class Absent(Refused):
    """Nothing has that name, by the volume's own answer."""

    def __init__(self) -> None:
        super().__init__("missing-folder", "is not there or is not a folder")


class RegularFile:
    """An opened regular file: its name, its size in bytes at the opening, reads by offset.

    A small one is read once, whole.
    """

    def __init__(self, fd: int, name: str, size_bytes: int) -> None:
        self._fd, self.name, self.size_bytes = fd, name, size_bytes
        self._whole: memoryview | None = None

    def view(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """As ``read``, without a copy of its own; puts a large file's bytes into ``buffer``."""
        if self.size_bytes <= SMALL_BYTES:
            return self._part(offset, size_bytes)
        part = buffer[:size_bytes]
        self._fill(part, offset)
        return part

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read exactly ``size_bytes`` from ``offset``; Refused("truncated") when the file has shrunk."""
        if self.size_bytes <= SMALL_BYTES:
            return bytes(self._part(offset, size_bytes))
        buffer = bytearray(size_bytes)
        self._fill(memoryview(buffer), offset)
        return bytes(buffer)

    def _part(self, offset: int, size_bytes: int) -> memoryview:
        if self._whole is None:
            whole = memoryview(bytearray(self.size_bytes))
            self._fill(whole, 0)
            self._whole = whole
        part = self._whole[offset : offset + size_bytes]
        if len(part) < size_bytes:
            raise _shrunk()
        return part

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise _unread(self.name, error) from error
            if count == 0:
                raise _shrunk()
            done += count

    def head(self) -> bytes:
        """Read the first bytes, at most 8; refuse what is never content: a Git LFS pointer, holes."""
        self._refuse_holes()
        start = self.read(0, min(self.size_bytes, len(_LFS_POINTER)))
        if start == _LFS_POINTER:
            raise Refused(
                "lfs-pointer",
                "is a Git LFS pointer, not the file",
                "run `git lfs pull` where it was cloned and copy it again",
            )
        return start[:8]

    def _refuse_holes(self) -> None:
        """Filesystems that cannot tell say that all is data."""
        at = holes = extents = 0
        while self.size_bytes > MAX_HOLE_BYTES and at < self.size_bytes and extents < _MAX_EXTENTS:
            extents += 1
            try:
                data = os.lseek(self._fd, at, os.SEEK_DATA)
                at, holes = os.lseek(self._fd, data, os.SEEK_HOLE), holes + data - at
            except OSError as error:
                if error.errno != errno.ENXIO:
                    return  # it cannot tell
                at, holes = self.size_bytes, holes + self.size_bytes - at  # no data any more
            if holes > MAX_HOLE_BYTES:
                raise Refused(
                    "unfinished-copy",
                    f"is {self.size_bytes} bytes of which more than {MAX_HOLE_BYTES} were never written",
                    "it is a sparse file: copy it again",
                )


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Open a folder for ``open_file`` and ``names``; the folder itself may be a symlink.

    Raises:
        Refused: it is not there, is not a folder, or may not be read.
        VolumeUnavailable: the volume did not answer.
    """
    fd = _open(str(folder), _FLAGS | os.O_DIRECTORY, None)
    try:
        yield fd
    finally:
        with suppress(OSError):  # it was read: what closing it says changes nothing
            os.close(fd)


@contextmanager
def open_file(folder_fd: int, name: str) -> Iterator[RegularFile | None]:
    """Open a regular file of a folder; yields None when the folder has no such name.

    Raises:
        Refused: it is a symlink, not a regular file, or may not be read.
        VolumeUnavailable: the volume did not answer.
    """
    try:
        fd = _open(name, _FLAGS | os.O_NOFOLLOW, folder_fd)
    except Absent:
        yield None
        return
    try:
        try:
            status = os.fstat(fd)
        except OSError as error:
            raise _unread(name, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise Refused("not-regular-file", f"is {_kind(status.st_mode)}, not a regular file")
        yield RegularFile(fd, name, status.st_size)
    finally:
        with suppress(OSError):
            os.close(fd)


def names(folder_fd: int, folder: Path) -> frozenset[str]:
    """List a folder's names. Raises Refused or VolumeUnavailable."""
    try:
        return frozenset(os.listdir(folder_fd))
    except PermissionError as error:
        raise Refused("permission", f"{folder} may not be listed by this process") from error
    except OSError as error:
        raise _unread(str(folder), error) from error


def _open(name: str, flags: int, dir_fd: int | None) -> int:
    for attempt in range(_ESTALE_TRIES):
        try:
            return os.open(name, flags, dir_fd=dir_fd)
        except ValueError as error:  # a NUL in the name
            raise Absent from error
        except OSError as error:
            if error.errno == errno.ESTALE and attempt + 1 < _ESTALE_TRIES:
                continue
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise Absent from error
            if error.errno == errno.ELOOP:
                hint = "copy the adapter with `cp -rL`, which copies what links point at"
                raise Refused("symlink", "is a symlink, which is not followed", hint) from error
            if error.errno == errno.ENXIO:  # what open() says of a socket
                raise Refused("not-regular-file", "is a socket or a device, not a regular file") from error
            if error.errno in (errno.EACCES, errno.EPERM):
                hint = f"make it readable for uid {os.geteuid()}"
                raise Refused("permission", "may not be read by this process", hint) from error
            raise VolumeUnavailable(f"cannot open {name}: {error.strerror}") from error
    raise AssertionError("unreachable")


def _unread(name: str, error: OSError) -> VolumeUnavailable:
    return VolumeUnavailable(f"cannot read {name}: {error.strerror}")


def _shrunk() -> Refused:
    return Refused("truncated", "became shorter while it was read", "copy it again")


def _kind(mode: int) -> str:
    for is_kind, label in (
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return label
    return "something else"
