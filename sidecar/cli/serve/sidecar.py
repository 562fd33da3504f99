"""sidecar and demo: the commands that run until a signal ends them."""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import click
import uvicorn
import uvloop
from fastapi import FastAPI

from lora_fs.sidecar import logs, tracing
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.setting import setting
from lora_fs.sidecar.cli.options.values import Place
from lora_fs.sidecar.engine.vllm_http import VllmHttp
from lora_fs.sidecar.errors import InputError, OperatorError, install_extra
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.reconcile.assembly import Assembly, assemble
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.connection import configured
from lora_fs.sidecar.server.dashboard.fleet import Fleet
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.proxy.upstream import Upstream
from lora_fs.sidecar.settings import SIDECAR_SHUTDOWN_S, Settings
from lora_fs.sidecar.validate import BaseOfEngine

logger = logging.getLogger(__name__)


@command()
@parameters.create
@setting("engine_url", "--engine")
@setting("host")
@setting("port")
@setting("admin_port")
@setting("stage_dir")
@setting("stage_max_bytes")
@setting("replica_id")
@setting("token_file")
@setting("trust")
@setting("insecure", is_flag=False, flag_value="loopback")
@setting("settle_s", "--settle")
@setting("max_loaded")
@setting("max_rank")
@setting("default_policy")
@setting("placement")
@setting("default_ttl_s", "--default-ttl")
@setting(
    "allowed_sources",
    "--allowed-source",
    multiple=True,
    type=Place(),
    callback=lambda _, __, folders: tuple(map(str, folders)),
)
@setting("log_level", type=click.Choice(["debug", "info", "warning", "error"]))
@setting("log_format")
@setting("traces")
@click.pass_obj
def sidecar(context: Context, /, **options: Any) -> None:
    """Serve one replica: reconcile its vLLM to the registry, answer and proxy the API.

    \b
    Example:
      lora-fs --root /adapters --model Qwen/Qwen2.5-7B sidecar --engine http://127.0.0.1:8000
    """
    context.take(**options)
    settings = context.settings
    secrets = [settings.engine_api_key] if settings.engine_api_key else []
    logs.configure(settings.log_level, settings.log_format, secrets=secrets, ids=tracing.ids)
    end_tracing = tracing.start(settings.traces, settings.replica_id)
    uvloop.run(_serve(context, settings, end_tracing))
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        told = event("volume.hangs")
        logger.warning("the volume still does not answer: leaving without waiting for it", extra=told)
        logging.shutdown()
        os._exit(0)


async def _serve(context: Context, settings: Settings, end_tracing: Callable[[], None]) -> None:
    context.root(), context.scope()  # a usage error if the user gave none
    expectation = replace(await anyio.to_thread.run_sync(context.expectation), stock=True)
    base = BaseOfEngine(expectation)
    with ExitStack() as opened:
        sockets = opened.enter_context(bound(settings.host, settings.ports()))
        async with aiohttp.ClientSession() as session:
            engine = VllmHttp(
                session,
                settings.engine_url,
                timeout_s=settings.engine_timeout_s,
                api_key=settings.engine_api_key,
                learn=base.learn,
            )
            admin = Admin(
                settings.token_file,
                settings.public_namespaces,
                hosts=settings.hosts(),
                insecure=settings.insecure,
            )
            admin.announce()
            await admin.look()
            assembly = await assemble(settings, expectation, engine)
            for conditions in (admin.conditions, base.conditions):
                assembly.volume.beside.append(conditions)
            assembly.reporter.changed_by = lambda: admin.changed_by
            app = create_app(
                assembly.replica,
                engine_url=settings.engine_url,
                admin=admin,
                trail=Trail(settings.audit_file),
                hold_timeout_s=settings.hold_timeout_s,
                user_header=settings.user_header,
                engine_key=settings.engine_api_key,
                admin_port=settings.admin_port,
                max_body_bytes=settings.body_max_bytes,
                background=partial(_running, assembly, admin),
                fleet=Fleet(Layout(context.root())),
                cors_origins=settings.cors_origins,
                upstream=Upstream(settings.engine_connections, settings.engine_idle_timeout_s),
            )
            await listen(app, settings, sockets, app.state.end, end_tracing)


