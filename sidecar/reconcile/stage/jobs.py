"""Staging as jobs: the engine only ever gets a verified, content-named, pod-local copy.

What happens on the volume afterwards cannot hurt a running engine. The path changes with the bytes, so that
vLLM reuses no KV block of other weights. At most one copy of a digest is under way, however many ask for it.
An asker's patience ends; the job goes on for the next one, until nobody wants it. It gives its room to a
request that needs it, and ends when somebody unregisters its adapter. ``cache`` decides which copies stay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Container
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InputError, InvalidAdapter, TemporaryError, VolumeUnavailable
from lora_fs.sidecar.model import Finding, Record, Severity
from lora_fs.sidecar.reconcile.stage.cache import Copies
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull, refused
from lora_fs.sidecar.reconcile.stage.looks import copy_name
from lora_fs.sidecar.reconcile.stage.trusted import Trusted
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.taking import TargetUnavailable
from lora_fs.sidecar.trust import BUNDLE
from lora_fs.sidecar.validate import Expectation, validate
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE

Given = TypeVarTuple("Given")
Result = TypeVar("Result")

OTHERS_S = 0.05  # between two looks whether another process has made the copy


@dataclass(eq=False)
class Job:
    """One copy under way. ``wanted``: requests that wait for it; ``given_up``: it ends at its next block."""

    record: Record
    make_room: bool
    wanted: int = 0
    given_up: threading.Event = field(default_factory=threading.Event)
    result: asyncio.Future[str] = field(init=False)


class Stager(Copies):
    """The copies, and how one is made. ``locate``: a record's folder on the volume, to which no link leads.

    Attributes:
        aside: a thread calls it before it copies or verifies, to run at a lower priority.
        find_room: takes the bytes for a record's copy, and since when the job waits; returns whether
            another try is worth it. on_end: called when a job ends. Both on the event loop.
        waiting: by path, why a load that a request waits for has no room yet.
        trusted: whether somebody who may signed a record's bytes.
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
        self._jobs: dict[str, Job] = {}  # by digest
        self._ended = threading.Event()
        self.aside: Callable[[], None] = lambda: None
        self.find_room: Callable[[Record, int, float], Awaitable[bool]] = _no_room
        self.on_end: Callable[[], None] = lambda: None
        self.waiting: dict[str, TemporaryError] = {}
        self.trusted = Trusted(expectation.trust, locate)

    def stage(self, record: Record, *, make_room: bool = True) -> Awaitable[str]:
        """Copy, or take the copy that is there, and verify; or join the job. It begins at once.

        Bounded: a hung volume costs one thread of eight, not the loop. A copy that this process verified
        needs none of the eight while it is whole.

        Args:
            make_room: a request waits: remove copies that are out of use if the bound asks for it, find more
                room, and wait for it.

        Returns:
            The copy's path.
        Raises:
            InvalidAdapter: the bytes are not the registered ones, are unfit to serve, or lack a valid
                signature. TrustUnreadable: the signature is unknown.
            StageFull: there is no room for them.
            VolumeUnavailable: they could not be read in time; the job goes on.
        """
        if self.trusted:
            return self._signed(record, make_room)
        return self._wait(self._job(record, make_room), record, make_room)

    async def _signed(self, record: Record, make_room: bool) -> str:
        """Stage a record with a valid signature. Checks each caller's record: several may share one job."""
        copy = Path(self.path(record))
        try:
            async with asyncio.timeout(self._timeout_s):
                if not (
                    self.has(record) and await self._begin(self._local, self.trusted.check_copy, record, copy)
                ):
                    await self._begin(self._threads, self.trusted.check, record, copy)
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"the signature of {record.key} was not read in {self._timeout_s:.0f} s"
            ) from error
        return await self._wait(self._job(record, make_room), record, make_room)

    async def config(self, record: Record) -> bytes:
        """The ``adapter_config.json`` of a staged copy; it makes the copy anew if that is gone.

        Raises:
            VolumeUnavailable: the disk does not give it.
            As ``stage``.
        """
        read = (Path(self.path(record)) / CONFIG_FILE).read_bytes
        run = asyncio.get_running_loop().run_in_executor
        try:
            try:
                return await run(self._local, read)
            except (FileNotFoundError, NotADirectoryError):
                await self.stage(record)
                return await run(self._local, read)
        except OSError as error:
            raise refused(error, f"cannot read the copy of {record.key}") from error

    async def mend(self, record: Record) -> bool:
        """Read a copy again after the engine refused it, whatever is known of it; make a damaged one anew.

        Returns:
            Whether it is another one than the engine got.
        Raises:
            As ``stage``.
        """
        path = Path(self.path(record))
        with self._guard:
            given = self._verified.pop(path, None)
        await self.stage(record)
        return self._verified.get(path) != given

    def sweep(self, registered: Container[str] = ()) -> None:
        """Give up the jobs of unregistered adapters that nobody waits for, and see ``Copies.sweep``."""
        for job in list(self._jobs.values()):
            if not job.wanted and copy_name(job.record) not in registered:
                job.given_up.set()
        super().sweep(registered)

    def end(self) -> None:
        """Copy nothing any more; a copy under way ends at its next block."""
        self._ended.set()

    async def _wait(self, job: Job, record: Record, make_room: bool) -> str:
        """Wait for the copy. While it waits for room nobody cuts it off, or blames the volume."""
        began, path = asyncio.get_running_loop().time(), self.path(record)
        try:
            while True:
                is_own = job.record.name == record.name and not job.given_up.is_set()
                try:
                    await self._wait_once(job, record, make_room)
                    if is_own:
                        return job.result.result()
                except StageFull as error:
                    if not make_room:
                        raise
                    self._give_up_unwanted()
                    self.waiting[path] = error
                    if not await self.find_room(record, error.lacks, began):
                        raise
                job = self._job(record, make_room)
        finally:
            self.waiting.pop(path, None)

    async def _wait_once(self, job: Job, record: Record, wanted: bool) -> None:
        job.wanted += wanted
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait({job.result})
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"{record.key} was not copied from the volume in {self._timeout_s:.0f} s: it goes on"
            ) from error
        finally:
            job.wanted -= wanted

    def _job(self, record: Record, make_room: bool) -> Job:
        """The job of a record's digest, which may be another name's; a new one if there is none."""
        digest = record.spec.digest
        job = self._jobs.get(digest)
        if job is None or job.result.done():
            job = self._jobs[digest] = Job(record, make_room)
            if self.has(record):
                kept = self._begin(self._local, self._kept, record)
                job.result = asyncio.create_task(self._keep(job, kept), name=f"stage {record.name}")
            else:
                job.result = self._begin(self._threads, self._make, job, record)
            job.result.add_done_callback(partial(self._drop, digest, job))
        return job

    async def _keep(self, job: Job, kept: Awaitable[str | None]) -> str:
        found = await kept
        if found is None:  # what lay there was not whole
            found = await self._begin(self._threads, self._make, job, job.record)
        return found

    @staticmethod
    def _begin(threads: Daemons, call: Callable[[*Given], Result], *args: *Given) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(threads, copy_context().run, call, *args)

    def _drop(self, digest: str, job: Job, result: asyncio.Future[str]) -> None:
        if self._jobs.get(digest) is job:
            del self._jobs[digest]
        if not result.cancelled():
            result.exception()  # retrieved: nobody may be waiting for it
        self.on_end()

    def _give_up_unwanted(self) -> None:
        """Let a request have the room of copies that no request waits for."""
        for job in self._jobs.values():
            if not job.wanted:
                job.given_up.set()

    def _kept(self, record: Record) -> str | None:
        self.aside()
        try:
            kept = self.kept(record)
        except OSError as error:
            raise refused(error, f"cannot look for the copy of {record.key}") from error
        return str(kept) if kept is not None else None

    def _make(self, job: Job, record: Record) -> str:
        def go_on(wait_s: float = 0) -> None:
            if self._ended.is_set():
                raise VolumeUnavailable("this replica ends: ask another one")
            if job.given_up.wait(wait_s):
                raise VolumeUnavailable(f"the copy of {record.key} was given up: nobody waited for it")

        try:
            with self.making(record, lambda: go_on(OTHERS_S)):
                kept = self._kept(record)
                if kept is not None:
                    return kept
                go_on()
                source = self._locate(record)
                with self.room_for(record, make_room=job.make_room) as copying:
                    self._copy(record, source, copying, lambda _: go_on())
                    return str(self.place(copying, record))
        except OSError as error:
            raise refused(error, f"cannot stage {record.key}") from error

    def _copy(self, record: Record, source: Path, copying: Path, progress: Callable[[int], None]) -> None:
        """Read the registered files into a new folder, and see that they are what the record says."""
        names = [entry.path for entry in record.spec.files]
        try:
            copied = artifacts.copy_files(source, copying, names, progress, sync=False, carried=(BUNDLE,))
        except TargetUnavailable as error:
            raise refused(error.error, f"cannot stage {record.key}") from error.error
        except VolumeUnavailable as error:
            text = _gone(error, source)
            if text is None:
                raise
            raise _invalid(record, "missing", text) from error
        except InputError as error:
            raise _invalid(record, "not-regular-file", str(error)) from error
        if artifacts.digest_of(copied) != record.spec.digest:
            text = "the bytes on the volume are not the registered ones (truncated or overwritten)"
            raise _invalid(record, "digest-mismatch", text)
        report = validate(copying, self._expected_of(record), arriving=False)
        if not report.ok:
            raise InvalidAdapter(str(record.key), report.errors)

    def _expected_of(self, record: Record) -> Expectation:
        """A pickle runs code here: this replica's operator allows it, and no writer of records."""
        ours = self._expectation
        allowed = {*ours.allowed(frozenset(record.spec.allowed))} - {"pickle"} - ours.allow
        return replace(ours, allow=ours.allow | allowed) if allowed else ours


async def _no_room(record: Record, lacks: int, since: float) -> bool:
    return False


def _gone(error: VolumeUnavailable, source: Path) -> str | None:
    """Say what is absent, if that is why the copy of ``source`` failed; else None."""
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError | NotADirectoryError) and not source.is_dir():
        return "its folder is gone from the volume"
    return f"a registered file is gone: {error}" if isinstance(cause, FileNotFoundError) else None


def _invalid(record: Record, code: str, message: str) -> InvalidAdapter:
    finding = Finding(code=code, severity=Severity.ERROR, file=".", message=message)
    return InvalidAdapter(str(record.key), [finding])
