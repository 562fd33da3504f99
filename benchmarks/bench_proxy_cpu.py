"""What the proxy costs the processor: a sidecar before a stub engine, and another version of it, in turns.

One request at a time on one kept connection. Answers are checked before anything is counted. The processor
time is all threads' of the sidecar's process, so that other work on the machine matters less than to times.
Goal: no more than the commit before the rebuild (0b3ef69).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading
from stub_engine import stub_engine

from lora_fs.demo.process import Process, child_environment, free_port, spawn
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import LORA_FS

NAME = "a0"


class Client:
    """One kept connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)

    def complete(self, model: str, *, stream: bool) -> float:
        """Return the seconds to the end of an answer that names ``model``."""
        request = {"model": model, "prompt": "the quick brown fox", "max_tokens": 8, "stream": stream}
        began = time.perf_counter()
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(request), headers)
        answer = self._connection.getresponse()
        body = answer.read()
        took = time.perf_counter() - began
        if answer.status != 200 or f'"model":"{model}"'.encode() not in body:
            raise RuntimeError(body.decode())
        return took


class Side:
    """A sidecar of one version, its engine, and what was counted of it."""

    def __init__(self, process: Process, engine_url: str) -> None:
        self._process, self._engine_url = process, engine_url
        client = Client(engine_url)
        client._connection.request("GET", "/v1/models")
        cards = json.loads(client._connection.getresponse().read())["data"]
        self._engine_name = next((card["id"] for card in cards if card["parent"]), "")
        self.cpu_us: dict[bool, list[float]] = {False: [], True: []}
        self.added_ms: dict[bool, list[float]] = {False: [], True: []}

    def turn(self, count: int, *, stream: bool, counts: bool = True) -> None:
        """Ask ``count`` times through the sidecar, and as often without."""
        through, direct = Client(self._process.url), Client(self._engine_url)
        through.complete(NAME, stream=stream)
        before = self._cpu_ns()
        took = [through.complete(NAME, stream=stream) for _ in range(count)]
        cpu_us = (self._cpu_ns() - before) / count / 1000
        own = [direct.complete(self._engine_name, stream=stream) for _ in range(count)]
        if counts:
            self.cpu_us[stream].append(cpu_us)
            self.added_ms[stream].append(1000 * (statistics.median(took) - statistics.median(own)))

    def _cpu_ns(self) -> int:
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


@contextlib.contextmanager
def started(lora_fs: str, work: Path) -> Iterator[Side]:
    """Start a sidecar by its command line, with one adapter loaded."""
    env = {"LORA_FS_ROOT": str(work / "root"), "LORA_FS_MODEL": "tiny"}

    def run(*args: str, check: bool = True) -> None:
        subprocess.run([lora_fs, *args], env=child_environment(env), check=check, capture_output=True)

    run("init", check=False)  # an older version has no such command, and needs none
    run("register", NAME, str(make_adapter(ensure_model(work / "tiny"), work / NAME, 0)))
    port = free_port()
    with stub_engine(work / "engine.log") as engine_url:
        options = ["--engine", engine_url, "--port", str(port), "--stage-dir", str(work / "stage")]
        process = spawn(
            "sidecar",
            [lora_fs, "sidecar", *options],
            log=work / "log",
            url=f"http://127.0.0.1:{port}",
            env=env,
        )
        try:
            process.wait_ready("/readyz")
            Client(process.url).complete(NAME, stream=False)
            yield Side(process, engine_url)
        finally:
            process.stop()


def main() -> None:
    """Time in turns; ``--beside`` is the ``lora-fs`` of another version, as installed elsewhere."""
    options = arguments(__doc__ or "", rounds=12, requests=300, beside="")
    heading("What the proxy costs the processor")
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        commands = {"this": LORA_FS, **({"beside": options.beside} if options.beside else {})}
        sides = {
            what: stack.enter_context(started(command, work / what)) for what, command in commands.items()
        }
        for one in sides.values():
            for stream in (False, True):
                one.turn(options.requests, stream=stream, counts=False)
        for _ in range(options.rounds):
            for what in random.sample(sorted(sides), len(sides)):
                sides[what].turn(options.requests, stream=False)
                sides[what].turn(options.requests // 5, stream=True)
        print("| | CPU µs a request, least | median | added ms, least | median |\n|---|---|---|---|---|")
        for stream, kind in ((False, "plain answer"), (True, "stream of 8 events")):
            for what, one in sides.items():
                cpu, added = one.cpu_us[stream], one.added_ms[stream]
                numbers = f"{min(cpu):.0f} | {statistics.median(cpu):.0f}"
                print(f"| {kind}, {what} | {numbers} | {min(added):.2f} | {statistics.median(added):.2f} |")


if __name__ == "__main__":
    main()
