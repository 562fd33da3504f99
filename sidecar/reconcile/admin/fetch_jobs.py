"""Registrations from elsewhere take longer than a caller waits: each goes on without its caller.

One job serves every caller of a name and source. A caller waits for ``wait_s`` and then learns the progress;
a later call waits on, or gets the outcome. The job drops an uncollected outcome after KEPT_S, or when its
revision was withdrawn or replaced. Only running jobs count against MOST_KNOWN, which bounds each namespace.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import SourceUnavailable, TemporaryError, WaitTimeout
from lora_fs.sidecar.model import Download, Phase
from lora_fs.sidecar.reconcile.admin.fetching import CHECKING, Tell

AT_ONCE = 4
SHARE = 2  # of these, where several namespaces are served: a tenant's slow sources leave threads to others
MOST_KNOWN = 64
KEPT_S = 600.0

Result = TypeVar("Result")
Call = Callable[[Tell, Callable[[], bool]], Result]


class Busy(TemporaryError):
    """The maximum number of the namespace's downloads is already under way."""

    retry_after_s = 10.0


@dataclass(slots=True)
class _Job:
    task: asyncio.Task[Any]
    told: Download
    ended: float | None = None

    def has_outcome(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


@dataclass(slots=True)
class Downloads:
    """One replica's downloads.

    Attributes:
        wait_s: of a caller.
        share: how many downloads of one namespace run at once.
        wake: called when one begins or ends.
    """

    wait_s: float
    share: int = AT_ONCE
    wake: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    _jobs: dict[tuple[str, ...], _Job] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: Daemons = field(default_factory=lambda: Daemons(AT_ONCE, "lora-fs-fetch"))
    _turns: dict[str, asyncio.Semaphore] = field(default_factory=dict)  # by namespace

    def under_way(self) -> Mapping[str, Download]:
        """By served name, as far as they are now."""
        return {job.told.name: job.told for job in self._jobs.values() if job.ended is None}

    def stop(self) -> None:
        """Let them end soon; what arrived stays on the volume."""
        self._stopped.set()

    async def run(
        self,
        what: tuple[str, ...],
        told: Download,
        call: Call[Result],
        stands: Callable[[Result], Awaitable[bool]] | None = None,
    ) -> Result:
        """Do ``call`` in a thread, or wait for the same that is under way.

        Args:
            what: the same is the same work.
            call: given how to tell how far it is, and whether it shall end.
            stands: whether the outcome of one that ended before still holds; if not, it is done again.
                None: it does.
        Raises:
            WaitTimeout: it goes on. Busy: it was not begun. What ``call`` and ``stands`` raise.
        """
        self._forget()
        job = self._jobs.get(what)
        if job is not None and stands is not None and job.has_outcome():  # report a failure once more
            if not await stands(job.task.result()) and self._jobs.get(what) is job:
                del self._jobs[what]
            job = self._jobs.get(what)
        if job is None:
            job = self._begin(what, told, call)
        task: asyncio.Task[Result] = job.task
        await asyncio.wait({task}, timeout=self.wait_s)
        if not task.done():
            raise WaitTimeout(
                f"{told.name} is not registered yet: {job.told.progress()} of {told.source}. It goes on: ask "
                "again, or look for it in /v1/lora_adapters"
            )
        if self._jobs.get(what) is job:  # who waited beside us may have taken it, and begun another
            del self._jobs[what]
        return task.result()

    def _begin(self, what: tuple[str, ...], told: Download, call: Call[Any]) -> _Job:
        own = sum(j.ended is None and j.told.namespace == told.namespace for j in self._jobs.values())
        if own >= MOST_KNOWN:
            raise Busy(f"{own} downloads of namespace {told.namespace} are under way here: ask again later")
        task = asyncio.create_task(self._work(what, call), name=f"fetch {told.name}")
        job = self._jobs[what] = _Job(task, told)
        task.add_done_callback(lambda _: self._ended(job))
        self.wake()
        return job

    async def _work(self, what: tuple[str, ...], call: Call[Result]) -> Result:
        def tell(step: str, received: int, total: int | None) -> None:
            job = self._jobs[what]
            phase = Phase.VALIDATING if step == CHECKING else Phase.DOWNLOADING
            job.told = job.told.model_copy(
                update={"phase": phase, "reason": step, "received_bytes": received, "size_bytes": total}
            )

        def work() -> Result:
            if self._stopped.is_set():
                raise SourceUnavailable("this replica ends: ask another one")
            return call(tell, self._stopped.is_set)

        namespace = self._jobs[what].told.namespace
        async with self._turns.setdefault(namespace, asyncio.Semaphore(self.share)):
            return await self._threads.run(work)

    def _ended(self, job: _Job) -> None:
        job.ended = self.clock()
        if not job.task.cancelled():
            job.task.exception()  # fetched: nobody may ask for it
        self.wake()

    def _forget(self) -> None:
        """Drop outcomes older than KEPT_S, and all but the latest MOST_KNOWN of the others."""
        ended = {what: job.ended for what, job in self._jobs.items() if job.ended is not None}
        latest, now = sorted(ended, key=ended.__getitem__)[-MOST_KNOWN:], self.clock()
        for what, at in ended.items():
            if what not in latest or now - at > KEPT_S:
                del self._jobs[what]


def begun(name: str, namespace: str, source: str) -> Download:
    """One that begins now."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Download(name=name, namespace=namespace, source=source, phase=Phase.DOWNLOADING, since=at)
