"""The copies on the pod's disk: which there are, what room they take, which of them are known to be whole.

A copy's folder is named after its content's hash and its adapter. One that the engine does not have
and nobody holds stays while its adapter is registered, so that the next load reads no volume; it makes
room for another, the one longest out of use first. Other processes of the same owner may have copies in
the folder, too; what else lies in it is not touched. What is not told from memory blocks on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_fs.sidecar.errors import LoraFsError, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.stage.claim import Claim
from lora_fs.sidecar.registry.lifecycle import artifacts

logger = logging.getLogger(__name__)

GRACE_S = 60.0
IDLE_S = 15.0  # until a copy may make room: a load that began meanwhile is known by then
LOOK_S = 1.0  # for so long it is not asked, in a folder not half full, what other processes have put there
_COPYING = ".copying-"
_COPY = re.compile(r"[0-9a-f]{64}")  # its digest
_DIGEST = "sha256:"
_UNSEEN = 0  # the time of a folder that was not looked at since it changed

Signature = tuple[tuple[str, int, int, int, int], ...]


class StageFull(VolumeUnavailable):
    """No room, and nothing that may make some. ``lacks``: so many bytes."""

    def __init__(self, message: str, lacks: int = 0) -> None:
        super().__init__(message)
        self.lacks = lacks


def refused(error: OSError, what: str) -> VolumeUnavailable:
    """Say what the stage folder's own disk refused, and what to do: it is not the registry's volume."""
    advice = {
        errno.ENOSPC: "the stage folder's disk is full: give LORA_FS_STAGE_DIR a larger one, or lower "
        "--stage-max-bytes to what it has",
        errno.EDQUOT: "the stage folder's quota is used up: raise it, or lower --stage-max-bytes to it",
    }.get(error.errno or 0, "is LORA_FS_STAGE_DIR a local folder that may be written to?")
    return VolumeUnavailable(f"{what}: {os.strerror(error.errno or 0)} ({advice})")


class Copies:
    """Owns ``folder``, which takes at most ``max_bytes``; any thread may ask."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._unused_since: dict[str, float] = {}
        self._released: set[str] = set()  # they need not wait IDLE_S; replaced on the event loop alone
        self._room = threading.Lock()
        self._reserved: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # copy → its folder's time, and bytes
        self._looked_at = -LOOK_S
        self._copies: set[str] = set()  # whoever adds or replaces it has the room's lock
        self._verified: dict[Path, Signature] = {}
        self._claim = Claim()

    def prepare(self, owner: str = "") -> None:
        """Make the folder, see that it is ours, and drop copies an earlier process left half-done.

        Args:
            owner: whose adapters are staged here. Processes of one owner may share the folder; those of
                another would remove its copies, as registered nowhere.
        Raises:
            InputError: a living process has it for another owner.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._claim.take(self._folder, owner):
            for left in self._folder.glob(f"{_COPYING}*"):
                shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        """Let another owner have the folder."""
        self._claim.release()

    def path(self, record: Record) -> str:
        """Where a record's copy lies, or would lie: the content's hash and the adapter's name."""
        return str(self._folder / record.spec.digest.removeprefix(_DIGEST) / record.name)

    def owns(self, path: str) -> bool:
        """Whether a path that the engine names is one of these."""
        return path.startswith(f"{self._folder}{os.sep}")

    def has(self, record: Record) -> bool:
        """Whether its copy lies there, as far as this process last saw: from memory."""
        return self.path(record) in self._copies

    @property
    def copies(self) -> int:
        """How many there are, as last seen: from memory."""
        return len(self._copies)

    def kept(self, record: Record) -> Path | None:
        """The copy that is there, if it is whole; one that is not is removed."""
        target = Path(self.path(record))
        with self._room:
            self._unused_since.pop(target.parent.name, None)
            self._released.discard(target.parent.name)
        if not target.is_dir():
            return None
        if self._is_whole(target, record):
            with self._room:
                self._copies.add(str(target))
            return target
        told = event("copy.damaged", adapter=str(record.key), path=str(target))
        logger.warning("%s is not what it was: it is copied anew", target, extra=told)
        shutil.rmtree(target, ignore_errors=True)
        return None

    @contextmanager
    def room_for(self, record: Record, *, make_room: bool) -> Iterator[Path]:
        """Room for one more copy, and the folder to make it in; what is not placed is removed.

        Args:
            make_room: remove copies that are out of use if the bound asks for it.
        Raises:
            StageFull: the bound does not let it in.
        """
        copying = self._folder / f"{_COPYING}{secrets.token_hex(8)}"
        self._reserve(copying.name, record, make_room)
        try:
            yield copying
        finally:
            shutil.rmtree(copying, ignore_errors=True)
            self._reserved.pop(copying.name, None)

    def place(self, copying: Path, record: Record) -> Path:
        """Give a whole copy its name, and its room over to the files themselves."""
        target = Path(self.path(record))
        with self._room:
            target.parent.mkdir(parents=True, exist_ok=True)
            _, of_other_names = self._sizes.pop(target.parent.name, (0, 0))
            try:
                copying.rename(target)
                self._sizes[target.parent.name] = _UNSEEN, of_other_names + record.spec.size_bytes
            except OSError:
                self._looked_at = -LOOK_S
                if not target.is_dir():
                    raise
            self._copies.add(str(target))
            self._verified[target] = _signature(target)
            del self._reserved[copying.name]
        return target

    def release(self, in_use: Collection[str], unloaded: Collection[str] = ()) -> int:
        """Let copies of this process that are out of use make room at once; the bytes that they have.

        Does not block. Call it where what is in use is known: who takes a copy afterwards asks ``kept``, and
        no copy that was asked for since makes room.

        Args:
            unloaded: copies that this process has unloaded, whoever made them.
        """
        ours = {path.parent.name for path in (*self._verified.copy(), *map(Path, unloaded))}
        released = ours - {Path(path).parent.name for path in in_use}
        self._released = released.copy()  # threads take from it
        return sum(self._sizes.get(name, (_UNSEEN, 0))[1] for name in released)

    def sweep(
        self, in_use: Collection[str], registered: Container[str] = (), now: float | None = None
    ) -> None:
        """Remove copies that have been out of use for GRACE_S and are nobody's any more.

        What the disk refuses is told, and hinders nobody who needs no copy: it is tried again.

        Args:
            registered: the digests of all adapters there are.
        """
        try:
            self._sweep(in_use, registered, now)
        except OSError as error:
            told = event("stage.not_swept", error=type(error).__name__)
            logger.warning("%s cannot be looked through: %s", self._folder, error, extra=told)

    def _sweep(self, in_use: Collection[str], registered: Container[str], now: float | None) -> None:
        now = time.monotonic() if now is None else now
        used = {Path(path).parent.name for path in in_use}
        with self._room:
            self._released.difference_update(used)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._measure(again=True)
            present = set(self._sizes)
            self._copies = {copy for name in present for copy in _names_of(self._folder / name)}
            for name in sorted(present - used):
                out_of_use_s = now - self._unused_since.setdefault(name, now)
                if out_of_use_s >= GRACE_S and f"{_DIGEST}{name}" not in registered:
                    self._remove(name)
            for name in list(self._unused_since):
                if name in used or name not in present:
                    del self._unused_since[name]

    def _reserve(self, copying: str, record: Record, make_room: bool) -> None:
        """Take the room a copy needs, so that copies under way at once keep the bound together."""
        now = time.monotonic()
        with self._room:
            used = self._used_bytes()
            if now - self._looked_at >= LOOK_S or used + record.spec.size_bytes > self._max_bytes // 2:
                self._measure()
                used = self._used_bytes()
            idle = [name for name, since in self._unused_since.items() if now - since >= IDLE_S]
            released = self._released.copy().difference(idle)
            for name in (*idle, *released) if make_room else ():
                if used + record.spec.size_bytes <= self._max_bytes:
                    break
                self._remove(name)
                used = self._used_bytes()
            if used + record.spec.size_bytes > self._max_bytes:
                raise StageFull(
                    f"no room to stage {record.key}: {used} of {self._max_bytes} bytes of "
                    "the stage folder are in use; raise --stage-max-bytes or lower --max-loaded",
                    used + record.spec.size_bytes - self._max_bytes,
                )
            self._reserved[copying] = record.spec.size_bytes

    def _used_bytes(self) -> int:
        return sum(size for _, size in self._sizes.values()) + sum(self._reserved.values())

    def _measure(self, *, again: bool = False) -> None:
        """Look which copies there are, other processes' too, and how much each takes.

        Args:
            again: ask those that are known whether they have changed: another name of the same bytes.
        """
        known, sizes = self._sizes, {}
        self._looked_at = time.monotonic()
        for name in filter(_COPY.fullmatch, os.listdir(self._folder)):
            with suppress(FileNotFoundError):  # another process removed it
                size = known.get(name)
                if size is None or again:
                    changed = os.lstat(self._folder / name).st_mtime_ns
                    if size is None or size[0] != changed:
                        size = changed, _size_bytes(self._folder / name)
                sizes[name] = size
        self._sizes = sizes

    def _remove(self, name: str) -> None:
        logger.info("removing the staged copy %s", name[:12], extra=event("copy.removed", digest=name))
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._unused_since.pop(name, None)
        self._released.discard(name)
        self._sizes.pop(name, None)
        self._copies = {path for path in self._copies if Path(path).parent.name != name}
        self._verified = {path: seen for path, seen in self._verified.items() if path.parent.name != name}

    def _is_whole(self, copy: Path, record: Record) -> bool:
        """Whether a copy still is the registered bytes: a disk may lose its end to a crash.

        Hashed once by this process, and again when a file's size, time or inode is another.
        """
        names = [entry.path for entry in record.spec.files]
        try:
            seen = _signature(copy)
            if self._verified.get(copy) == seen:
                return True
            whole = artifacts.digest_of(artifacts.hash_files(copy, names)) == record.spec.digest
        except (LoraFsError, OSError):
            return False
        if whole:
            with self._room:
                self._verified[copy] = seen
        return whole


def _names_of(folder: Path) -> list[str]:
    """The copy under each of its names; none where another process removed it, or it is no folder."""
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _signature(copy: Path) -> Signature:
    found = ((name, os.lstat(f"{copy}/{name}")) for name in sorted(os.listdir(copy)))
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def _size_bytes(folder: Path) -> int:
    """The size of a copy under all its names; one that is being removed is gone."""
    size = 0
    try:
        for path, _, files in os.walk(folder):
            size += sum(os.lstat(os.path.join(path, file)).st_size for file in files)
    except FileNotFoundError:
        return 0
    return size
