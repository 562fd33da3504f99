"""What the machine takes away: time in which this process, or the engine's, was not run at all."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lora_fs.demo.process import Process

BEAT_S = 0.05  # each one reads a file for every thread of the engine's


class Heartbeat:
    """Beats in a thread of this process, from ``start`` to ``stop``, and adds up what was lost.

    Lost is how late a beat came, the time in which a process of the engine's was stopped, and the time in
    which its threads, or this process's, could run and no core was free: the longest of each process's, since
    the processes wait for one another. An engine that stands still for a reason of its own, as one that reads
    a slow volume, loses nothing.
    """

    def __init__(self, engine: Process | None) -> None:
        leader = [psutil.Process(engine.pid)] if engine is not None else []
        self._watched = [*leader, *(child for one in leader for child in one.children(recursive=True))]
        self._guard, self._stopping = threading.Lock(), threading.Event()
        self._lost_s, self._last = 0.0, time.monotonic()
        self._queued = {pid: _queued_s(pid) for pid in (os.getpid(), *(one.pid for one in self._watched))}
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._last = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopping.set()
        self._thread.join()

    def lost_s(self, *, looks: bool = False) -> float:
        """Since it began; what the beat is late for that is due now is part of it.

        Args:
            looks: ask the system once more what threads waited for since the last beat.
        """
        with self._guard:
            if looks:
                self._count()
            return self._lost_s + max(0.0, time.monotonic() - self._last - BEAT_S)

    def _run(self) -> None:
        while not self._stopping.wait(BEAT_S):
            with self._guard:
                self._count()

    def _count(self) -> None:
        """Add what was lost since the last time."""
        stopped, queued_s = any(map(_is_stopped, self._watched)), self._newly_queued_s()
        now = time.monotonic()
        passed_s, self._last = now - self._last, now
        self._lost_s += passed_s if stopped else max(0.0, passed_s - BEAT_S) + queued_s

    def _newly_queued_s(self) -> float:
        """What threads waited for a core, since it was asked last."""
        found_s = 0.0
        for pid, before in self._queued.items():
            self._queued[pid] = now = _queued_s(pid)
            waited = (waited_s - before.get(thread, 0.0) for thread, waited_s in now.items())
            found_s += max(waited, default=0.0)
        return found_s


def _queued_s(pid: int) -> dict[str, float]:
    """By thread, how long it waited for a core in its life (Linux, sched-stats.rst)."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            found[thread.parent.name] = int(thread.read_text().split()[1]) / 1e9
    return found


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False
