"""Staging: the engine is only ever given a verified, content-named, pod-local copy.

What happens on the volume afterwards cannot hurt a running engine, and the path changes with
the bytes, so that no KV block of other weights is reused. What copies there are, and which of them
stay, is ``copies``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InputError, InvalidAdapter, VolumeUnavailable
from lora_fs.sidecar.model import Finding, Record, Severity
from lora_fs.sidecar.reconcile.stage.cache import Copies, StageFull, refused
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import TargetUnavailable
from lora_fs.sidecar.validate import CODES, Expectation, validate


class Stager(Copies):
    """The copies, and how one is made. ``locate``: a record's folder on the volume, to which no link leads.

    Attributes:
        aside: what a thread does before it copies or verifies, so that it is in nobody's way.
        find_room: asked for so many bytes for a record's copy; says whether it is worth another try.
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
        super().__init__(folder, max_bytes=max_bytes)
        self._locate = locate
        self._expectation = expectation
        self._timeout_s = timeout_s
        self._threads = Daemons(8, "lora-fs-stage")
        self._local = Daemons(4, "lora-fs-staged")  # they read no volume, so that none can hang
        self._ended = threading.Event()
        self.aside: Callable[[], None] = lambda: None
        self.find_room: Callable[[Record, int], Awaitable[bool]] = _no_room

    def stage(self, record: Record, *, make_room: bool = True) -> Awaitable[str]:
        """Copy, or take the copy that is there, and verify: a thread begins at once. Gives the copy's path.

        Bounded: a volume that hangs costs one thread of eight, not the loop; and a copy that is known to be
        there needs none of the eight as long as it is whole.

        Args:
            make_room: remove copies that are out of use if the bound asks for it, and find more room.

        Raises:
            InvalidAdapter: the bytes are not the registered ones, or cannot be served.
            StageFull: there is no room for them.
            VolumeUnavailable: they could not be read in time.
        """
        loop, run = asyncio.get_running_loop(), copy_context().run
        begin = partial(loop.run_in_executor, self._threads, run, self._stage, record, make_room)
        if not self.has(record):
            return self._in_time(begin(), begin, record, make_room)
        begun = loop.run_in_executor(self._local, run, self._kept, record)
        return self._in_time(begun, begin, record, make_room)

    def end(self) -> None:
        """Copy nothing any more; what is being copied ends at its next block."""
        self._ended.set()

    async def _in_time(
        self,
        begun: Awaitable[str | None],
        begin: Callable[[], Awaitable[str]],
        record: Record,
        make_room: bool,
    ) -> str:
        """Wait for the copy; ``begin`` makes it, if what was begun finds none that is whole.

        While the engine gives up others it is not cut off, and the volume is not blamed.
        """
        loop = asyncio.get_running_loop()
        try_until = loop.time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await begun or await begin()
            except TimeoutError as error:
                raise VolumeUnavailable(
                    f"{record.key} was not copied from the volume in {self._timeout_s:.0f} s"
                ) from error
            except StageFull as error:
                over = loop.time() > try_until
                if over or not make_room or not await self.find_room(record, error.lacks):
                    raise
            begun = begin()

    def _kept(self, record: Record) -> str | None:
        self.aside()
        try:
            kept = self.kept(record)
        except OSError as error:
            raise refused(error, f"cannot look for the copy of {record.key}") from error
        return str(kept) if kept is not None else None

    def _stage(self, record: Record, make_room: bool) -> str:
        kept = self._kept(record)
        if kept is not None:
            return kept
        self._go_on()
        source = self._locate(record)
        try:
            with self.room_for(record, make_room=make_room) as copying:
                self._copy(record, source, copying)
                return str(self.place(copying, record))
        except OSError as error:
            raise refused(error, f"cannot stage {record.key}") from error

    def _copy(self, record: Record, source: Path, copying: Path) -> None:
        """Read the registered files into a new folder, and see that they are what the record says."""
        names = [entry.path for entry in record.spec.files]
        try:
            copied = artifacts.copy_files(
                source, copying, names, self._go_on, sync=False, follow=False, carried=()
            )
        except TargetUnavailable as error:
            raise refused(error.error, f"cannot stage {record.key}") from error.error
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

    def _go_on(self, _: int = 0) -> None:
        if self._ended.is_set():
            raise VolumeUnavailable("this replica ends: ask another one")

    def _expected_of(self, record: Record) -> Expectation:
        allowed = {code for code in record.spec.allowed if _is_allowable(code)} - self._expectation.allow
        if not allowed:
            return self._expectation
        return replace(self._expectation, allow=self._expectation.allow | allowed)


async def _no_room(record: Record, lacks: int) -> bool:
    return False


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


def _finding(code: str, message: str) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, file=".", message=message)
