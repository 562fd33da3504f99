"""`lora-fs gateway`, HAProxy's bounded-load hashing and round robin, before the same sidecars.

Each engine is a stand-in: loads take 150 ms, one after another; a request 40 ms, and 4 ms for each under way.
With ``--vllm N`` there are N stock vLLMs on the CPU instead, with the tiny model and real PEFT adapters. All
share the machine's processors, so that loads and requests of one slow the others down.
The three take turns, so that each meets the machine as the others do. Needs the program haproxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from bench_folder_drop import write_adapter
from paced_engine import Pace, paced_engine
from population import SCOPE, fill, populate

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar.registry.store.writer import Registry

PACE = Pace(load_s=0.15, request_s=0.04, each_s=0.004)
REPLICAS, PLACES = 4, 8
ADAPTERS_A_PLACE, CLIENTS_A_REPLICA = 2, 12
WARM_S = 5.0
TOKENS = 16  # of an answer
BALANCE = {
    "round robin": "balance roundrobin",
    "HAProxy": "balance hash req.body,json_query('$.model')\n hash-type consistent\n hash-balance-factor 125",
}


class Counted(NamedTuple):
    """What a replica did since its start."""

    requests: float
    loads: float


@dataclass(frozen=True)
class Fleet:
    """Sidecars, each before an engine of its own.

    Attributes:
        stand_ins: the engines' URLs; empty if they are vLLMs.
    """

    sidecars: list[Process]
    stand_ins: list[str]

    @property
    def names(self) -> list[str]:
        return [f"many-{number:05d}" for number in range(adapters(len(self.sidecars)))]

    @property
    def clients(self) -> int:
        return CLIENTS_A_REPLICA * len(self.sidecars)

    async def counts(self, session: aiohttp.ClientSession) -> list[Counted]:
        found = []
        for engine in self.stand_ins:
            told = await (await session.get(f"{engine}/counts")).json()
            found.append(Counted(told["completions"], told["loads"]))
        for sidecar in self.sidecars if not self.stand_ins else ():
            text = await (await session.get(f"{sidecar.url}/metrics")).text()
            found.append(
                Counted(total(text, "vllm:request_success_total"), total(text, "lora_fs_loads_total"))
            )
        return found


def adapters(replicas: int) -> int:
    """How many there are: twice as many as the fleet has places."""
    return ADAPTERS_A_PLACE * replicas * PLACES


def total(metrics: str, name: str) -> float:
    """The sum of a metric's series."""
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)))


@contextlib.contextmanager
def haproxy(balance: str, sidecars: list[Process], folder: Path) -> Iterator[str]:
    """Start HAProxy before the sidecars; yield its URL."""
    port, config = free_port(), folder / f"haproxy-{len(list(folder.iterdir()))}.cfg"
    servers = "\n".join(f" server s{n} {one.url.removeprefix('http://')}" for n, one in enumerate(sidecars))
    config.write_text(
        "defaults\n mode http\n timeout connect 5s\n timeout client 120s\n timeout server 120s\n"
        f"frontend f\n bind 127.0.0.1:{port}\n option http-buffer-request\n default_backend b\n"
        f"backend b\n {balance}\n option http-buffer-request\n{servers}\n"
    )
    url, program = f"http://127.0.0.1:{port}", shutil.which("haproxy")
    assert program is not None, "apt install haproxy"
    process = spawn(
        "haproxy", [program, "-db", "-f", str(config)], log=folder / "haproxy.log", url=url, env={}
    )
    try:
        process.wait_ready("/v1/models")
        yield url
    finally:
        process.stop()


