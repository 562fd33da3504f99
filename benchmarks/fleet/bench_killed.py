"""A replica killed under load: how soon the gateway leaves it out and takes it back, and what fails.

Three sidecars before stand-in engines that answer after 20 ms, and `lora-fs gateway` before them. Six
clients ask for the adapters in turn, without a pause. Each turn a sidecar is killed, and started again on its
port. *Out* is the time from the kill to the gateway's list of ready replicas without it. *Back* is the time
from the sidecar's own `/readyz` to the list with it. *Others* failed though they neither ran at the kill nor
began before the replica was out. Goals: out within 1 s, back within 3 s, no other request fails.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_folder_drop import write_adapter
from figures import arguments, heading, interval
from paced_engine import Pace, paced_engine
from population import populate

from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import LORA_FS

ADAPTERS, REPLICAS, CLIENTS = 8, 3, 6
LOOK_S = 0.002
GIVE_UP_S = 60.0


class Asked(NamedTuple):
    """One request. ``why``: what a failed one said."""

    began: float
    ended: float
    status: int
    why: str


@dataclass
class Replica:
    """A sidecar that keeps its address. ``process``: the last one that was started."""

    number: int
    engine: str
    work: Path
    port: int = field(default_factory=free_port)
    process: Process = field(init=False)

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        own = ("--replica-id", self.name, "--stage-dir", str(self.work / f"stage-{self.number}"))
        env = {"LORA_FS_ROOT": str(self.work / "volume"), "LORA_FS_MODEL": "tiny"}
        log = self.work / f"sidecar-{self.number}.log"
        name = f"sidecar-{self.number}"
        self.process = start_sidecar(name, self.engine, *own, log=log, env=env, port=self.port)

    def stop(self) -> None:
        self.process.stop()


@contextlib.contextmanager
def fleet(work: Path) -> Iterator[tuple[list[Replica], Process]]:
    """Start all, and wait until the gateway sends requests to each replica."""
    with contextlib.ExitStack() as opened:
        replicas = []
        for number in range(REPLICAS):
            pace = Pace(request_s=0.02)
            engine = opened.enter_context(paced_engine(work / f"engine-{number}.log", pace))
            replicas.append(one := Replica(number, engine, work))
            one.start()
            opened.callback(one.stop)
        port = free_port()
        command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += [word for one in replicas for word in ("--replica", one.url)]
        url = f"http://127.0.0.1:{port}"
        gateway = spawn("gateway", command, log=work / "gateway.log", url=url, env={})
        opened.callback(gateway.stop)
        for one in replicas:
            one.process.wait_ready("/readyz", timeout_s=180)
        gateway.wait_ready("/health")
        yield replicas, gateway


class Clients:
    """Ask the gateway without a pause. ``asked``: every request that ended."""

    def __init__(self, url: str) -> None:
        self._url, self._ended = url, threading.Event()
        self.asked: list[Asked] = []

    def run(self, number: int) -> None:
        with httpx.Client(timeout=GIVE_UP_S, trust_env=False) as http:
            for turn in itertools.count(number):
                if self._ended.is_set():
                    return
                body = {"model": f"many-{turn % ADAPTERS:05d}", "prompt": "x", "max_tokens": 1}
                began = time.monotonic()
                answer = http.post(f"{self._url}/v1/completions", json=body)
                self.asked.append(Asked(began, time.monotonic(), answer.status_code, answer.text[:200]))

    def go_on(self) -> None:
        """Wait for a hundred more answers."""
        enough = len(self.asked) + 100
        until("requests go on", lambda: len(self.asked) > enough)

    def end(self) -> None:
        self._ended.set()


def until(what: str, holds: Callable[[], bool]) -> float:
    """Look until it holds; returns when."""
    deadline = time.monotonic() + GIVE_UP_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(LOOK_S)
    return time.monotonic()


class Outage(NamedTuple):
    """One kill: when, when the gateway left the replica out, when that answered again and was taken back."""

    killed: float
    out: float
    up: float
    back: float


def kill(replica: Replica, ready: Callable[[], set[str]]) -> Outage:
    """Kill it, and start it again once it is out."""

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{replica.url}/readyz", timeout=5, trust_env=False).status_code == 200
        return False

    killed = time.monotonic()
    replica.process.kill()
    out = until("it is out", lambda: replica.name not in ready())
    replica.start()
    up = until("it is up", answers)
    return Outage(killed, out, up, until("it is in", lambda: replica.name in ready()))


def turns(replicas: list[Replica], gateway: Process, rounds: int) -> None:
    """Kill one after the other, ``rounds`` times; print what it took."""
    clients, outages = Clients(gateway.url), list[Outage]()
    with httpx.Client(timeout=5, trust_env=False) as http, ThreadPoolExecutor(CLIENTS) as pool:

        def ready() -> set[str]:
            return set(http.get(f"{gateway.url}/health").json()["ready"])

        until("all are in", lambda: len(ready()) == REPLICAS)
        running = [pool.submit(clients.run, number) for number in range(CLIENTS)]
        try:
            for turn in range(rounds):
                clients.go_on()
                outages.append(kill(replicas[turn % REPLICAS], ready))
        finally:
            clients.end()
        for one in running:
            one.result()
    failed = [one for one in clients.asked if one.status != 200]
    others = [one for one in failed if not any(o.killed < one.ended and one.began < o.out for o in outages)]
    print("| | median s | 95 % interval | worst s |\n|---|---|---|---|")
    for what, took in (
        ("out", [one.out - one.killed for one in outages]),
        ("back", [one.back - one.up for one in outages]),
    ):
        low, high = interval(took)
        print(f"| {what} | {statistics.median(took):.3f} | {low:.3f} to {high:.3f} | {max(took):.3f} |")
    print(
        f"{rounds} kills, {len(clients.asked)} requests; failed: {len(failed)}, of them others: {len(others)}"
    )
    print(*sorted({one.why for one in failed}), sep="\n")


def main() -> None:
    """Measure."""
    given = arguments(__doc__ or "", rounds=20)
    heading("A replica killed under load")
    print(f"load average before: {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_adapter(work / "source", 0, 4)
        populate(work / "volume", work / "source", ADAPTERS).close()
        with fleet(work) as (replicas, gateway):
            turns(replicas, gateway, given.rounds)
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
