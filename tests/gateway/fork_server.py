"""Import ``lora-fs`` and the stand-in of an engine once, then fork a process for every message that asks.

A script, run by ``tests.gateway.forks``. It takes JSON from the socket whose number is its argument, with the
files that are to be the process's output, and answers each with a pid. A third file makes it a command that
ends: the exit code is written there. When the other end closes it exits, and what it forked is killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import pkgutil
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
MESSAGE_BYTES = 1 << 20


def preload() -> None:
    """Import what a command, a sidecar, a gateway and a stand-in import."""
    gc.disable()
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # as the command's main does, before pydantic
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import paced_engine  # noqa: F401

    import lora_fs.sidecar
    from lora_fs.sidecar.cli.main import cli

    for module in pkgutil.walk_packages(lora_fs.sidecar.__path__, "lora_fs.sidecar."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    assert all(cli.commands[name] for name in cli.commands)
    gc.freeze()  # forks go on sharing what is imported
    gc.enable()


def asked(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for every message; returns it in the fork, and None when the other end has closed."""
    with control:
        while True:
            message, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
            if not message:
                return None
            if (pid := os.fork()) == 0:
                return json.loads(message), files
            for file in files:
                os.close(file)
            control.send(str(pid).encode())


def follow_parent() -> None:
    """Die when the process that forked this one does."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(files: list[int], status: int) -> None:
    """Return in a fork, which is the command; here wait for its end, say how it ended, and exit.

    SIGABRT to the group is for the command, which then says where its threads are.
    """
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    if (command := os.fork()) == 0:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.close(status)
        follow_parent()
        return
    for file in files:
        os.close(file)
    _, ended = os.waitpid(command, 0)
    os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
    os._exit(0)


def become(command: list[str], env: dict[str, str], cwd: str, files: list[int]) -> None:
    """Be the command: its own session, its own output, its own environment."""
    os.setsid()
    follow_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if len(files) == 3:
        watch(files[:2], files.pop())
    for stream, file in enumerate(files, 1):
        os.dup2(file, stream)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "PYTHONFAULTHANDLER" in env:
        faulthandler.enable()
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
        become(**request[0], files=request[1])