async def listen(
    app: FastAPI,
    settings: Settings,
    sockets: list[socket.socket],
    end: Callable[[], None],
    ended: Callable[[], None],
    shutdown_s: float = SIDECAR_SHUTDOWN_S,
) -> None:
    """Serve ``app`` on ``sockets`` until a signal ends it.

    Args:
        end: called when it ends, before it waits for requests under way.
        ended: called after the last one.
        shutdown_s: how long requests under way may take to end, where no setting says it.

    Raises:
        OperatorError: it cannot serve there.
    """
    config = configured(
        app,
        send_timeout_s=settings.send_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=settings.shutdown_timeout_s or shutdown_s,
    )
    try:
        for one in sockets:  # of two that start at once one ends here, before it reports
            one.listen(config.backlog)
    except OSError as error:
        raise _taken(settings.host, settings.port, error) from error
    with suppress(ValueError, OSError):  # each request takes two; many systems let a process begin with 1024
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # uvicorn raises again what ended it: it is no interruption
    try:
        await Server(config, end, ended).serve(sockets)
    except SystemExit as error:  # uvicorn's, of a code that means another thing here; it logged why
        raise OperatorError(f"cannot serve on {settings.host}:{settings.port}") from error


@asynccontextmanager
async def _running(assembly: Assembly, admin: Admin) -> AsyncIterator[None]:
    async with admin.watching(), assembly.running():
        yield


@contextmanager
def bound(host: str, ports: Iterable[int]) -> Iterator[list[socket.socket]]:
    """Each port on every address of ``host``, taken before any write; nothing listens yet.

    Raises:
        OperatorError: another process has one.
    """
    with ExitStack() as opened:
        sockets = []
        for port in ports:
            try:
                addresses = socket.getaddrinfo(
                    host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                for family, kind, protocol, _, address in dict.fromkeys(addresses):
                    one = opened.enter_context(socket.socket(family, kind, protocol))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family is socket.AF_INET6:
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind(address)
                    sockets.append(one)
            except OSError as error:
                raise _taken(host, port, error) from error
        yield sockets


def _taken(host: str, port: int, error: OSError) -> OperatorError:
    return OperatorError(f"cannot listen on {host}:{port}: {error.strerror or error}")


class Server(uvicorn.Server):
    """Ends at once: it waits for requests under way, of which the dashboard's wait for news.

    ``ended`` is called, in a thread, after the last request: a signal that ended the server ends the
    process when ``serve`` returns, and no code after it runs.
    """

    def __init__(
        self, config: uvicorn.Config, end: Callable[[], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._end, self._ended = end, ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = self.config.port
        logger.info("listening on port %d", port, extra=event("listening", port=port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end()
        await super().shutdown(sockets)
        # Of its own limiter: a volume that hangs may hold every thread of the common one.
        await anyio.to_thread.run_sync(self._ended, limiter=anyio.CapacityLimiter(1))


@command(shared=False)
@click.option("--keep", is_flag=True, help="Leave it running and print the URLs")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Work here, and keep the model for the next run",
)
@click.option("--sidecar", "beside", is_flag=True, help="Stock engines with sidecars, not the plugin")
@click.pass_obj
def demo(context: Context, keep: bool, folder: Path | None, beside: bool) -> None:
    """Run two real vLLM replicas on one folder and walk through what lora-fs does.

    \b
    Example:
      lora-fs demo --keep
    """
    if importlib.util.find_spec("openai") is None:
        raise InputError(f"the demo needs an engine and more: {install_extra('engine,demo')}")
    arguments = [
        *(["--keep"] if keep else []),
        *(["--sidecar"] if beside else []),
        *(["--dir", str(folder)] if folder else []),
    ]
    command = [sys.executable, "-m", "lora_fs.demo", *arguments]
    os.execv(sys.executable, command)  # noqa: S606 - a signal to this command is one to the demo


COMMANDS = (sidecar, demo)
