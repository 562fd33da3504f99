"""What the processes that share a stage folder know of each other: who uses or makes a copy, or added one.

The kernel's locks on bytes of one file: a byte for each copy in use, and one for each digest under way. They
end with their process, however it ends, so that ``kill -9`` leaves nothing to clean up. The file holds the
folder's owner, and its *generation*: another number whenever a process adds something. Only ``open``,
``room`` and ``settle`` block, and ``room`` for ``ROOM_S`` at most: a process that hangs keeps its locks. On a
filesystem without such locks a process sees itself alone, and says so in its log.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.logs import event

logger = logging.getLogger(__name__)

FILE = ".lock"
LOOK_S = 0.005  # between two looks whether a removal has ended
ROOM_S = 30.0  # who counts room is done sooner
_ROOM, _ALIVE = 0, 1  # the byte of whoever counts room; of every process there is
_USED, _MADE = 1 << 60, 1 << 61  # from here on a byte for each copy; for each digest
_GENERATION_BYTES = 8
_SEPARATOR = b"\0"  # between the owner and the generation
_FLOCK = struct.Struct("hhqqi0q")


class FolderLock:
    """One process's view of one folder. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._fd: int | None = None
        self._owner = ""
        self._guard = threading.Lock()  # never held while anything blocks
        self._counting = threading.Lock()
        self._closed = False
        self._generation: bytes | None = None  # inside ``room``: as read there, or begun
        self._counted: tuple[bytes, int] | None = None  # a generation, and the bytes in use
        # Begins anywhere, so that no generation is another process's, or one of a lock file that was removed.
        self._last = secrets.randbits(8 * _GENERATION_BYTES)
        self._used: set[str] = set()
        self._unlocked: set[str] = set()  # used here, while another process was removing it
        self._removing: set[str] = set()
        self._making: set[str] = set()

    def open(self, owner: str) -> None:
        """Share the folder with ``owner``'s other processes.

        Raises:
            InputError: a living process has it for another owner.
        """
        self._fd, self._owner, self._closed = self._opened(), owner, False
        theirs = self._enter(self._fd)
        if theirs != owner:
            self.close()
            raise InputError(
                f"the stage folder {self._path.parent} is in use for {theirs}, and this is {owner}: each "
                "would remove the other's copies; give each a folder of its own (--stage-dir)"
            )

    def _enter(self, fd: int) -> str:
        """Be one of the processes there are; whose the folder is: who is first says so."""
        if self._take(_ALIVE, fcntl.F_WRLCK):
            os.ftruncate(fd, 0)
            os.pwrite(fd, os.fsencode(self._owner), 0)
        self._take(_ALIVE, fcntl.F_RDLCK, wait=True)  # who was first has written by then
        return os.fsdecode(os.pread(fd, os.fstat(fd).st_size, 0).partition(_SEPARATOR)[0])

    def close(self) -> None:
        """Let go of everything. Who waits for room gets none any more."""
        self._closed = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def use(self, copies: set[str]) -> set[str]:
        """Have exactly these in use here, so that nobody removes them; returns those that no longer are."""
        with self._guard:
            released, new = self._used - copies, copies - self._used
            self._used = copies
            self._unlocked = {one for one in new | (self._unlocked & copies) if not self._lock_use(one)}
            for copy in released - self._removing:
                self._free(_USED + _place(copy))
        return released

    def use_also(self, copy: str) -> None:
        """Have one more in use here."""
        with self._guard:
            if copy not in self._used:
                self._used.add(copy)
                if not self._lock_use(copy):
                    self._unlocked.add(copy)

    def settle(self, copy: str) -> None:
        """Wait until nobody removes a copy that is in use here. Blocks for as long as that takes."""
        while copy in self._unlocked:
            with self._guard:
                if copy in self._unlocked and self._lock_use(copy):
                    self._unlocked.discard(copy)
                    return
            time.sleep(LOOK_S)

    def in_use(self, copy: str) -> bool:
        """Whether this process uses it."""
        return copy in self._used

    @contextmanager
    def removing(self, copy: str) -> Iterator[bool]:
        """Yields True if no process uses the copy. Inside the block none begins to."""
        with self._guard:
            alone = copy not in self._used and self._take(_USED + _place(copy), fcntl.F_WRLCK)
            if alone:
                self._removing.add(copy)
        try:
            yield alone
        finally:
            if alone:
                with self._guard:
                    self._removing.discard(copy)
                    if copy not in self._used:
                        self._free(_USED + _place(copy))
                    elif self._lock_use(copy):
                        self._unlocked.discard(copy)

    def make(self, digest: str) -> bool:
        """Be the only one who copies these bytes, until ``made``. False: somebody else is."""
        with self._guard:
            if digest in self._making or not self._take(_MADE + _place(digest), fcntl.F_WRLCK):
                return False
            self._making.add(digest)
            return True

    def made(self, digest: str) -> None:
        """Let another one make it."""
        with self._guard:
            self._making.discard(digest)
            self._free(_MADE + _place(digest))

    def is_made(self, digest: str) -> bool:
        """Whether a living process copies these bytes."""
        free = self.make(digest)
        if free:
            self.made(digest)
        return not free

    def counted(self) -> int | None:
        """Return the bytes in use as this process counted them, if none has added any since; else None.

        Too many where something was removed: a removal begins no generation. Whoever lacks room looks again.
        Call inside ``room``.
        """
        at = self._counted
        return at[1] if at is not None and at[0] == self._current() else None

    def count(self, used_bytes: int) -> None:
        """Know the bytes in use, as of this generation. Call inside ``room``."""
        generation = self._current()
        self._counted = (generation, used_bytes) if generation is not None else None

    def _current(self) -> bytes | None:
        """The folder's generation, None if it has none yet."""
        if self._generation is None and self._fd is not None:
            found = os.pread(self._fd, _GENERATION_BYTES, self._generation_at())
            self._generation = found if len(found) == _GENERATION_BYTES else None
        return self._generation

    def advance(self) -> None:
        """Begin another generation. Call inside ``room``, before something is added.

        A process that dies between the two costs the others a look through the folder, and nothing else.
        """
        if self._fd is not None:
            self._last = (self._last + 1) % (1 << 8 * _GENERATION_BYTES)
            begun = self._last.to_bytes(_GENERATION_BYTES)
            os.pwrite(self._fd, begun, self._generation_at())  # a gap before it reads as zeros
            self._generation = begun

    def _generation_at(self) -> int:
        return len(os.fsencode(self._owner)) + len(_SEPARATOR)

    @contextmanager
    def room(self) -> Iterator[None]:
        """Count and change what lies in the folder, as the only one of all processes.

        Raises:
            OSError: EBUSY, another process held the lock for ``ROOM_S``; ESHUTDOWN, this one is closed.
        """
        by = time.monotonic() + ROOM_S
        if not self._counting.acquire(timeout=ROOM_S):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), self._path)
        try:
            self._renew()
            while not self._closed and not self._take(_ROOM, fcntl.F_WRLCK):
                if time.monotonic() > by:
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), self._path)
                time.sleep(LOOK_S)
            if self._closed:
                raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN), self._path)
            self._generation = None
            try:
                yield
            finally:
                self._free(_ROOM)
        finally:
            self._counting.release()

    def _renew(self) -> None:
        """Open the file anew where somebody removed it: others would lock another one."""
        if self._fd is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        fd = self._opened()
        with self._guard:
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            self._unlocked = {copy for copy in self._used if not self._lock_use(copy)}
            for digest in self._making:
                self._take(_MADE + _place(digest), fcntl.F_WRLCK)
        self._enter(self._fd)

    def _opened(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _lock_use(self, copy: str) -> bool:
        return copy not in self._removing and self._take(_USED + _place(copy), fcntl.F_RDLCK)

    def _take(self, at: int, kind: int, *, wait: bool = False) -> bool:
        if self._fd is None:
            return True
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _request(kind, at))
        except BlockingIOError:
            return False
        except OSError as error:
            logger.debug("%s takes no lock: %s", self._path, error, extra=event("stage.no_lock"))
        return True

    def _free(self, at: int) -> None:
        if self._fd is not None:
            with suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, at))


def _place(what: str) -> int:
    """The byte of a digest, or of a copy by its path, wherever each process has the folder."""
    name = os.sep.join(what.split(os.sep)[-2:])
    return int.from_bytes(blake2b(os.fsencode(name), digest_size=7).digest())


def _request(kind: int, at: int) -> bytes:
    """A ``struct flock`` for one byte."""
    return _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0)
