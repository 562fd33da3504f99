"""A process that acts on one mount, and carries out one command at a time.

Whoever tells it never touches the volume: a mount that hangs costs a bounded wait, and a stopped or
killed agent is a stopped or killed writer. It ends when its owner does, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar, cast

from lora_fs.sidecar.errors import LoraFsError, VolumeUnavailable

_FORK = multiprocessing.get_context("fork")
_END_S = 2.0
_LOOK_S = 0.001

P = ParamSpec("P")
T = TypeVar("T")


class AgentError(Exception):
    """A defect of the suite itself, with the agent's traceback."""


class Agent:
    """One process. ``start`` and ``result`` let two of them act at once.

    Args:
        name: which mount it acts on, for messages.
        others: agents started before, whose pipes it must not keep open.
    """

    def __init__(self, name: str, others: Sequence[Agent] = ()) -> None:
        self.name = name
        self._own, theirs = _FORK.Pipe()
        inherited = [self._own, *(other._own for other in others)]
        self._process = _FORK.Process(target=_serve, args=(theirs, inherited), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def start(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell it to call ``function``, which is found by its name in its module."""
        self._own.send((function, args, kwargs))

    def result(self, timeout_s: float) -> object:
        """The result of the call that ``start`` began.

        Raises:
            VolumeUnavailable: the mount refused, or did not answer in time.
        """
        try:
            if not self._own.poll(timeout_s):
                raise VolumeUnavailable(
                    f"{self.name} did not answer for {timeout_s:.0f} s: does the mount hang?"
                )
            good, value = self._own.recv()
        except EOFError as error:
            raise AgentError(f"the process on {self.name} ended by itself") from error
        if good:
            return cast(object, value)
        unavailable, text = value
        if unavailable:
            raise VolumeUnavailable(f"{self.name}: {text}")
        raise AgentError(f"{self.name}: {text}")

    def call(self, timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Start it and wait for what it returns."""
        self.start(function, *args, **kwargs)
        return cast(T, self.result(timeout_s))

    def wait_stopped(self, timeout_s: float) -> bool:
        """Whether it came to stop itself (SIGSTOP) in time, rather than to a result."""
        assert self._process.pid is not None
        deadline = time.monotonic() + timeout_s
        flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < deadline and not self._own.poll(_LOOK_S):
            if os.waitid(os.P_PID, self._process.pid, flags) is not None:
                return True
        return False

    def resume(self) -> None:
        """Let it continue after a stop."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill it. One that hangs in the kernel is left to end when its mount answers."""
        self._process.kill()
        self._process.join(_END_S)
        self._own.close()


def _serve(told: Connection, inherited: Sequence[Connection]) -> None:
    os.setpgid(0, 0)  # the signals of a terminal and of ``timeout`` are the owner's, who tidies up
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for connection in inherited:
        connection.close()
    while True:
        try:
            function, args, kwargs = told.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args, **kwargs))
        except (LoraFsError, OSError) as error:
            answer = (False, (True, str(error)))
        except Exception:
            answer = (False, (False, traceback.format_exc()))
        told.send(answer)
