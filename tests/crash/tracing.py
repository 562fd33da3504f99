"""System calls of one act, seen and tampered with by strace.

The act runs in a child that was forked from this process, so nothing is imported anew; strace
attaches before it begins. A *point* is the n-th call of one name after that, as ``when=`` counts.
Only the child's first thread is traced: the lease's heartbeat makes no call within an act.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

Act = Callable[[Registry], object]

TRACED = "%file,%desc"
RAISED, BROKEN = 3, 1  # the child's exit code: an error of lora-fs's tree, or anything else
PR_SET_PTRACER, ANY = 0x59616D61, -1
ATTACH_S = 60.0
READY = "READY\n"


class Point(NamedTuple):
    """The ``number``-th call of ``call``; ``text`` is the line it had in the trace."""

    call: str
    number: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.call}#{self.number}"


class Acknowledged(NamedTuple):
    """What the child was told is written."""

    series: str
    generation: int
    token: str


@dataclass(frozen=True)
class Outcome:
    """How a traced child ended."""

    killed: bool
    raised: str | None
    acknowledged: tuple[Acknowledged, ...]
    trace: tuple[str, ...]

    @property
    def tampered(self) -> bool:
        return self.killed or any("(INJECTED)" in line for line in self.trace)


def why_not() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed: no system call can be failed (apt install strace)"
    child = os.fork()
    if child == 0:
        _await_tracer(select_on=os.pipe()[0])
    try:
        with _attached(child, ["-e", "trace=none"], Path(os.devnull)) as _:
            return None
    except OSError as error:
        return f"strace cannot attach here: {error}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def needs_strace() -> None:
    """Skip with the reason where nothing can be traced."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def _await_tracer(select_on: int) -> NoReturn:
    select.select([select_on], [], [])
    os._exit(0)


class _attached:
    """strace on a process, from the moment it is attached to its end."""

    def __init__(self, pid: int, options: list[str], output: Path) -> None:
        words = ["strace", "-p", str(pid), "-y", "-s", "4096", "-o", str(output), *options]
        self._strace = subprocess.Popen(words, stderr=subprocess.PIPE)
        assert self._strace.stderr is not None
        told = b""
        while b"attached" not in told:
            ready, _, _ = select.select([self._strace.stderr], [], [], ATTACH_S)
            more = os.read(self._strace.stderr.fileno(), 4096) if ready else b""
            if not more:
                self.__exit__()
                raise OSError(told.decode(errors="replace").strip() or "it did not attach in time")
            told += more

    def __enter__(self) -> _attached:
        return self

    def wait(self) -> None:
        self._strace.wait()

    def __exit__(self, *_: object) -> None:
        if self._strace.poll() is None:
            self._strace.terminate()
        self._strace.wait()
        if self._strace.stderr is not None:
            self._strace.stderr.close()


def run(root: Path, act: Act, scratch: Path, options: list[str]) -> Outcome:
    """Open the registry at ``root`` in a child, attach strace with ``options``, and let it act."""
    go, told, output = os.pipe(), os.pipe(), scratch / "trace"
    child = os.fork()
    if child == 0:
        _act(root, act, go[0], told[1])
    os.close(told[1])
    try:
        with os.fdopen(told[0]) as reader:
            ready = reader.readline()
            assert ready == READY, ready + reader.read()
            with _attached(child, options, output) as tracer:
                os.write(go[1], b"!")
                lines = reader.read().splitlines()
                _, status = os.waitpid(child, 0)
                tracer.wait()
    finally:
        os.close(go[0])
        os.close(go[1])
    trace = tuple(output.read_text(errors="replace").splitlines())
    output.unlink()
    acknowledged = tuple(
        Acknowledged(series, int(generation), token)
        for kind, _, rest in (line.partition(" ") for line in lines)
        if kind == "ACK"
        for series, generation, token in [rest.split(" ")]
    )
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return Outcome(True, None, acknowledged, trace)
    assert os.WEXITSTATUS(status) != BROKEN, "\n".join(lines)
    raised = lines[-1] if os.WEXITSTATUS(status) == RAISED else None
    return Outcome(False, raised, acknowledged, trace)


def _act(root: Path, act: Act, go: int, told: int) -> NoReturn:
    """In the child: act once the tracer is there; tell each acknowledgement when it is had."""

    class Telling(Registry):
        def append(self, series: Series[Body], *args: Any, **kwargs: Any) -> Body:
            body = super().append(series, *args, **kwargs)
            where = (series.folder / series.name).relative_to(self.layout.root)
            os.write(told, f"ACK {where} {body.generation} {body.token}\n".encode())
            return body

    code = 0
    try:
        # The pause between link and unlink is no system call on the volume.
        atomic.UNLINK_AFTER_S = 0.0
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
        registry = Telling(root)
        os.write(told, READY.encode())
        select.select([go], [], [])
        act(registry)
        registry.close()
    except LoraFsError as error:
        os.write(told, f"{type(error).__name__}: {error}".replace("\n", " ").encode())
        code = RAISED
    except BaseException:
        os.write(told, traceback.format_exc().encode())
        code = BROKEN
    os._exit(code)


_CALL = re.compile(r"([a-z0-9_]+)\(")


def points(root: Path, trace: tuple[str, ...]) -> list[Point]:
    """Every call of a trace that touches what lies under ``root``."""
    seen, found = Counter[str](), []
    for line in trace:
        match = _CALL.match(line)
        if match is None:
            continue
        seen[match[1]] += 1
        if re.search(re.escape(str(root)) + r"[/\">]", line):
            found.append(Point(match[1], seen[match[1]], line))
    return found
