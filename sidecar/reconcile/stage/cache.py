"""The copies on the pod's disk: their names, their room, and which of them have the right bytes.

A copy's folder is named after its content's hash and its adapter. A copy that no process uses stays while its
adapter is registered, so that the next load reads no volume. It makes room for another, the one longest
out of use first. Several processes may have copies in the folder: they count its room together, one at a
time, and none removes a copy that another uses. They leave all else in the folder alone. Answers that are not
in memory block on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_fs.sidecar.errors import InputError, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull, Unread, refused
from lora_fs.sidecar.reconcile.stage.lock import FolderLock
from lora_fs.sidecar.reconcile.stage.looks import (
    REMOVED,
    Look,
    Signature,
    close,
    copy_name,
    digest_at,
    digest_of,
    discard,
    look,
    placed,
    remove_empty,
    signature,
)
from lora_fs.sidecar.registry.lifecycle import artifacts

logger = logging.getLogger(__name__)

GRACE_S = 60.0  # an unregistered copy stays so long, and one whose process is gone: its engine may live
_COPY = re.compile(r"[0-9a-f]{64}")  # its digest
_COPYING = re.compile(r"\.copying-([0-9a-f]{64})-([0-9]+)")  # its digest, and its bytes


class Copies:
    """Owns ``folder``, which takes at most ``max_bytes``; any thread may ask."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder, self._within, self.max_bytes = folder, f"{folder}{os.sep}", max_bytes
        self._lock = FolderLock(folder)
        self._looks: dict[str, Look] = {}  # by digest; under the lock
        self._guard = threading.Lock()  # of what follows; never held while anything blocks
        self._copies: set[str] = set()  # their paths, as all that follows
        self._unused_since: dict[str, float] = {}
        self._known: set[str] = set()  # this process made or used them: nobody's, once it does not use them
        self._verified: dict[Path, Signature] = {}
        self._unread = Unread()

    def prepare(self, owner: str = "") -> None:
        """Make the folder, share it with the owner's other processes, and remove what dead ones left.

        Args:
            owner: whose adapters this folder holds. Another owner's would count as unregistered and go.
        Raises:
            InputError: a living process has it for another owner.
            VolumeUnavailable: the disk does not list it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.open(owner)
        try:
            with self._lock.room():
                self._measure()
        except OSError as error:
            raise refused(error, f"cannot look through {self._folder}") from error

    def close(self) -> None:
        """Let another owner have the folder."""
        self._lock.close()

    def path(self, record: Record) -> str:
        """Where a record's copy lies, or would lie: the content's hash and the adapter's name."""
        return f"{self._within}{copy_name(record)}"

    def owns(self, path: str) -> bool:
        """Whether a path that the engine names is one of these."""
        return path.startswith(self._within)

    def has(self, record: Record) -> bool:
        """Whether its copy lies there, as far as this process last saw: from memory."""
        return self.path(record) in self._copies

    @property
    def copies(self) -> int:
        """How many there are, as last seen: from memory."""
        return len(self._copies)

    def use(self, paths: Iterable[str]) -> None:
        """Say which copies this process's engine has, reads or is about to read: no process removes them.

        Does not block. A copy may be in use before it is made.
        """
        used = set(filter(self.owns, paths))
        released, now = self._lock.use(used), time.monotonic()
        with self._guard:
            self._known |= used
            self._unused_since.update(dict.fromkeys(released, now))

    def use_also(self, path: str) -> None:
        """Say that this process's engine is about to read one more copy. Does not block."""
        self._lock.use_also(path)

    def free_bytes(self) -> int:
        """What copies take that may make room at once, as last seen: from memory."""
        seen = ((path, self._looks.get(digest_at(path))) for path in self._removable())
        return sum(one.copies.get(path, 0) for path, one in seen if one is not None)

    def kept(self, record: Record) -> Path | None:
        """Return the copy that is there, if it is whole; remove one that is not.

        Raises:
            OSError: nobody knows. Another process may use the copy, which stays.
        """
        path = self.path(record)
        target = Path(path)
        self._lock.settle(path)
        if not target.is_dir():
            return None
        if self._is_whole(target, record):
            with self._guard:
                self._copies.add(path)
                self._known.add(path)
            return target
        told = event("copy.damaged", adapter=str(record.key), path=str(target))
        logger.warning("%s is not what it was: it is copied anew", target, extra=told)
        discard(target, self._folder)
        return None

    @contextmanager
    def making(self, record: Record, wait: Callable[[], None]) -> Iterator[None]:
        """Be the only process that copies these bytes. ``wait``: called until no other one does."""
        while not self._lock.make(digest_of(record)):
            wait()
        try:
            yield
        finally:
            self._lock.made(digest_of(record))

    @contextmanager
    def room_for(self, record: Record, *, make_room: bool) -> Iterator[Path]:
        """Room for one more copy, and the folder to make it in; the end removes what has no place.

        Call inside ``making``.

        Args:
            make_room: remove copies that are out of use if the bound asks for it.
        Raises:
            StageFull: the bound does not let it in.
        """
        copying = self._folder / f".copying-{digest_of(record)}-{record.spec.size_bytes}"
        self._reserve(copying, record, make_room)
        try:
            yield copying / record.name
        finally:
            shutil.rmtree(copying, ignore_errors=True)

    def place(self, copying: Path, record: Record) -> Path:
        """Give a whole copy its name, and its room over to the files, which nobody may write to any more."""
        target, name = Path(self.path(record)), digest_of(record)
        seen = close(str(copying))
        with self._lock.room():
            used = self._lock.counted()
            self._lock.advance()
            try:
                os.rename(copying.parent, target.parent)
                now = placed(str(target.parent), str(target), seen)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                copying.rename(target)  # the same bytes lie there under another name
                copying.parent.rmdir()
                now = look(str(target.parent), None)
            os.chmod(target, os.stat(target).st_mode & ~0o222)
            before, self._looks[name] = self._looks.get(name), now
            if used is not None:
                more = now.size_bytes - (before.size_bytes if before is not None else 0)
                self._lock.count(used + more - record.spec.size_bytes)
        with self._guard:
            self._copies.add(str(target))
            self._known.add(str(target))
            self._verified[target] = seen
            self._unused_since.setdefault(str(target), time.monotonic())
        return target

    def sweep(self, registered: Container[str] = ()) -> None:
        """Remove copies that have been out of use for GRACE_S and are nobody's any more.

        It logs what the disk refuses, and tries again: that hinders nobody who needs no copy.

        Args:
            registered: the copies of all adapters there are, as ``copy_name`` says.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock.room():
                self._measure()
                now = time.monotonic()
                for path, since in list(self._unused_since.items()):
                    if now - since >= GRACE_S and path.removeprefix(self._within) not in registered:
                        self._remove(path)
        except OSError as error:
            told = event("stage.not_swept", error=type(error).__name__)
            logger.warning("%s cannot be looked through: %s", self._folder, error, extra=told)

    def _reserve(self, copying: Path, record: Record, make_room: bool) -> None:
        """Take the room a copy needs, where every process sees it, so that all keep the bound together."""
        with self._lock.room():
            shutil.rmtree(copying, ignore_errors=True)  # of a process that died while it made this copy
            used = self._lock.counted()
            needs = record.spec.size_bytes + (self._measure() if used is None else used)
            if needs > self.max_bytes:
                needs = record.spec.size_bytes + self._measure()  # it may be less: a person removed a copy
            for path in self._removable() if make_room and needs > self.max_bytes else ():
                if needs <= self.max_bytes:
                    break
                needs -= self._remove(path)
            if needs > self.max_bytes:
                used = needs - record.spec.size_bytes
                raise StageFull(
                    f"no room to stage {record.key}: {used} of {self.max_bytes} bytes of the stage folder "
                    "are in use; raise --stage-max-bytes or lower --max-loaded",
                    needs - self.max_bytes,
                )
            self._lock.advance()
            copying.mkdir()
            self._lock.count(needs)

    def _removable(self) -> list[str]:
        """Copies that may make room, the one longest out of use first."""
        with self._guard:
            cold = time.monotonic() - GRACE_S
            unused = sorted(self._unused_since.items(), key=lambda one: one[1])
            may = (path for path, since in unused if path in self._known or since <= cold)
            return [path for path in may if not self._lock.in_use(path)]

    def _measure(self) -> int:
        """Look which copies there are, other processes' too; remove what dead ones left; all bytes in use."""
        before, looks, under_way = self._looks, dict[str, Look](), 0
        for name in os.listdir(self._folder):
            if name in before or _COPY.fullmatch(name):
                with suppress(FileNotFoundError):  # another process removed it
                    looks[name] = look(f"{self._within}{name}", before.get(name))
                if name in looks and not looks[name].copies:
                    del looks[name]
                    remove_empty(f"{self._within}{name}")
            elif copying := _COPYING.fullmatch(name):
                if self._lock.is_made(copying[1]):
                    under_way += int(copying[2])
                else:
                    shutil.rmtree(self._folder / name, ignore_errors=True)
            elif name.startswith(REMOVED):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        self._looks = looks
        self._follow()
        used_bytes = under_way + sum(one.size_bytes for one in looks.values())
        self._lock.count(used_bytes)
        return used_bytes

    def _follow(self) -> None:
        """Know since when each copy that is there is out of use, and forget those that are gone."""
        there, now = {path for one in self._looks.values() for path in one.copies}, time.monotonic()
        with self._guard:
            self._copies = there
            unused = {path for path in there if not self._lock.in_use(path)}
            self._unused_since = {path: self._unused_since.get(path, now) for path in unused}
            self._known = {path for path in self._known if path in there or self._lock.in_use(path)}
            self._verified = {copy: seen for copy, seen in self._verified.items() if str(copy) in there}

    def _remove(self, path: str) -> int:
        """Remove a copy that no process uses; the bytes it took. It does not soon try one in use again."""
        digest, copy = digest_at(path), Path(path)
        with self._lock.removing(path) as alone:
            if not alone:
                with self._guard:
                    self._known.discard(path)
                    self._unused_since[path] = time.monotonic()
                return 0
            told = event("copy.removed", digest=digest, path=path)
            logger.info("removing the staged copy %s of %s", copy.name, digest[:12], extra=told)
            discard(copy, self._folder)
        seen = self._looks.pop(digest, None)
        size_bytes = seen.copies.get(path, 0) if seen is not None else 0
        if not remove_empty(copy.parent):  # another name of these bytes has a copy
            with suppress(FileNotFoundError):
                self._looks[digest] = look(str(copy.parent), None)  # its time may not have ticked yet
        with self._guard:
            self._copies.discard(path)
            self._unused_since.pop(path, None)
            self._known.discard(path)
            self._verified.pop(copy, None)
        return size_bytes

    def _is_whole(self, copy: Path, record: Record) -> bool:
        """Whether a copy still is the registered bytes: a disk may lose its end to a crash.

        Hashed once by this process, and again when a file's size, time or inode is another.

        Raises:
            OSError: the disk does not say. An unreadable copy, as on a broken sector, counts as damaged after
                ``REREAD_S``.
        """
        names = [entry.path for entry in record.spec.files]
        try:
            seen = signature(copy)
            if self._verified.get(copy) == seen:
                return True
            whole = artifacts.digest_of(artifacts.hash_files(copy, names)) == record.spec.digest
        except InputError:  # a file is no regular one
            return False
        except (VolumeUnavailable, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and self._unread.may_be_whole(copy, cause, time.monotonic()):
                raise cause from None
            return False
        self._unread.forget(copy)
        if whole:
            with self._guard:
                self._verified[copy] = seen
        return whole
