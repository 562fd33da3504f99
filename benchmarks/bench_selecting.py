"""Lists of one sidecar with 1,000 to 100,000 adapters: whole, and of those that a filter leaves.

A real sidecar and registry, in namespaces of 1,000 adapters; the engine is a stub. Each list is compared
with what was registered before it is timed, over one kept connection, and beside each `/health` is asked
over another. Then what ``lora-fs list`` takes, its start included.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading
from fleet import sidecars
from population import fill
from stub_engine import stub_engine

from lora_fs.demo.process import Process
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.store.writer import Registry

PER_NAMESPACE = 1_000
ASKED = {  # what is asked → how many of each namespace it leaves
    "/v1/models": PER_NAMESPACE,
    "/v1/lora_adapters": PER_NAMESPACE,
    "/v1/lora_adapters?name=*many-005*": 100,  # of several namespaces each name has its own before it
    "/v1/lora_adapters?labelSelector=team%3Dcare": 0,
    "/v1/lora_adapters?phase=Failed": 0,
}


class Client:
    """One kept connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)

    def get(self, path: str) -> tuple[bytes, float]:
        """The body, and the milliseconds until the whole of it was there."""
        started = time.perf_counter()
        self._connection.request("GET", path)
        body = self._connection.getresponse().read()
        return body, 1000 * (time.perf_counter() - started)


@contextmanager
def health_beside(url: str) -> Iterator[list[float]]:
    """What ``/health`` takes meanwhile, asked again and again."""
    took, ended, client = list[float](), threading.Event(), Client(url)

    def ask() -> None:
        while not took or not ended.wait(0.005):
            took.append(client.get("/health")[1])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()


def measure(sidecar: Process, namespaces: int, rounds: int) -> None:
    """One row for each list."""
    client, size = Client(sidecar.url), f"{namespaces * PER_NAMESPACE:,}"
    for path, each in ASKED.items():
        count = len(json.loads(client.get(path)[0])["data"])
        base = path == "/v1/models"
        assert count == each * namespaces + base, (path, count)
        with health_beside(sidecar.url) as health:
            answers = [client.get(path) for _ in range(rounds)]
        median = statistics.median(ms for _, ms in answers)
        row = (size, f"`{path}`", f"{count:,}", f"{len(answers[0][0]) / 1e6:.2f}", f"{median:.1f}")
        print("| " + " | ".join((*row, f"{max(health):.1f}")) + " |", flush=True)


def command(root: Path, namespaces: list[str], rounds: int) -> None:
    """``lora-fs list``, with a pattern and whole, of one namespace: of all only the registry is another."""
    env = {**os.environ, "LORA_FS_ROOT": str(root), "LORA_FS_MODEL": "tiny"}
    for words, count in ((("many-005*",), 100), ((), PER_NAMESPACE)):
        took = []
        for _ in range(rounds):
            started = time.perf_counter()
            words_all = [LORA_FS, "--namespace", namespaces[-1], "list", *words, "-o", "json"]
            done = subprocess.run(words_all, env=env, capture_output=True, check=True)
            took.append(1000 * (time.perf_counter() - started))
        assert done.stdout.count(b'"many-') >= count, words
        size = f"{len(namespaces) * PER_NAMESPACE:,}"
        shown = " ".join(("lora-fs list", *words))
        size_mb = len(done.stdout) / 1e6
        print(f"| {size} | `{shown}` | {count:,} | {size_mb:.2f} | {statistics.median(took):.1f} | – |")


def main() -> None:
    """Fill, start a sidecar, ask; at each size."""
    options = arguments(__doc__ or "", namespaces="1,10,100", rounds=10)
    heading("Lists and filters")
    print(
        "| adapters | asked | rows | MB | median ms | slowest `/health` beside it, ms |\n" + "|---" * 6 + "|"
    )
    with tempfile.TemporaryDirectory() as folder, stub_engine(Path(folder) / "stub.log") as engine:
        work, filled = Path(folder), 0
        adapter = make_adapter(ensure_model(work / "tiny"), work / "a0", 0)
        registry = Registry(work / "volume", create=True)
        for count in map(int, options.namespaces.split(",")):
            names = [f"tenant-{number:03d}" for number in range(count)]
            for name in names[filled:]:
                fill(registry, Scope(name, "tiny"), adapter, PER_NAMESPACE)
            filled = count
            args = [part for name in names for part in ("--namespace", name)]
            with sidecars(1, work / "volume", engine, work, *args) as (sidecar,):
                measure(sidecar, count, options.rounds)
            command(work / "volume", names, 3)


if __name__ == "__main__":
    main()
