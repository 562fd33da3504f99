"""Reads a registry as a replica does, and says what each step cost: JSON lines in, JSON lines out.

Its view, its adopter and its volume are the sidecar's own, and its replica; there is no server, and
no engine but one in memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from calls import Calls, per
from replica import Running

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume.mounts import Timing
from lora_fs.sidecar.validate import Expectation

Told = dict[str, Any]


def memory_bytes() -> int:
    """What this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Reader:
    """Does what it is told."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._calls = Calls(str(root))
        self._calls.install()
        self._volumes: list[Volume] = []
        self._seen: list[tuple[float, str]] = []

    def measured(self, act: Callable[[], Any]) -> Told:
        """What an act took of this thread: seconds, CPU seconds, calls."""
        calls, cpu, began = self._calls.total(), time.thread_time(), time.perf_counter()
        result = act()
        took = {"s": time.perf_counter() - began, "cpu_s": time.thread_time() - cpu}
        return {**took, "calls": per(self._calls.total(), calls), "result": result}

    def open(self, scopes: list[list[str]]) -> Told:
        """A cold start: the registry, and a view of these scopes."""
        before = memory_bytes()

        def read() -> int:
            self._registry = Registry(self._root)
            self._view = RegistryView(self._registry, tuple(Scope(*scope) for scope in scopes))
            self._view.refresh()
            return sum(1 for _ in self._view.desired.active())

        told = self.measured(read)
        self._adopter = Adopter(self._registry, Expectation(("tiny",)), settle_s=2.0, writer="reader")
        return {**told, "bytes": memory_bytes() - before, "resident_bytes": memory_bytes()}

    def look(self) -> Told:
        """One poll."""
        return self.measured(self._view.refresh)

    def search(self) -> Told:
        """One look at all folders, as for those that were dropped."""

        def step() -> bool:
            self._view.refresh(force=True)
            return self._adopter.step(self._view.desired)

        return self.measured(step)

    def replica(self, namespaces: list[str], stage: str, replica_id: str) -> Told:
        """A whole replica, but for its engine and its server."""
        self._running = Running(self._root, Path(stage), tuple(namespaces), replica_id)
        return {"result": self._running.names()}

    def took(self) -> Told:
        """What it took since this was asked last."""
        return {**self._running.took()}

    def list(self) -> Told:
        """What ``GET /v1/models`` took, and its bytes."""
        self._running.took()
        size_bytes = self._running.list_models()
        return {**self._running.took(), "bytes": size_bytes}

    def serve(self, replicas: Sequence[tuple[str, str]], poll_s: float, lag_s: float) -> Told:
        """Real volumes, each with a thread that polls, until the process ends."""
        timing = Timing(poll_s=poll_s, settle_s=30.0, lag_s=lag_s)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        def start(scope: Scope, number: int) -> None:
            registry = Registry(self._root)
            view = RegistryView(registry, (scope,), lag_s=timing.lag_s)
            adopter = Adopter(registry, Expectation(("tiny",)), settle_s=timing.settle_s, writer=f"r{number}")
            volume = Volume(registry.layout, view, adopter, poll_s=timing.poll_s, notify=False)
            self._volumes.append(volume)

            async def run() -> None:
                volume.start(lambda: self._seen.append((time.monotonic(), str(scope))))

            asyncio.run_coroutine_threadsafe(run(), loop).result()

        def all_read() -> int:
            for number, scope in enumerate(replicas):
                start(Scope(*scope), number)
                while not self._volumes[-1].read_once:
                    time.sleep(0.01)
            return len(self._volumes)

        return {**self.measured(all_read), "resident_bytes": memory_bytes()}

    def window(self, seconds: float) -> Told:
        """What all volumes took in so many seconds: CPU of the process, calls, and who saw a change when."""
        calls, cpu, began = self._calls.total(), time.process_time(), time.perf_counter()
        self._seen.clear()
        time.sleep(seconds)
        took = time.perf_counter() - began
        told = {"s": took, "cpu_s": time.process_time() - cpu, "calls": per(self._calls.total(), calls)}
        return {**told, "seen": list(self._seen), "threads": threading.active_count()}


def main() -> None:
    """Answer until the input ends."""
    reader = Reader(Path(sys.argv[1]))
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(getattr(reader, told.pop("do"))(**told)), flush=True)


if __name__ == "__main__":
    main()
