"""What the gateway costs: time over its sidecar, processor time, streams beside each other, and GRPO's load.

The engines are stand-ins, so that nothing but the hop is timed. Goals: at most 3 ms at the median, 600 small
requests/s on one core, no stall over 100 ms of its own with 500 streams, and 83 % prefix hits of 87.5 %.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import httpx

sys.path.insert(0, str(Path(__file__).parent))

from bench_folder_drop import write_adapter
from bench_proxy import Client
from figures import arguments, heading, interval
from paced_engine import Pace, paced_engine
from population import populate

from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import LORA_FS

POLICIES = ("many-00000", "many-00001")
SAMPLES = 8  # of each prompt, as GRPO asks for
EVENT_S = 0.5


@contextlib.contextmanager
def fleet(work: Path, replicas: int, pace: Pace) -> Iterator[tuple[list[Process], Process]]:
    """Start sidecars before stand-in engines, and a gateway before them."""
    with contextlib.ExitStack() as opened:
        sidecars = []
        for number in range(replicas):
            engine = opened.enter_context(paced_engine(work / f"engine-{number}.log", pace))
            own = ("--replica-id", f"r{number}", "--stage-dir", str(work / f"stage-{number}"))
            one = start_sidecar(
                f"sidecar-{number}",
                engine,
                *own,
                log=work / f"sidecar-{number}.log",
                env={"LORA_FS_ROOT": str(work / "volume"), "LORA_FS_MODEL": "tiny"},
            )
            opened.callback(one.stop)
            sidecars.append(one)
        for one in sidecars:
            one.wait_ready("/readyz", timeout_s=180)
        port = free_port()
        command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += [word for one in sidecars for word in ("--replica", one.url)]
        log, url = work / "gateway.log", f"http://127.0.0.1:{port}"
        gateway = spawn("gateway", command, log=log, url=url, env={})
        opened.callback(gateway.stop)
        gateway.wait_ready("/health")
        yield sidecars, gateway


def hop(sidecar: Process, gateway: Process, rounds: int) -> None:
    """Time the same request to the sidecar and through the gateway, in turns."""
    clients = {"sidecar": Client(sidecar.url, POLICIES[0]), "gateway": Client(gateway.url, POLICIES[0])}
    for stream, measures in ((False, ("answer",)), (True, ("first event", "last event"))):
        took: dict[str, dict[str, list[float]]] = {one: {m: [] for m in measures} for one in clients}
        for turn in range(rounds + 10):
            for name in random.sample(sorted(clients), 2):
                _, first, last = clients[name].complete(stream=stream)
                if turn >= 10:
                    for measure, seconds in zip(measures, (first, last) if stream else (last,), strict=True):
                        took[name][measure].append(1000 * seconds)
        for measure in measures:
            pairs = zip(took["sidecar"][measure], took["gateway"][measure], strict=True)
            added = [through - direct for direct, through in pairs]
            low, high = interval(added)
            median = statistics.median(added)
            print(f"added to the {measure}: {median:.2f} ms ({low:.2f} to {high:.2f})", flush=True)


async def small(gateway: Process, clients: int, seconds: float) -> None:
    """Ask with some clients at once; tell the gateway's own processor time a request."""
    asked, body = 0, {"model": POLICIES[0], "prompt": "hello", "max_tokens": 1}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        end = time.monotonic() + seconds

        async def client() -> None:
            nonlocal asked
            while time.monotonic() < end:
                async with session.post(f"{gateway.url}/v1/completions", json=body) as answer:
                    await answer.read()
                    assert answer.status == 200, answer.status
                asked += 1

        before = processor_s(gateway.pid)
        await asyncio.gather(*(client() for _ in range(clients)))
        used = processor_s(gateway.pid) - before
    each = f"{1e6 * used / asked:.0f} µs of the gateway's processor time each"
    print(f"{asked / seconds:.0f} requests/s; {each}: {asked / used:.0f} requests/s on one core", flush=True)


