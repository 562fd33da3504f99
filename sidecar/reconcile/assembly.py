"""One replica put together from the settings: in the sidecar, and in a vLLM by the plugin.

Where the root holds no registry the replica runs, is not ready, and waits for one. What runs is a thread that
watches the volume and one task; ``running`` starts both and ends both, bounded, whatever the volume does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.engine.protocol import Engine
from lora_fs.sidecar.errors import InputError, InvalidAdapter, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Finding, Policy, Record, Scope, Severity, check_segment, model_slug
from lora_fs.sidecar.reconcile.admin.fetching import Fetching
from lora_fs.sidecar.reconcile.admin.service import Registrations
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.placement import Homes, Part, homes_of
from lora_fs.sidecar.reconcile.reconciler import Limits
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.reconcile.residents.probe import GivesLogprobs
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.prefetch import Ahead
from lora_fs.sidecar.reconcile.status_file import Reporter
from lora_fs.sidecar.reconcile.watch.flat_store import FlatStore
from lora_fs.sidecar.reconcile.watch.peers import Peers
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.mounts import LOCAL, Timing, kind_of, timing_for
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.sources.allowed import Allowed, AllowedRemotes
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.validate import Expectation

logger = logging.getLogger(__name__)

HANDOVER_S = 0.0005  # a loop that comes back from the network waits so long for a thread that runs Python
SLOW_START_S = 5.0  # a start that waits for a folder longer says so
READERS = 16  # of records, at a start on a network filesystem: each waits for it 1 to 3 ms


@dataclass(frozen=True, slots=True)
class Assembly:
    """The replica, and what runs beside it."""

    replica: Replica
    volume: Volume
    stager: Stager
    reporter: Reporter
    _flat: FlatStore | None = None
    _peers: Peers | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch and reconcile while the context is open."""

        def changed() -> None:
            _spare_the_collector()
            self.replica.wake()

        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(min(usual_s, HANDOVER_S))
        self.volume.start(changed)
        if self._flat is not None:
            self._flat.start()
        loop = asyncio.create_task(self.replica.run(), name="reconcile")
        loop.add_done_callback(_say_if_it_died)
        probe = asyncio.create_task(self.replica.probe(), name="effect")
        trust = asyncio.create_task(self.stager.trusted.watch(), name="trust file")
        beat = asyncio.create_task(self.reporter.beat(self.replica), name="heartbeat")
        tasks = [loop, beat, probe, trust]
        if self._peers is not None:
            tasks.append(asyncio.create_task(self._peers.watch(self.replica.wake), name="peers"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            self.end()
            self.volume.stop()
            if self._flat is not None:
                self._flat.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.reporter.withdraw(self.replica.replica_id)
            self.stager.close()
            sys.setswitchinterval(usual_s)

    def end(self) -> None:
        """End the copying threads soon, and start no other copy."""
        self.replica.end()
        self.stager.end()


async def assemble(settings: Settings, expectation: Expectation, engine: Engine) -> Assembly:
    """Open the registry and put a replica of ``engine`` on it: in a thread, since any folder may hang.

    Raises:
        InputError: the settings name no root or model, or a name that is none.
        VolumeUnavailable, FormatTooNew, RegistryLost: the root does not open.
    """
    waits_for = [f"the registry's folder {settings.root}"]
    work = partial(_assemble, settings, expectation, engine, waits_for.append)
    opening = asyncio.ensure_future(Daemons(1, "lora-fs-start").run(work))
    try:
        await asyncio.wait({opening}, timeout=min(SLOW_START_S, settings.engine_timeout_s))
        if not opening.done():
            told = event("start.waits", folder=waits_for[-1])
            logger.warning("%s does not answer: the start waits for it", waits_for[-1], extra=told)
            await asyncio.wait({opening}, timeout=settings.engine_timeout_s - SLOW_START_S)
        if not opening.done():
            bound = f"{settings.engine_timeout_s:.0f} s"
            raise VolumeUnavailable(f"{waits_for[-1]} did not answer in {bound}: nothing can be served")
        return opening.result()
    finally:
        opening.cancel()


def _assemble(
    settings: Settings, expectation: Expectation, engine: Engine, waits_for: Callable[[str], None]
) -> Assembly:
    root = settings.root
    if root is None or not settings.model:
        raise InputError("say where the registry is and what it serves: LORA_FS_ROOT and LORA_FS_MODEL")
    model = model_slug(settings.model)
    check_segment("replica id", settings.replica_id)
    scopes = tuple(Scope(check_segment("namespace", n), model) for n in settings.serves())
    registry = Registry(root, create=settings.create, awaited=True)
    kind = kind_of(root)
    timing, readers, settle_s = _waits(kind, settings)
    waits_for("a folder of LORA_FS_ALLOWED_SOURCES")
    allowed = Allowed(root, settings.allowed_sources)
    view = RegistryView(registry, scopes, scan_s=settings.scan_s, lag_s=timing.lag_s, readers=readers)
    adopter = Adopter(
        registry,
        expectation,
        settle_s=settle_s,
        writer=settings.replica_id,
        find=lambda folder: allowed.find(folder, follow=False),
    )
    volume = Volume(registry.layout, view, adopter, poll_s=timing.poll_s, notify=kind in LOCAL)
    flat = None
    if settings.nim_source is not None:
        flat = FlatStore(
            registry,
            scopes[0],
            settings.nim_source,
            expectation,
            settle_s=settle_s,
            refresh_s=settings.nim_refresh_s,
            writer=settings.replica_id,
            desired=lambda: volume.desired,
            changed=volume.look_now,
        )
        volume.beside.append(flat.conditions)

    def found() -> None:
        """Take another filesystem's timing: its volume was mounted after the start."""
        timing, readers, settle_s = _waits(kind_of(root), settings)
        view.follow(timing.lag_s, readers)
        volume.poll_s = timing.poll_s
        for one in (adopter, flat):
            if one is not None:
                one.settle_s = settle_s

    volume.found = found
    remotes = AllowedRemotes(settings.allowed_remotes)
    registrations = Registrations(
        registry,
        scopes,
        volume,
        expectation,
        allowed=allowed,
        timeout_s=settings.engine_timeout_s,
        mounts=settings.mounts(),
        fetching=Fetching.by(settings, Options(remotes.check, remotes.check_address)),
        wait_s=min(settings.hold_timeout_s, settings.engine_timeout_s),
    )
    waits_for(f"the stage folder {settings.stage_dir}")
    stage_dir = settings.stage_dir.resolve()
    if stage_dir.is_relative_to(root.resolve()):
        raise InputError(
            f"the stage folder {stage_dir} lies in the registry's {root}: it has to be local to this "
            "replica; set --stage-dir (LORA_FS_STAGE_DIR)"
        )
    stager = Stager(
        stage_dir,
        locator(registry, allowed),
        expectation,
        max_bytes=settings.stage_max_bytes,
        timeout_s=settings.engine_timeout_s,
    )
    owner = f"{root}, {model} of {', '.join(sorted(settings.serves()))}"
    stager.prepare(owner)
    stager.trusted.look()
    volume.beside.append(stager.trusted.conditions)
    default = Policy(kind=settings.default_policy, ttl_s=settings.default_ttl_s)
    peers = None
    if settings.placement == "homes":
        peers = Peers(registry.layout, settings.replica_id, model, settings.serves())
    own = Homes(settings.replica_id)

    def part(served: Served) -> Part:
        assert peers is not None
        if not peers.is_known:
            return Part.KEEPER
        plain, homes = served.name.partition("@")[0], homes_of(served.record.spec.labels, settings.homes)
        return own.part(plain, homes, peers.living)

    limits = Limits(
        default,
        settings.max_loaded,
        settings.resync_s,
        settings.hold_timeout_s,
        settings.weights(),
        None if peers is None else part,
    )
    reporter = Reporter(registry, volume, settings.advertise_url, expectation)
    replica = Replica(
        settings.replica_id,
        model,
        settings.serves(),
        volume,
        registrations,
        engine,
        stager,
        limits,
        reporter.report,
        None if settings.stage_ahead == "off" else Ahead(stager, everything=settings.stage_ahead == "all"),
        engine.next_logprobs if settings.probe_effect and isinstance(engine, GivesLogprobs) else None,
    )
    registrations.downloads.wake = replica.wake
    told = event("replica.begins", replica=settings.replica_id, model=model, root=str(root), filesystem=kind)
    logger.info("serving %s of %s (%s)", model, root, kind, extra=told)
    return Assembly(replica, volume, stager, reporter, flat, peers)


def _waits(kind: str, settings: Settings) -> tuple[Timing, int, float]:
    """A filesystem's waits, its threads that read records, and the seconds a dropped folder holds still."""
    timing = timing_for(kind)
    timing = replace(timing, poll_s=settings.poll_s or timing.poll_s)
    settle_s = timing.settle_s if settings.settle_s is None else settings.settle_s
    return timing, 1 if kind in LOCAL else READERS, settle_s


def locator(registry: Registry, allowed: Allowed) -> Callable[[Record], Path]:
    """Where a record's files lie, if this replica may read there, whoever wrote the record.

    No link leads to what it gives, so that who reads it need not follow one that was put there since. It
    raises, and says of no files that they are absent, if the volume is not mounted.
    """

    def locate(record: Record) -> Path:
        linked = Path(record.spec.path).is_absolute()  # it may be a link, which an operator made
        path = allowed.find(registry.layout.resolve(record.spec.path), follow=linked)
        if path is None:
            finding = Finding(
                code="permission",
                severity=Severity.ERROR,
                file=record.spec.path,
                message="leads out of the registry and of every folder that this replica may read from",
                hint="name its folder in this replica's LORA_FS_ALLOWED_SOURCES",
            )
            raise InvalidAdapter(str(record.key), [finding])
        if not atomic.is_folder(path):
            registry.check_identity()
        return path

    return locate


@cache
def _spare_the_collector() -> None:
    """Once: exclude the objects of the first read from later collections, which stop all threads.

    A full one takes 50 ms, and falls on the same change in every replica, since they all do the same.
    """
    gc.collect()
    gc.freeze()


def _say_if_it_died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the reconcile loop died", exc_info=task.exception(), extra=event("loop.died"))
