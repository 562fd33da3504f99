"""Import ``lora-fs`` and the stand-in of an engine once, then fork a process for every line that asks.

A script, run by ``tests.gateway.forks``. It reads JSON lines from the socket whose number is its argument and
answers each with a pid. When the other end closes it exits, and what it forked is killed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def preload() -> None:
    """Import what a sidecar, a gateway and a stand-in import."""
    gc.disable()
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # as the command's main does, before pydantic
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import paced_engine  # noqa: F401

    import lora_fs.sidecar.cli.serve.gateway  # noqa: F401
    from lora_fs.sidecar.cli.main import cli

    assert {"sidecar", "gateway"} <= cli.commands.keys()
    gc.freeze()  # forks go on sharing what is imported
    gc.enable()


def asked(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every line; returns what was asked in the fork, and None when the other end has closed."""
    with control, control.makefile("rw") as lines:
        for line in lines:
            if (pid := os.fork()) == 0:
                request: dict[str, Any] = json.loads(line)
                return request
            lines.write(f"{pid}\n")
            lines.flush()
    return None


def become(command: list[str], env: dict[str, str], log: str) -> None:
    """Be the command: its own session, its own log, its own environment."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    if command[0] == sys.executable:
        import paced_engine

        sys.argv = command[command.index(paced_engine.__file__) :]
        paced_engine.serve()
    else:
        from lora_fs.sidecar.cli.main import main

        sys.argv = command
        main()


if __name__ == "__main__":
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what has ended leaves no zombie
    if (request := asked(socket.socket(fileno=int(sys.argv[1])))) is not None:
        become(**request)
