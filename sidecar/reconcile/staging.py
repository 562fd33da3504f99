"""Staging: the engine is only ever given a verified, content-named, pod-local copy.

What happens on the volume afterwards cannot hurt a running engine, and the path changes with
the bytes, so that no KV block of other weights is reused. A copy that the engine does not have
and nobody holds stays while its adapter is registered, so that the next load reads no volume; it
makes room for another, the one longest out of use first. What else lies in the folder is not touched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

from lora_fs.sidecar.errors import InputError, InvalidAdapter, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Finding, Record, Severity
from lora_fs.sidecar.reconcile.claim import Claim
from lora_fs.sidecar.registry import artifacts
from lora_fs.sidecar.validate import CODES, Expectation, validate

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
    """No room, and nothing that may make some."""


class Stager:
    """Owns ``folder``. ``locate`` gives a record's folder on the volume, to which no link leads.

    Attributes:
        aside: what a thread does before it copies or verifies, so that it is in nobody's way.
    """

    def __init__(
        self,
        folder: Path,
        locate: Callable[[Record], Path],
        expectation: Expectation,
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._locate = locate
        self._expectation = expectation
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(8, "lora-fs-stage")
        self._local = ThreadPoolExecutor(4, "lora-fs-staged")  # they read no volume, so that none can hang
        self._unused_since: dict[str, float] = {}
        self._room = threading.Lock()
        self._reserved: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # copy → its folder's time, and bytes
        self._looked_at = -LOOK_S
        self._copies: set[str] = set()  # whoever adds or replaces it has the room's lock
        self._verified: dict[Path, Signature] = {}
        self._claim = Claim()
        self.aside: Callable[[], None] = lambda: None

    def path(self, record: Record) -> str:
        """Where a record's copy lies, or would lie: the content's hash and the adapter's name."""
        return str(self._folder / record.spec.digest.removeprefix(_DIGEST) / record.name)

    def owns(self, path: str) -> bool:
        """Whether a path the engine names is one of these copies."""
        return path.startswith(f"{self._folder}{os.sep}")

    def has(self, record: Record) -> bool:
        """Whether its copy lies there, as far as this process last saw: from memory."""
        return self.path(record) in self._copies

    @property
    def copies(self) -> int:
        """How many copies there are, as last seen."""
        return len(self._copies)

    def stage(self, record: Record, *, make_room: bool = True) -> Awaitable[str]:
        """Copy, or take the copy that is there, and verify: a thread begins at once. Gives the copy's path.

        Bounded: a volume that hangs costs one thread of eight, not the loop; and a copy that is known to be
        there needs none of the eight as long as it is whole.

        Args:
            make_room: remove copies that are out of use if the bound asks for it.

        Raises:
            InvalidAdapter: the bytes are not the registered ones, or cannot be served.
            StageFull: there is no room for them.
            VolumeUnavailable: they could not be read in time.
        """
        loop, run = asyncio.get_running_loop(), copy_context().run
        begin = partial(loop.run_in_executor, self._threads, run, self._stage, record, make_room)
        if not self.has(record):
            return self._in_time(begin(), begin, record)
        return self._in_time(loop.run_in_executor(self._local, run, self._kept, record), begin, record)

    async def _in_time(
        self, begun: Awaitable[str | None], begin: Callable[[], Awaitable[str]], record: Record
    ) -> str:
        """Wait for the copy; ``begin`` makes it, if what was begun finds none that is whole."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await begun or await begin()
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"{record.key} was not copied from the volume in {self._timeout_s:.0f} s"
            ) from error

    def _kept(self, record: Record) -> str | None:
        """The copy that is there, if it is whole; one that is not is removed. Reads no volume."""
        self.aside()
        target = Path(self.path(record))
        with self._room:
            self._unused_since.pop(target.parent.name, None)
        if not target.is_dir():
            return None
        if self._is_whole(target, record):
            with self._room:
                self._copies.add(str(target))
            return str(target)
        told = event("copy.damaged", adapter=str(record.key), path=str(target))
        logger.warning("%s is not what it was: it is copied anew", target, extra=told)
        shutil.rmtree(target, ignore_errors=True)
        return None

    def _stage(self, record: Record, make_room: bool) -> str:
        kept = self._kept(record)
        if kept is not None:
            return kept
        target = Path(self.path(record))
        source = self._locate(record)
        copying = self._folder / f"{_COPYING}{secrets.token_hex(8)}"
        self._reserve(copying.name, record, make_room)
        try:
            names = [entry.path for entry in record.spec.files]
            try:
                copied = artifacts.copy_files(source, copying, names, sync=False, follow=False, carried=())
            except VolumeUnavailable as error:
                text = _gone(error, source)
                if text is None:
                    raise
                raise InvalidAdapter(str(record.key), [_finding("missing", text)]) from error
            except InputError as error:
                raise InvalidAdapter(str(record.key), [_finding("not-regular-file", str(error))]) from error
            if artifacts.digest_of(copied) != record.spec.digest:
                text = "the bytes on the volume are not the registered ones (truncated or overwritten)"
                raise InvalidAdapter(str(record.key), [_finding("digest-mismatch", text)])
            report = validate(copying, self._expected_of(record), arriving=False)
            if not report.ok:
                raise InvalidAdapter(str(record.key), report.errors)
            self._place(copying, target, record.spec.size_bytes)
        except OSError as error:
            raise VolumeUnavailable(f"cannot stage {record.key}: {error}") from error
        finally:
            shutil.rmtree(copying, ignore_errors=True)
            self._reserved.pop(copying.name, None)
        return str(target)

    def _expected_of(self, record: Record) -> Expectation:
        allowed = {code for code in record.spec.allowed if _is_allowable(code)} - self._expectation.allow
        if not allowed:
            return self._expectation
        return replace(self._expectation, allow=self._expectation.allow | allowed)

    def _place(self, copying: Path, target: Path, size_bytes: int) -> None:
        """Give a whole copy its name, and its room over to the files themselves."""
        with self._room:
            target.parent.mkdir(parents=True, exist_ok=True)
            _, of_other_names = self._sizes.pop(target.parent.name, (0, 0))
            try:
                copying.rename(target)
                self._sizes[target.parent.name] = _UNSEEN, of_other_names + size_bytes
            except OSError:
                self._looked_at = -LOOK_S
                if not target.is_dir():
                    raise
            self._copies.add(str(target))
            self._verified[target] = _signature(target)
            del self._reserved[copying.name]

    def _reserve(self, copying: str, record: Record, make_room: bool) -> None:
        """Take the room a copy needs, so that copies under way at once keep the bound together."""
        now = time.monotonic()
        with self._room:
            used = self._used_bytes()
            if now - self._looked_at >= LOOK_S or used + record.spec.size_bytes > self._max_bytes // 2:
                self._measure()
                used = self._used_bytes()
            idle = [name for name, since in self._unused_since.items() if now - since >= IDLE_S]
            for name in idle if make_room else ():
                if used + record.spec.size_bytes <= self._max_bytes:
                    break
                self._remove(name)
                used = self._used_bytes()
            if used + record.spec.size_bytes > self._max_bytes:
                raise StageFull(
                    f"no room to stage {record.key}: {used} of {self._max_bytes} bytes of "
                    f"{self._folder} are in use; raise --stage-max-bytes or lower --max-loaded"
                )
            self._reserved[copying] = record.spec.size_bytes

    def _used_bytes(self) -> int:
        return sum(size for _, size in self._sizes.values()) + sum(self._reserved.values())

    def _measure(self, *, again: bool = False) -> None:
        """Look which copies there are, other processes' too, and how much each takes.

        Args:
            again: ask those that are known whether they have changed: another name of the same bytes.
        """
        known, self._sizes, self._looked_at = self._sizes, {}, time.monotonic()
        for name in filter(_COPY.fullmatch, os.listdir(self._folder)):
            with suppress(FileNotFoundError):  # another process removed it
                size = known.get(name)
                if size is None or again:
                    changed = os.lstat(self._folder / name).st_mtime_ns
                    if size is None or size[0] != changed:
                        size = changed, _size_bytes(self._folder / name)
                self._sizes[name] = size

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

    def sweep(
        self, in_use: Collection[str], registered: Container[str] = (), now: float | None = None
    ) -> None:
        """Remove copies that have been out of use for GRACE_S and are nobody's any more. Blocking.

        Args:
            registered: the digests of all adapters there are.
        """
        now = time.monotonic() if now is None else now
        used = {Path(path).parent.name for path in in_use}
        with self._room:
            copies = [path for path in self._folder.glob("*/*") if _is_copy(path.parent)]
            self._copies = set(map(str, copies))
            self._measure(again=True)
            present = set(self._sizes)
            for name in sorted(present - used):
                out_of_use_s = now - self._unused_since.setdefault(name, now)
                if out_of_use_s >= GRACE_S and f"{_DIGEST}{name}" not in registered:
                    self._remove(name)
            for name in list(self._unused_since):
                if name in used or name not in present:
                    del self._unused_since[name]

    def _remove(self, name: str) -> None:
        logger.info("removing the staged copy %s", name[:12], extra=event("copy.removed", digest=name))
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._unused_since.pop(name, None)
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


def _gone(error: VolumeUnavailable, source: Path) -> str | None:
    """What is not there, if that is why ``source`` could not be copied."""
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError | NotADirectoryError) and not source.is_dir():
        return "its folder is gone from the volume"
    return f"a registered file is gone: {error}" if isinstance(cause, FileNotFoundError) else None


def _is_allowable(code: str) -> bool:
    """A record may name codes of another lora-fs, and ones that nobody may allow.

    A pickle runs code here: this replica's operator allows it, and no writer of records.
    """
    return code != "pickle" and code in CODES and CODES[code].overridable


def _is_copy(entry: Path) -> bool:
    return _COPY.fullmatch(entry.name) is not None


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


def _finding(code: str, message: str) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, file=".", message=message)
