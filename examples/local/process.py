"""A program that was started here: when it is ready, what it logged, that it ends.

Owns one process group each. Nothing outlives the program that started it, ``kill -9``
included: the kernel signals every child when its parent dies. Ready and ended are awaited
(a health check, a pidfd), never slept for. Linux only, as vLLM on the CPU is.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from lora_fs.demo.failures import DemoFailed
from lora_fs.demo.waiting import pause_s

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# How httpx asks what runs here: past any proxy, without the certificates of all authorities, which each
# client else reads in 30 ms, and with the patience that a busy machine needs: httpx's own is 5 s.
LOCAL: dict[str, Any] = {
    "timeout": 60,
    "trust_env": False,
    "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
}


class ProcessFailed(DemoFailed):
    """It ended, or was not ready in time; carries the end of its log."""

    def __init__(self, process: Process, what: str) -> None:
        super().__init__(f"{process.name} {what}; the end of {process.log}:\n{process.log_tail()}")


class Process:
    """One running program that leads its own process group.

    Args:
        name: what to call it in messages.
        pid: the leader's pid, which is the group's id.
        log: the file its output goes to.
        url: where it listens, without a trailing slash.
        child: the Popen object when it is this process's own child, which has to be reaped.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        log: Path,
        url: str,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.name, self.pid, self.log, self.url = name, pid, log, url
        self._child = child
        self._pidfd: int | None = _open_pidfd(pid)
        self._is_gone = False

    @property
    def alive(self) -> bool:
        """Whether the leader still runs."""
        return not self.wait_ended(timeout_s=0)

    def wait_ready(self, path: str = "/health", *, timeout_s: float = 180) -> None:
        """Return once ``GET path`` answers 200.

        Raises:
            ProcessFailed: it ended, or did not answer in time.
        """
        began = time.monotonic()
        answer = "no connection"
        with httpx.Client(**LOCAL | {"timeout": 2}) as client:
            while True:
                try:
                    response = client.get(self.url + path)
                    if response.status_code == httpx.codes.OK:
                        return
                    answer = f"{response.status_code} {response.text[:200]}"
                except httpx.TransportError as error:
                    answer = f"{type(error).__name__}: {error}"
                if self.wait_ended(timeout_s=pause_s(began)):
                    raise ProcessFailed(self, "ended before it was ready")
                if time.monotonic() - began > timeout_s:
                    raise ProcessFailed(self, f"is not ready after {timeout_s} s ({answer})")

    def wait_ended(self, *, timeout_s: float) -> bool:
        """Wait until the leader has ended; False if it still runs after ``timeout_s``."""
        if self._pidfd is None:
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return False
        os.close(self._pidfd)
        self._pidfd = None
        if self._child is not None:
            self._child.wait()
        self._is_gone = not _group(self.pid)
        return True

    def stop(self) -> None:
        """Ask it to end, then, after 10 s at most, end whatever of its group is left."""
        self.terminate()
        self.wait_ended(timeout_s=10)
        self.kill()

    def terminate(self) -> None:
        """SIGTERM to the leader alone, as a pod's end does; returns at once."""
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9`` the group; returns when every member is gone and its ports are free.

        A forked engine core inherits the API server's listening socket, so the leader's end
        alone does not free the port. Where nobody is left nothing is signalled: the pid may be
        another's by then.
        """
        if self._is_gone:
            return
        members = [fd for pid in _group(self.pid) if (fd := _open_pidfd(pid)) is not None]
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for member in members:
            select.select([member], [], [])
            os.close(member)
        self.wait_ended(timeout_s=5)
        self._is_gone = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the whole group have no processor meanwhile."""
        os.killpg(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)

    def rss_bytes(self) -> int:
        """Resident memory of the whole group; pages shared by members count for each."""
        pages = 0
        for pid in _group(self.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def log_text(self) -> str:
        """Everything it has logged so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 30) -> str:
        """The last ``lines`` of its log."""
        return "\n".join(self.log_text().splitlines()[-lines:])


def spawn(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    url: str,
    env: Mapping[str, str],
    on_parent_death: signal.Signals = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Start ``command`` in its own group, to be signalled when this process dies.

    To the kernel, the thread that forks is the parent. One that lives as long as this process does it, so
    the caller's own may end before.
    """

    def follow_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, on_parent_death)

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = (
            _forker(os.getpid())
            .submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(env),
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=follow_parent,
            )
            .result()
        )
    return Process(name, child.pid, log, url, child)


@functools.cache
def _forker(_pid: int) -> ThreadPoolExecutor:
    """The thread that starts processes, of this process: a fork of it has none of its threads."""
    return ThreadPoolExecutor(1, "forker")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would configure lora-fs or vLLM, plus ``extra``."""
    configuring = ("LORA_FS_", "DYNAMO_LORA_", "VLLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(configuring)}
    return {**kept, **extra}


def module_command(module: str, *arguments: str) -> list[str]:
    """``python -m module …`` by this interpreter; the working directory is not importable."""
    return [sys.executable, "-P", "-m", module, *arguments]


def free_port() -> int:
    """A port that nothing listens on now, and that no outgoing connection is given meanwhile.

    Those take theirs from the kernel's own range, above the ports tried here.
    """
    first_of_the_kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first_of_the_kernels, 10_001))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _group(pgid: int) -> list[int]:
    """The pids of a process group, its leader included."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == pgid:
                    members.append(int(entry.name))
    return members