async def load(url: str, fleet: Fleet, seconds: float, seed: int) -> dict[str, float]:
    """Ask with all clients at once; return the figures of what came after WARM_S."""
    names = fleet.names
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(names))))
    took, errors = list[float](), 0
    began = time.monotonic()
    counting = began + WARM_S

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(number: int) -> None:
            nonlocal errors
            choose = random.Random(seed * 1000 + number)
            while time.monotonic() < began + WARM_S + seconds:
                name = choose.choices(names, cum_weights=weights)[0]
                body = {"model": name, "prompt": "hello", "max_tokens": TOKENS, "temperature": 0}
                at = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
                if at >= counting:
                    took.append(time.monotonic() - at)
                    errors += answer.status != 200

        clients = asyncio.gather(*map(client, range(fleet.clients)))
        await asyncio.sleep(WARM_S)
        before = await fleet.counts(session)
        await clients
        after = await fleet.counts(session)
    served = [b.requests - a.requests for a, b in zip(before, after, strict=True)]
    loads = sum(b.loads - a.loads for a, b in zip(before, after, strict=True))
    took.sort()
    return {
        "requests/s": len(took) / seconds,
        "loads a request": loads / sum(served),
        "p50 ms": 1e3 * took[len(took) // 2],
        "p95 ms": 1e3 * took[int(len(took) * 0.95)],
        "busiest/mean": max(served) * len(served) / sum(served),
        "errors": errors,
    }


async def check(ways: dict[str, str], names: list[str]) -> None:
    """Each way gives each adapter's own answer, the one that the first way gave."""
    async with aiohttp.ClientSession() as session:
        for name in names:
            body = {"model": name, "prompt": "hello", "max_tokens": TOKENS, "temperature": 0}
            texts = set()
            for url in ways.values():
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    told = await answer.json()
                    assert told["model"] == name, told
                    texts.add(told["choices"][0]["text"])
            assert len(texts) == 1, (name, texts)


@contextlib.contextmanager
def vllms(count: int, work: Path) -> Iterator[list[str]]:
    """Start stock engines, fill the volume with adapters for them; yield the engines' URLs."""
    model = ensure_model(work / "tiny")
    source = make_adapter(model, work / "source", 0)
    with contextlib.closing(Registry(work / "volume", create=True)) as registry:
        fill(registry, SCOPE, source, adapters(count), own_bytes=True)
    with EngineFarm(work) as farm:
        most = ("--max-loras", str(PLACES), "--max-cpu-loras", str(PLACES))
        engines = [farm.start(f"engine-{number}", model, args=most) for number in range(count)]
        for one in engines:
            one.wait_ready("/health", timeout_s=300)
        yield [one.url for one in engines]


@contextlib.contextmanager
def stand_ins(work: Path) -> Iterator[list[str]]:
    """Start paced engines, fill the volume with small adapters; yield the engines' URLs."""
    write_adapter(work / "source", 0, 4)
    populate(work / "volume", work / "source", adapters(REPLICAS)).close()
    with contextlib.ExitStack() as opened:
        logs = [work / f"engine-{number}.log" for number in range(REPLICAS)]
        yield [opened.enter_context(paced_engine(log, PACE)) for log in logs]


@contextlib.contextmanager
def started(engines: list[str], work: Path, *, real: bool) -> Iterator[Fleet]:
    """Start a sidecar before each engine."""
    with contextlib.ExitStack() as opened:
        sidecars = []
        for number, engine in enumerate(engines):
            own = ("--replica-id", f"r{number}", "--stage-dir", str(work / f"stage-{number}"))
            one = start_sidecar(
                f"sidecar-{number}",
                engine,
                *own,
                *("--max-loaded", str(PLACES)),
                log=work / f"sidecar-{number}.log",
                env={"LORA_FS_ROOT": str(work / "volume"), "LORA_FS_MODEL": "tiny"},
            )
            opened.callback(one.stop)
            sidecars.append(one)
        for one in sidecars:
            one.wait_ready("/readyz", timeout_s=180)
        yield Fleet(sidecars, [] if real else engines)


def main() -> None:
    """Measure, and print one line of JSON a way: the medians of its turns."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=20.0, help="of each turn, after the warm-up")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--vllm", type=int, default=0, help="so many vLLMs instead of stand-ins")
    given = options.parse_args()
    with contextlib.ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        engines = opened.enter_context(vllms(given.vllm, work) if given.vllm else stand_ins(work))
        fleet = opened.enter_context(started(engines, work, real=bool(given.vllm)))
        sidecars = fleet.sidecars
        ways = {
            name: opened.enter_context(haproxy(balance, sidecars, work)) for name, balance in BALANCE.items()
        }
        port = free_port()
        command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += [word for one in sidecars for word in ("--replica", one.url)]
        ways["gateway"] = url = f"http://127.0.0.1:{port}"
        gateway = spawn("gateway", command, log=work / "gateway.log", url=url, env={})
        opened.callback(gateway.stop)
        gateway.wait_ready("/health")
        if given.vllm:
            asyncio.run(check(ways, fleet.names))
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(given.turns):
            for name, url in ways.items():
                figures[name].append(asyncio.run(load(url, fleet, given.seconds, turn)))
                print(json.dumps({"turn": turn, "way": name, **_rounded(figures[name][-1])}), flush=True)
        for name, turns in figures.items():
            medians = {key: statistics.median(one[key] for one in turns) for key in turns[0]}
            print(json.dumps({"way": name, **_rounded(medians)}))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


if __name__ == "__main__":
    main()
