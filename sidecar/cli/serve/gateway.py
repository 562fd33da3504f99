"""gateway: one address for a fleet, until a signal ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import click
import uvloop

from lora_fs.sidecar import logs, tracing
from lora_fs.sidecar.cli.backends.client import read_token
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.setting import setting
from lora_fs.sidecar.cli.options.values import Place
from lora_fs.sidecar.cli.serve.sidecar import bound, listen
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Discovery, Given, Registered
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.settings import GATEWAY_SHUTDOWN_S, Settings


@command()
@setting("replicas", "--replica", multiple=True)
@setting("host")
@setting("port")
@setting("admin_port")
@click.option(
    "--token-file",
    "client_token_file",
    type=Place(),
    metavar="FILE",
    help="A file with the token that replicas are shown when they are asked what they hold",
)
@setting("log_level", type=click.Choice(["debug", "info", "warning", "error"]))
@setting("log_format")
@setting("traces")
@click.pass_obj
def gateway(context: Context, /, **options: Any) -> None:
    """Answer for a fleet at one address: pass each request to a replica that has its adapter.

    \b
    Examples:
      lora-fs gateway --replica http://10.0.0.1:8001 --replica http://10.0.0.2:8001
      lora-fs gateway --replica dns://sidecars.default.svc:8001
      lora-fs --root /adapters --model Qwen/Qwen2.5-7B gateway
    """
    context.take(**options)
    settings = context.settings
    logs.configure(settings.log_level, settings.log_format, ids=tracing.ids)
    end_tracing = tracing.start(settings.traces, f"gateway@{settings.replica_id}")
    uvloop.run(_serve(context, settings, end_tracing))


async def _serve(context: Context, settings: Settings, end_tracing: Callable[[], None]) -> None:
    discovery: Discovery
    model = context.scope_of_settings().model if settings.model is not None else None
    if settings.replicas:
        discovery = Given(settings.replicas)
    else:
        discovery = Registered(Layout(context.root()), context.scope_of_settings().model)
    token_file = settings.client_token_file
    with ExitStack() as opened:
        sockets = opened.enter_context(bound(settings.host, settings.ports()))
        app = create_gateway(
            discovery,
            token=None if token_file is None else partial(read_token, token_file),
            model=model,
            admin_port=settings.admin_port,
            max_body_bytes=settings.body_max_bytes,
            hold_timeout_s=settings.hold_timeout_s,
            idle_timeout_s=settings.engine_idle_timeout_s,
            cors_origins=settings.cors_origins,
            allowed_hosts=settings.allowed_hosts,
        )
        await listen(app, settings, sockets, lambda: None, end_tracing, GATEWAY_SHUTDOWN_S)


COMMANDS = (gateway,)
