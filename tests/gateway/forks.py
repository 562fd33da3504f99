"""``lora-fs`` and stand-ins of engines, forked from one process that has imported them.

A start of the command takes half a second of a processor for its imports, a sidecar's 1.3 s; a fork takes
what the command does. It is the script's own ``main``, with an environment, a folder, output, a session and
signals of its own, as ``spawn`` gives them. It has no interpreter of its own: what a start imports is tested
elsewhere, as each command is by its script.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import lora_fs.demo.replica
from lora_fs.demo.process import Process, child_environment, spawn
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import LORA_FS, CommandHung, Ran, Volume

_SERVER = Path(__file__).with_name("fork_server.py")
_COMMAND_LIMIT_S = 60


class Forks:
    """Starts the process at once, in the background; the first ``start`` waits for its imports.

    Usable from many threads at once.
    """

    def __init__(self, log: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        with theirs:
            command = [sys.executable, "-P", str(_SERVER), str(theirs.fileno())]
            self._server = spawn("forks", command, log=log, url="", env={}, pass_fds=[theirs.fileno()])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._server.kill()

    def start(
        self, name: str, command: Sequence[str], *, log: Path, url: str, env: Mapping[str, str]
    ) -> Process:
        """As ``spawn``, for ``lora-fs …`` and for ``python … paced_engine.py …``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            pid = self._fork(command, child_environment(env), Path.cwd(), [output.fileno()] * 2)
        return Process(name, pid, log, url)

    def run(self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Ran:
        """Run ``lora-fs ARGUMENTS`` to its end.

        Raises:
            CommandHung: it did not end, and what it was doing.
        """
        ended, ending = os.pipe()
        with (
            os.fdopen(ended, "rb") as status,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            with os.fdopen(ending, "wb"):
                files = [out.fileno(), err.fileno(), ending]
                pid = self._fork([LORA_FS, *arguments], env, cwd, files)
            hung = False
            while not select.select([status], [], [], _COMMAND_LIMIT_S)[0]:
                hung = True
                os.killpg(pid, signal.SIGABRT)
            exit_code = int(status.read())
            out.seek(0)
            err.seek(0)
            ran = Ran(tuple(arguments), exit_code, out.read(), err.read())
        if hung:
            raise CommandHung(ran)
        return ran

    def _fork(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, files: Sequence[int]) -> int:
        request = {"command": list(command), "env": dict(env), "cwd": str(cwd)}
        with self._asking:
            socket.send_fds(self._control, [json.dumps(request).encode()], files)
            pid = self._control.recv(64)
        assert pid, self._server.log_tail()
        return int(pid)


@functools.cache
def shared() -> Forks:
    """The one of this process; it ends with it, and its log goes."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Forks(folder / "log")


@contextmanager
def commands_are_forked() -> Iterator[None]:
    """Meanwhile the demo's ``Volume`` and its sidecars fork ``lora-fs``."""

    def try_run(volume: Volume, *arguments: str) -> Ran:
        env = child_environment(volume.env | {"PYTHONFAULTHANDLER": "1"})
        return shared().run(arguments, cwd=volume.cwd, env=env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Volume, "try_run", try_run)
        forked = functools.partial(start_sidecar, start=shared().start)
        patch.setattr(lora_fs.demo.replica, "start_sidecar", forked)
        yield