def beside(gateway: Process, sidecars: list[Process], seconds: float) -> None:
    """Time small requests alone, and while another process sends prompts of 10 MB to another replica."""
    for name in POLICIES:
        httpx.post(f"{gateway.url}/v1/completions", json={"model": name, "prompt": "x"}).raise_for_status()
    holders = [set(httpx.get(f"{one.url}/metadata").json()["lora"]["loaded_loras"]) for one in sidecars]
    assert sorted(map(len, holders)) == [1, 1], holders
    for what, sender in (("nothing", None), ("text", "x" * 10_000_000), ("token ids", [12345] * 1_700_000)):
        body = json.dumps({"model": POLICIES[0], "prompt": sender})
        with multiprocessing.Pool(1) as pool:
            sent = pool.apply_async(_send, (gateway.url, body, seconds if sender else 0.0))
            took, end = list[float](), time.monotonic() + seconds
            with httpx.Client(timeout=60) as client:
                while time.monotonic() < end or not sent.ready():
                    began = time.perf_counter()
                    asked = {"model": POLICIES[1], "prompt": "x"}
                    client.post(f"{gateway.url}/v1/completions", json=asked).raise_for_status()
                    took.append(1000 * (time.perf_counter() - began))
            took.sort()
            told = f"median {statistics.median(took):.1f}, p99 {took[len(took) * 99 // 100]:.1f}"
            count = sent.get()
        print(f"small requests beside {what} ({count} prompts): {told}, worst {took[-1]:.0f} ms", flush=True)


def _send(url: str, body: str, seconds: float) -> int:
    """Send one large prompt after another; return how many."""
    count, end = 0, time.monotonic() + seconds
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < end:
            headers = {"content-type": "application/json"}
            client.post(f"{url}/v1/completions", content=body, headers=headers).raise_for_status()
            count += 1
    return count


def processor_s(pid: int) -> float:
    """Return the processor time of a process and its threads, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def streams(url: str, count: int, events: int) -> float:
    """Return the longest gap between two events of any stream beyond the engine's own, in ms."""
    body = {"model": POLICIES[0], "prompt": "hello", "max_tokens": events, "stream": True}
    longest = 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(number: int) -> None:
            nonlocal longest
            await asyncio.sleep(EVENT_S * number / count)
            at = []
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        at.append(time.monotonic())
            assert len(at) == events, len(at)
            longest = max(longest, *(later - earlier for earlier, later in pairwise(at)))

        await asyncio.gather(*map(client, range(count)))
    return 1000 * (longest - EVENT_S)


async def grouped(gateway: Process, prompts: int, at_once: int) -> None:
    """Ask as GRPO does: SAMPLES requests a prompt, two policies; tell the gateway's choices by reason."""
    choose, left = random.Random(1), iter(range(prompts))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: dict[str, str]) -> None:
            async with session.post(f"{gateway.url}/v1/completions", json=body) as answer:
                await answer.read()
                assert answer.status == 200, answer.status

        async def worker() -> None:
            for number in left:
                prompt = " ".join(str(choose.randrange(10**6)) for _ in range(100))
                body = {"model": POLICIES[number % 2], "prompt": prompt}
                await asyncio.gather(*(one(body) for _ in range(SAMPLES)))

        before = await choices(session, gateway)
        await asyncio.gather(*(worker() for _ in range(at_once)))
        after = await choices(session, gateway)
    made = {reason: after[reason] - before.get(reason, 0) for reason in after}
    total = sum(made.values())
    print(json.dumps({reason: round(count / total, 4) for reason, count in made.items() if count}))


async def choices(session: aiohttp.ClientSession, gateway: Process) -> dict[str, float]:
    """Return the gateway's choices by reason."""
    async with session.get(f"{gateway.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = 'lora_fs_gateway_choices_total{reason="'
    found = (line.removeprefix(name).split('"} ') for line in lines if line.startswith(name))
    return {reason: float(count) for reason, count in found}


def main() -> None:
    """Measure, and print one line a figure."""
    given = arguments(__doc__ or "", rounds=200, clients=32, seconds=10.0, streams=500, prompts=200)
    heading("What the gateway adds to a sidecar")
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_adapter(work / "source", 0, 4)
        populate(work / "volume", work / "source", len(POLICIES)).close()
        with fleet(work, 1, Pace()) as (sidecars, gateway):
            hop(sidecars[0], gateway, given.rounds)
            asyncio.run(small(gateway, given.clients, given.seconds))
        with fleet(work, 2, Pace()) as (sidecars, gateway):
            beside(gateway, sidecars, given.seconds)
        with fleet(work, 1, Pace(each_s=EVENT_S)) as (sidecars, gateway):
            for name, one in (("sidecar", sidecars[0]), ("gateway", gateway)):
                late = asyncio.run(streams(one.url, given.streams, 20))
                print(f"{given.streams} streams through the {name}: longest stall {late:.0f} ms", flush=True)
        with fleet(work, 3, Pace(request_s=0.2, each_s=0.01)) as (_, gateway):
            asyncio.run(grouped(gateway, given.prompts, 12))
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
