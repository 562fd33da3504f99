"""sidecar and demo: the commands that run until they are stopped."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
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
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.server.trail import Trail
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
@click.option("--token-file", type=click.Path(path_type=Path), help="Admin calls need a token of this file")
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
    context.root(), context.scope()  # a usage error, where they were not given
    expectation = await anyio.to_thread.run_sync(context.expectation)
    async with aiohttp.ClientSession() as session:
        engine = VllmHttp(
            session,
            settings.engine_url,
            timeout_s=settings.engine_timeout_s,
            api_key=settings.engine_api_key,
        )
        assembly = await assemble(settings, expectation, engine)
        app = create_app(
            assembly.replica,
            engine_url=settings.engine_url,
            admin=Admin(settings.token_file, settings.public_namespaces),
            trail=Trail(settings.audit_file),
            hold_timeout_s=settings.hold_timeout_s,
            background=assembly.running,
        )
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            access_log=False,
            log_level=settings.log_level,
            timeout_graceful_shutdown=30,
        )
        logger.info("listening on port %d", settings.port)
        await uvicorn.Server(config).serve()


@click.command()
@click.option("--keep", is_flag=True, help="Leave it running and print the URLs")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to work")
@click.option("--sidecar", "beside", is_flag=True, help="Stock engines with sidecars, not the plugin")
@click.pass_obj
def demo(context: Context, keep: bool, folder: Path | None, beside: bool) -> None:
    """Run two real vLLM replicas on one folder and walk through what lora-fs does.

    \b
    Example:
      lora-fs demo --keep
    """
    arguments = [
        *(["--keep"] if keep else []),
        *(["--sidecar"] if beside else []),
        *(["--dir", str(folder)] if folder else []),
    ]
    command = [sys.executable, "-m", "lora_fs.demo", *arguments]
    raise SystemExit(subprocess.run(command, check=False).returncode)


COMMANDS = (sidecar, demo)
