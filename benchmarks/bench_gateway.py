"""`lora-fs gateway`, HAProxy's bounded-load hashing and round robin, before the same sidecars.

Each engine is a stand-in: loads take 150 ms, one after another; a request 40 ms, and 4 ms for each under way.
The three take turns, so that each meets the machine as the others do. Needs the program haproxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from bench_folder_drop import write_adapter
from paced_engine import Pace, paced_engine
from population import populate

from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import LORA_FS

PACE = Pace(load_s=0.15, request_s=0.04, each_s=0.004)
REPLICAS, PLACES, ADAPTERS, CLIENTS = 4, 8, 64, 48
WARM_S = 5.0
BALANCE = {
    "round robin": "balance roundrobin",
    "HAProxy": "balance hash req.body,json_query('$.model')\n hash-type consistent\n hash-balance-factor 125",
}


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


async def load(url: str, engines: list[str], seconds: float, seed: int) -> dict[str, float]:
    """Ask with CLIENTS at once; return the figures of what came after WARM_S."""
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(ADAPTERS)))
    names = [f"many-{number:05d}" for number in range(ADAPTERS)]
    took, errors = list[float](), 0
    began = time.monotonic()
    counting = began + WARM_S

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def counts() -> list[dict[str, int]]:
            return [await (await session.get(f"{engine}/counts")).json() for engine in engines]

        async def client(number: int) -> None:
            nonlocal errors
            choose = random.Random(seed * 1000 + number)
            while time.monotonic() < began + WARM_S + seconds:
                body = {"model": choose.choices(names, cum_weights=weights)[0], "prompt": "hello"}
                at = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
                if at >= counting:
                    took.append(time.monotonic() - at)
                    errors += answer.status != 200

        clients = asyncio.gather(*map(client, range(CLIENTS)))
        await asyncio.sleep(WARM_S)
        before = await counts()
        await clients
        after = await counts()
    served = [b["completions"] - a["completions"] for a, b in zip(before, after, strict=True)]
    loads = sum(b["loads"] - a["loads"] for a, b in zip(before, after, strict=True))
    took.sort()
    return {
        "requests/s": len(took) / seconds,
        "loads a request": loads / sum(served),
        "p50 ms": 1e3 * took[len(took) // 2],
        "p95 ms": 1e3 * took[int(len(took) * 0.95)],
        "busiest/mean": max(served) * len(served) / sum(served),
        "errors": errors,
    }


def main() -> None:
    """Measure, and print one line of JSON a way: the medians of its turns."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=20.0, help="of each turn, after the warm-up")
    options.add_argument("--turns", type=int, default=3)
    given = options.parse_args()
    with contextlib.ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        write_adapter(work / "source", 0, 4)
        populate(work / "volume", work / "source", ADAPTERS).close()
        engines, sidecars = [], []
        for number in range(REPLICAS):
            engine = opened.enter_context(paced_engine(work / f"engine-{number}.log", PACE))
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
            engines.append(engine)
            sidecars.append(one)
        for one in sidecars:
            one.wait_ready("/readyz", timeout_s=180)
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
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(given.turns):
            for name, url in ways.items():
                figures[name].append(asyncio.run(load(url, engines, given.seconds, turn)))
                print(json.dumps({"turn": turn, "way": name, **_rounded(figures[name][-1])}), flush=True)
        for name, turns in figures.items():
            medians = {key: statistics.median(one[key] for one in turns) for key in turns[0]}
            print(json.dumps({"way": name, **_rounded(medians)}))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


if __name__ == "__main__":
    main()
