"""Sidecars, gateways and stand-ins of engines, forked from one process that has imported them.

A start of the command takes 1.3 s of a processor for its imports; a fork takes what the command does. It is
the script's own ``main``, with an environment, a log, a session and signals of its own, as ``spawn`` gives
them. It has no interpreter of its own: what a start imports is tested elsewhere, and a fleet's first test
runs the script.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lora_fs.demo.process import Process, child_environment, spawn

_SERVER = Path(__file__).with_name("fork_server.py")


class Forks:
    """Starts the process at once, in the background; the first ``start`` waits for its imports."""

    def __init__(self, log: Path) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", str(_SERVER), str(theirs.fileno())]
            self._server = spawn("forks", command, log=log, url="", env={}, pass_fds=[theirs.fileno()])
        self._lines = self._control.makefile("rw")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._control.close()
        self._server.kill()

    def start(
        self, name: str, command: Sequence[str], *, log: Path, url: str, env: Mapping[str, str]
    ) -> Process:
        """As ``spawn``, for ``lora-fs …`` and for ``python … paced_engine.py …``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        request = {"command": list(command), "env": child_environment(env), "log": str(log)}
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        pid = self._lines.readline()
        assert pid, self._server.log_tail()
        return Process(name, int(pid), log, url)
