"""Staging: the engine is only ever given a verified, content-named, pod-local copy.

What happens on the volume afterwards cannot hurt a running engine, and the path changes with
the bytes, so that no KV block of other weights is reused. A copy that the engine does not have
and nobody holds stays while its adapter is registered, so that the next load reads no volume; it
makes room for another, the one longest out of use first.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import anyio
import anyio.to_thread

from lora_fs.sidecar.errors import InputError, InvalidAdapter, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import Finding, Record, Severity
from lora_fs.sidecar.registry import artifacts
from lora_fs.sidecar.validate import Expectation, validate

logger = logging.getLogger(__name__)

GRACE_S = 60.0
IDLE_S = 15.0  # until a copy may make room: a load that began meanwhile is known by then
_COPYING = ".copying-"
_DIGEST = "sha256:"

Signature = tuple[tuple[str, int, int, int, int], ...]


class Stager:
    """Owns ``folder``. ``locate`` gives a record's artifact folder on the volume."""

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
        self._threads = anyio.CapacityLimiter(8)
        self._unused_since: dict[str, float] = {}
        self._room = threading.Lock()
        self._reserved: dict[str, int] = {}
        self._copies: frozenset[str] = frozenset()
        self._verified: dict[Path, Signature] = {}

    def path(self, record: Record) -> str:
        """Where a record's copy lies, or would lie: the content's hash and the adapter's name."""
        return str(self._folder / record.spec.digest.removeprefix(_DIGEST) / record.name)

    def owns(self, path: str) -> bool:
        """Whether a path the engine names is one of these copies."""
        return path.startswith(f"{self._folder}{os.sep}")

    def has(self, record: Record) -> bool:
        """Whether its copy lies there, as far as this process last saw: from memory."""
        return self.path(record) in self._copies

    async def stage(self, record: Record, *, make_room: bool = True) -> str:
        """Copy, or take the copy that is there, and verify.

        Bounded: a volume that hangs costs one thread of eight, not the loop.

        Args:
            make_room: remove copies that are out of use if the bound asks for it.

        Raises:
            InvalidAdapter: the bytes are not the registered ones, or cannot be served.
            VolumeUnavailable: they could not be read in time.
        """
        try:
            with anyio.fail_after(self._timeout_s):
                return await anyio.to_thread.run_sync(
                    self._stage, record, make_room, abandon_on_cancel=True, limiter=self._threads
                )
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"{record.key} was not copied from the volume in {self._timeout_s:.0f} s"
            ) from error

    def _stage(self, record: Record, make_room: bool) -> str:
        target = Path(self.path(record))
        with self._room:
            self._unused_since.pop(target.parent.name, None)
        if target.is_dir():
            if self._is_whole(target, record):
                with self._room:
                    self._copies |= {str(target)}
                return str(target)
            logger.warning("%s is not what it was: it is copied anew", target)
            shutil.rmtree(target, ignore_errors=True)
        source = self._locate(record)
        copying = self._folder / f"{_COPYING}{secrets.token_hex(8)}"
        self._reserve(copying.name, record, make_room)
        try:
            if not source.is_dir():
                raise InvalidAdapter(
                    str(record.key), [_finding("missing", "its folder is gone from the volume")]
                )
            names = [entry.path for entry in record.spec.files]
            try:
                own = not os.path.isabs(record.spec.path)  # else linked, where an operator let it lie
                copied = artifacts.copy_files(source, copying, names, sync=False, follow=not own)
            except VolumeUnavailable as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    finding = _finding("missing", f"a registered file is gone: {error}")
                    raise InvalidAdapter(str(record.key), [finding]) from error
                raise
            except InputError as error:
                raise InvalidAdapter(str(record.key), [_finding("not-regular-file", str(error))]) from error
            if artifacts.digest_of(copied) != record.spec.digest:
                text = "the bytes on the volume are not the registered ones (truncated or overwritten)"
                raise InvalidAdapter(str(record.key), [_finding("digest-mismatch", text)])
            report = validate(copying, self._expectation)
            if not report.ok:
                raise InvalidAdapter(str(record.key), report.errors)
            self._place(copying, target)
        except OSError as error:
            raise VolumeUnavailable(f"cannot stage {record.key}: {error}") from error
        finally:
            shutil.rmtree(copying, ignore_errors=True)
            self._reserved.pop(copying.name, None)
        return str(target)

    def _place(self, copying: Path, target: Path) -> None:
        """Give a whole copy its name, and its room over to the files themselves."""
        with self._room:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                copying.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
            self._copies |= {str(target)}
            self._verified[target] = _signature(target)
            del self._reserved[copying.name]

    def _reserve(self, copying: str, record: Record, make_room: bool) -> None:
        """Take the room a copy needs, so that copies under way at once keep the bound together."""
        now = time.monotonic()
        with self._room:
            used = sum(_size_bytes(entry) for entry in self._folder.iterdir() if not _is_draft(entry))
            used += sum(self._reserved.values())
            idle = [name for name, since in self._unused_since.items() if now - since >= IDLE_S]
            for name in idle if make_room else ():
                if used + record.spec.size_bytes <= self._max_bytes:
                    break
                used -= _size_bytes(self._folder / name)
                self._remove(name)
            if used + record.spec.size_bytes > self._max_bytes:
                raise VolumeUnavailable(
                    f"no room to stage {record.key}: {used} of {self._max_bytes} bytes of "
                    f"{self._folder} are in use; raise --stage-max-bytes or lower --max-loaded"
                )
            self._reserved[copying] = record.spec.size_bytes

    def prepare(self) -> None:
        """Make the folder and drop copies an earlier process left half-done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{_COPYING}*"):
            shutil.rmtree(left, ignore_errors=True)

    def sweep(
        self, in_use: Collection[str], registered: Collection[str] = (), now: float | None = None
    ) -> None:
        """Remove copies that have been out of use for GRACE_S and are nobody's any more. Blocking.

        Args:
            registered: the digests of all adapters there are.
        """
        now = time.monotonic() if now is None else now
        used = {Path(path).parent.name for path in in_use}
        with self._room:
            copies = [path for path in self._folder.glob("*/*") if not _is_draft(path.parent)]
            self._copies = frozenset(map(str, copies))
            present = {entry.name for entry in self._folder.iterdir() if not _is_draft(entry)}
            for name in sorted(present - used):
                out_of_use_s = now - self._unused_since.setdefault(name, now)
                if out_of_use_s >= GRACE_S and f"{_DIGEST}{name}" not in registered:
                    self._remove(name)
            for name in list(self._unused_since):
                if name in used or name not in present:
                    del self._unused_since[name]

    def _remove(self, name: str) -> None:
        logger.info("removing the staged copy %s", name[:12])
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._unused_since.pop(name, None)
        self._copies = frozenset(path for path in self._copies if Path(path).parent.name != name)
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
            self._verified[copy] = seen
        return whole


def _is_draft(entry: Path) -> bool:
    return entry.name.startswith(_COPYING)


def _signature(copy: Path) -> Signature:
    found = ((path, path.lstat()) for path in sorted(copy.iterdir()))
    return tuple((path.name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in found)


def _size_bytes(folder: Path) -> int:
    """The size of a copy; one that is being removed is gone."""
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except FileNotFoundError:
        return 0


def _finding(code: str, message: str) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, file=".", message=message)
