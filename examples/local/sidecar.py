"""``lora-fs sidecar`` and ``lora-fs gateway``, as pods would run them; the sidecar with ``--insecure``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.volume import LORA_FS

_ENV = {"LORA_FS_INSECURE": "1"}


def start_sidecar(
    name: str,
    engine_url: str,
    *args: str,
    log: Path,
    env: Mapping[str, str],
    port: int | None = None,
    start: Callable[..., Process] = spawn,
) -> Process:
    """Start one, which this machine may change without a token, unless ``env`` says otherwise.

    Returns at once; ``wait_ready("/readyz")`` tells when it serves.

    Args:
        name: names its process in messages.
        args: more of the command's.
        env: its settings, as ``LORA_FS_*``.
        port: a free one if not given; give the same one to restart it in place.
        start: how its process is started, with the arguments of ``spawn``.
    """
    port = port or free_port()
    options = ("--engine", engine_url, "--host", "127.0.0.1", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    return start(name, [LORA_FS, "sidecar", *options, *args], log=log, url=url, env=_ENV | dict(env))


def start_gateway(replicas: Iterable[str], *, log: Path) -> Process:
    """Start one before these replicas' URLs, on a free port. Returns at once."""
    port = free_port()
    options = [word for url in replicas for word in ("--replica", url)]
    command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port), *options]
    return spawn("gateway", command, log=log, url=f"http://127.0.0.1:{port}", env={})
