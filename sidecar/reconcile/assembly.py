"""One replica put together from the settings: in the sidecar, and in a vLLM by the plugin.

The registry is made if the root has none. What runs is a thread that watches the volume and one
task; ``running`` starts both and ends both, bounded, whatever the volume does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread

from lora_fs.sidecar.engine.protocol import Engine
from lora_fs.sidecar.errors import InputError, InvalidAdapter
from lora_fs.sidecar.model import Finding, Policy, Record, Scope, Severity, check_segment, model_slug
from lora_fs.sidecar.reconcile.ahead import Ahead
from lora_fs.sidecar.reconcile.registrations import Registrations
from lora_fs.sidecar.reconcile.replica import Limits, Replica
from lora_fs.sidecar.reconcile.report import Reporter
from lora_fs.sidecar.reconcile.staging import Stager
from lora_fs.sidecar.reconcile.volume import Volume
from lora_fs.sidecar.registry.adopt import Adopter
from lora_fs.sidecar.registry.filesystem import LOCAL, kind_of, timing_for
from lora_fs.sidecar.registry.layout import Layout
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.sources.allowed import Allowed
from lora_fs.sidecar.validate import Expectation

logger = logging.getLogger(__name__)


class Assembly:
    """The replica, and what runs beside it."""

    def __init__(self, replica: Replica, volume: Volume, reporter: Reporter) -> None:
        self.replica, self._volume, self._reporter = replica, volume, reporter

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch and reconcile while the context is open."""

        def changed() -> None:
            _spare_the_collector()
            self.replica.wake()

        self._volume.start(changed)
        loop = asyncio.create_task(self.replica.run(), name="reconcile")
        loop.add_done_callback(_say_if_it_died)
        try:
            yield
        finally:
            loop.cancel()
            self._volume.stop()
            await asyncio.gather(loop, return_exceptions=True)
            await self._reporter.withdraw(self.replica.replica_id)


async def assemble(settings: Settings, expectation: Expectation, engine: Engine) -> Assembly:
    """Open the registry and put a replica of ``engine`` on it.

    Raises:
        InputError: the settings name no root or model, or a name that is none.
        VolumeUnavailable, FormatTooNew, RegistryLost: the root cannot be opened.
    """
    root = settings.root
    if root is None or not settings.model:
        raise InputError("say where the registry is and what it serves: LORA_FS_ROOT and LORA_FS_MODEL")
    model = model_slug(settings.model)
    check_segment("replica id", settings.replica_id)
    scopes = tuple(Scope(check_segment("namespace", n), model) for n in settings.serves())
    registry = await anyio.to_thread.run_sync(lambda: Registry(root, create=True))
    kind = await anyio.to_thread.run_sync(kind_of, root)
    timing = timing_for(kind)
    settle_s = timing.settle_s if settings.settle_s is None else settings.settle_s
    volume = Volume(
        registry.layout,
        RegistryView(registry, scopes, scan_s=settings.scan_s, lag_s=timing.lag_s),
        Adopter(registry, expectation, settle_s=settle_s, writer=settings.replica_id),
        poll_s=settings.poll_s or timing.poll_s,
        notify=kind in LOCAL,
    )
    registrations = Registrations(
        registry,
        scopes,
        volume,
        expectation,
        allowed_sources=tuple(Path(source) for source in settings.allowed_sources),
        timeout_s=settings.engine_timeout_s,
    )
    stager = Stager(
        settings.stage_dir.resolve(),
        locator(registry.layout, Allowed(root, settings.allowed_sources)),
        expectation,
        max_bytes=settings.stage_max_bytes,
        timeout_s=settings.engine_timeout_s,
    )
    await anyio.to_thread.run_sync(stager.prepare)
    default = Policy(kind=settings.default_policy, ttl_s=settings.default_ttl_s)
    limits = Limits(default, settings.max_loaded, settings.resync_s, settings.hold_timeout_s)
    reporter = Reporter(registry, volume, settings.advertise_url)
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
        Ahead(stager) if settings.stage_ahead else None,
    )
    logger.info("serving %s of %s (%s)", model, root, kind)
    return Assembly(replica, volume, reporter)


def locator(layout: Layout, allowed: Allowed) -> Callable[[Record], Path]:
    """Where a record's files lie, if this replica may read there, whoever wrote the record."""

    def locate(record: Record) -> Path:
        path = layout.resolve(record.spec.path)
        if not allowed.covers(path):
            finding = Finding(
                code="permission",
                severity=Severity.ERROR,
                file=record.spec.path,
                message="leads out of the registry and of every folder that this replica may read from",
                hint="name its folder in this replica's LORA_FS_ALLOWED_SOURCES",
            )
            raise InvalidAdapter(str(record.key), [finding])
        return path

    return locate


@cache
def _spare_the_collector() -> None:
    """Once: leave what is known after the first read out of later collections, which stop all threads.

    A full one takes 50 ms, and falls on the same change in every replica, since they all do the same.
    """
    gc.collect()
    gc.freeze()


def _say_if_it_died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the reconcile loop died", exc_info=task.exception())
