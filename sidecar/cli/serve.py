"""sidecar and demo: the commands that run until they are stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import click
import uvicorn
import uvloop

from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.engine.vllm_http import VllmHttp
from lora_fs.sidecar.model import Policy, Scope, check_segment, model_slug
from lora_fs.sidecar.reconcile.registrations import Registrations
from lora_fs.sidecar.reconcile.replica import Limits, Replica
from lora_fs.sidecar.reconcile.report import Reporter
from lora_fs.sidecar.reconcile.staging import Stager
from lora_fs.sidecar.reconcile.volume import Volume
from lora_fs.sidecar.registry.adopt import Adopter
from lora_fs.sidecar.registry.filesystem import LOCAL, kind_of, timing_for
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.settings import Settings, load_settings

logger = logging.getLogger(__name__)


@click.command()
@click.option("--root", type=click.Path(path_type=Path), help="As before the command")
@click.option("--model", help="As before the command")
@click.option("--namespace", "namespaces", multiple=True, help="Served; repeatable [LORA_FS_NAMESPACES]")
@click.option("--engine", "engine_url", help="vLLM's URL [LORA_FS_ENGINE_URL]")
@click.option("--host", help="Where it listens [LORA_FS_HOST; 0.0.0.0]")
@click.option("--port", type=int, help="[LORA_FS_PORT; 8001]")
@click.option(
    "--stage-dir",
    type=click.Path(path_type=Path),
    help="Local, and mounted at the same path for the engine [LORA_FS_STAGE_DIR; /stage]",
)
@click.option("--stage-max-bytes", type=int, help="What it may hold [LORA_FS_STAGE_MAX_BYTES; 8 GiB]")
@click.option("--replica-id", help="[LORA_FS_REPLICA_ID; the host's name]")
@click.option("--token-file", type=click.Path(path_type=Path), help="Admin calls need this token")
@click.option("--settle", "settle_s", type=float, help="Seconds a dropped folder must hold still")
@click.option("--max-loaded", type=int, help="Adapters in the engine at once")
@click.option("--max-rank", type=int, help="The engine's --max-lora-rank")
@click.option(
    "--default-policy",
    type=click.Choice(["lazy", "sticky", "eager", "pinned"]),
    help="Of adapters without one [LORA_FS_DEFAULT_POLICY; lazy]",
)
@click.option("--default-ttl", "default_ttl_s", type=int, help="Idle seconds of a lazy adapter")
@click.option("--allowed-source", "allowed_sources", multiple=True, help="Folders the API may register from")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[info]")
@click.pass_obj
def sidecar(context: Context, /, **options: Any) -> None:
    """Serve one replica: reconcile its vLLM to the registry, answer and proxy the API.

    \b
    Example:
      lora-fs --root /adapters --model Qwen/Qwen2.5-7B sidecar --engine http://127.0.0.1:8000
    """
    given = context.settings.model_dump(exclude_unset=True)
    given |= {name: value for name, value in options.items() if value not in (None, ())}
    if options.get("namespaces"):
        given["namespace"] = options["namespaces"][0]
    settings = load_settings(**given)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    uvloop.run(_serve(Context(settings, context.out), settings))
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        logger.warning("the volume still does not answer: leaving without waiting for it")
        logging.shutdown()
        os._exit(0)


async def _serve(context: Context, settings: Settings) -> None:
    root = context.root()
    model = model_slug(context.scope().model)
    check_segment("replica id", settings.replica_id)
    scopes = tuple(Scope(check_segment("namespace", n), model) for n in settings.serves())
    registry = await anyio.to_thread.run_sync(lambda: Registry(root, create=True))
    expectation = await anyio.to_thread.run_sync(context.expectation)
    kind = await anyio.to_thread.run_sync(kind_of, root)
    timing = timing_for(kind)
    settle_s = timing.settle_s if settings.settle_s is None else settings.settle_s
    volume = Volume(
        registry.layout,
        RegistryView(registry, scopes, scan_s=settings.scan_s),
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
        lambda record: registry.layout.resolve(record.spec.path),
        expectation,
        max_bytes=settings.stage_max_bytes,
        timeout_s=settings.engine_timeout_s,
    )
    await anyio.to_thread.run_sync(stager.prepare)
    default = Policy(kind=settings.default_policy, ttl_s=settings.default_ttl_s)
    limits = Limits(default, settings.max_loaded, settings.resync_s, settings.hold_timeout_s)
    reporter = Reporter(registry, volume, settings.advertise_url)
    async with aiohttp.ClientSession() as session:
        engine = VllmHttp(
            session,
            settings.engine_url,
            timeout_s=settings.engine_timeout_s,
            api_key=settings.engine_api_key,
        )
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
        )

        @asynccontextmanager
        async def background() -> AsyncIterator[None]:
            def changed() -> None:
                _spare_the_collector()
                replica.wake()

            volume.start(changed)
            loop = asyncio.create_task(replica.run(), name="reconcile")
            loop.add_done_callback(_say_if_it_died)
            try:
                yield
            finally:
                loop.cancel()
                volume.stop()
                await asyncio.gather(loop, return_exceptions=True)
                await reporter.withdraw(settings.replica_id)

        app = create_app(
            replica,
            engine_url=settings.engine_url,
            admin=Admin(settings.token_file),
            hold_timeout_s=settings.hold_timeout_s,
            background=background,
        )
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            access_log=False,
            log_level=settings.log_level,
            timeout_graceful_shutdown=30,
        )
        logger.info("serving %s of %s (%s) on port %d", model, root, kind, settings.port)
        await uvicorn.Server(config).serve()


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


@click.command()
@click.option("--keep", is_flag=True, help="Leave it running and print the URLs")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work")
@click.pass_obj
def demo(context: Context, keep: bool, folder: Path | None) -> None:
    """Run two real vLLM replicas on one folder and walk through what lora-fs does.

    \b
    Example:
      lora-fs demo --keep
    """
    arguments = [*(["--keep"] if keep else []), *(["--dir", str(folder)] if folder else [])]
    command = [sys.executable, "-m", "lora_fs.demo", *arguments]
    raise SystemExit(subprocess.run(command, check=False).returncode)


COMMANDS = (sidecar, demo)
