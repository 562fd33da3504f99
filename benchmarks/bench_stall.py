"""What a stream feels while its neighbours' adapters are read from a slow volume.

One adapter streams; every 24 tokens a window opens with a request of one token: none (undisturbed),
for the same adapter (warm: the price of any neighbour), for another that is in host memory (resident:
the price of a second adapter), for that one while ``cp`` reads another from the volume (copied: the price
of its bytes, whoever reads them), or for one of rank 64 never asked for before (cold), which lies on a
volume of 100 MB/s and 2 ms. Stock vLLM with its filesystem resolver and vLLM with the plugin, same
model, same arguments, stream in turns, each the five kinds of window in an order drawn anew, while the
other engine is stopped; needs root, to mount and to come first. A stall is a window's longest gap between
two tokens; what it adds is told over the median gap of the undisturbed windows. Goals for the plugin: cold
adds at most 1.3 times what warm adds, and keeps 85 % of warm's tokens per second. ``--worker-apart``:
vLLM's worker in a process of its own, as on a CPU it is by default; otherwise it is in the engine core's,
as on one GPU. ``--kernels off``: the plugin computes with vLLM's own, as on a GPU it does by default.
``--memory-kept``: a virtual machine's host takes no free memory back meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, interval
from memory import kept

from lora_fs.demo.big_llama import ENGINE_ARGS, engine_pair, make_big_adapter, make_big_model, register_all
from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import Process
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.slow_volume import slow_volume

LOADED = ("warm", "resident", "copied")
ARMS = ("undisturbed", *LOADED, "cold")
KEPT = 100  # adapters that stock keeps in host memory: as the plugin does here, all
STREAMING = "streaming"
CHECKED = ("check-0", "check-1")
WEIGHTS = "adapter_model.safetensors"
LEAD_TOKENS, WINDOW_TOKENS = 8, 24


@dataclass
class Arm:
    """What was measured of one engine in one kind of window; times in milliseconds."""

    gaps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


class Window(NamedTuple):
    """Its arm, whom to ask as it opens, and the file to copy meanwhile."""

    arm: str
    neighbour: str | None
    copied: Path | None


class Tokens:
    """When the tokens of one stream arrived, in seconds; those that came as one have one time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._news = asyncio.Event()
        self._ended = False

    def arrived(self) -> None:
        self.times.append(time.perf_counter())
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def reach(self, count: int) -> bool:
        """Wait for that many; False if the stream ends before."""
        while len(self.times) < count and not self._ended:
            self._news.clear()
            await self._news.wait()
        return len(self.times) >= count


class Client:
    """One engine, asked over HTTP; keeps the answers, by adapter and tokens. ``copy``: a file to write to."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, copy: Path | None = None, prompt: str = PROMPT
    ) -> None:
        self._session, self._url, self._copy, self._prompt = session, f"{url}/v1/completions", copy, prompt
        self.answers: dict[tuple[str, int], str] = {}

    async def ask(self, model: str, tokens: int = 1) -> float:
        """Complete greedily; returns the milliseconds it took."""
        started = time.perf_counter()
        async with self._session.post(self._url, json=self._request(model, tokens)) as response:
            body = await response.text()
            assert response.status == 200, (model, response.status, body)
        self.answers[model, tokens] = json.loads(body)["choices"][0]["text"]
        return 1000 * (time.perf_counter() - started)

    async def stream(self, count: int, tokens: Tokens) -> None:
        """Tell ``tokens`` of each as it arrives."""
        request = {**self._request(STREAMING, count), "stream": True}
        try:
            async with self._session.post(self._url, json=request) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        tokens.arrived()
        finally:
            tokens.end()

    async def measure(self, arms: dict[str, Arm], plan: Sequence[Window]) -> None:
        """One stream, through every window of ``plan``."""
        tokens = Tokens()
        stream = asyncio.create_task(self.stream(LEAD_TOKENS + WINDOW_TOKENS * len(plan), tokens))
        starts = []
        copies = []
        for number, (name, neighbour, copied) in enumerate(plan):
            assert await tokens.reach(LEAD_TOKENS + WINDOW_TOKENS * number), "the stream ended early"
            starts.append(time.perf_counter())
            if copied is not None:
                assert self._copy is not None, "no file to copy to"
                copies.append(await asyncio.create_subprocess_exec("cp", copied, self._copy))
            if neighbour is not None:
                arms[name].requests.append(await self.ask(neighbour))
        await stream
        assert [await copy.wait() for copy in copies] == [0] * len(copies)
        gaps = [(later, 1000 * (later - earlier)) for earlier, later in pairwise(tokens.times)]
        of_arm: dict[str, list[float]] = {name: [] for name in arms}
        for (name, *_), start, end in zip(plan, starts, [*starts[1:], float("inf")], strict=True):
            window = [gap for at, gap in gaps if start < at <= end]
            if not window:  # it began and ended between two tokens
                window = [next((gap for at, gap in gaps if at > start), gaps[-1][1])]
            arms[name].stalls.append(max(window))
            of_arm[name] += window
        for name, found in of_arm.items():
            arms[name].gaps += found
            arms[name].tokens_per_s.append(1000 * len(found) / sum(found))

    def _request(self, model: str, tokens: int) -> dict[str, object]:
        asked = {"model": model, "prompt": self._prompt, "max_tokens": tokens}
        return {**asked, "temperature": 0, "ignore_eos": True}


async def run(
    pair: Mapping[str, Process], adapters: Path, copy: Path, rounds: int, windows: int
) -> dict[str, dict[str, Arm]]:
    """Compare the answers, then stream from each engine once a round, in turns."""
    results = {engine: {arm: Arm() for arm in ARMS} for engine in pair}
    async with connect() as session:
        clients = {name: Client(session, engine.url, copy) for name, engine in pair.items()}
        await compare(clients)
        for number in range(rounds):
            order = random.sample([(arm, n) for arm in ARMS for n in range(windows)], len(ARMS) * windows)
            for engine in random.sample(sorted(results), len(results)):
                plan = [_window(arm, engine, number, n, adapters) for arm, n in order]
                async with alone(pair, engine, clients[engine]):
                    await clients[engine].measure(results[engine], plan)
        assert clients["stock"].answers == clients["plugin"].answers
    return results


async def compare(clients: Mapping[str, Client]) -> None:
    """Load what is loaded before, and see that both engines answer the same, and each adapter otherwise."""
    for name in (STREAMING, *CHECKED, STREAMING):
        for client in clients.values():
            await client.ask(name, tokens=16)
    said = clients["stock"].answers
    assert said == clients["plugin"].answers, (said, clients["plugin"].answers)
    assert len(set(said.values())) == len(said), said


def connect() -> aiohttp.ClientSession:
    """No connection is kept: an engine closes those that were open when it was stopped."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))


def come_first() -> None:
    """Let this process, which has a machine of its own elsewhere, have a processor at once.

    Where all are taken by an engine that spins it was found to wait up to 100 ms, with the token there.
    """
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


@asynccontextmanager
async def alone(pair: Mapping[str, Process], engine: str, client: Client) -> AsyncIterator[None]:
    """Have one engine of the two run, which has done first what it does after a pause."""
    with ExitStack() as paused:
        for name in pair.keys() - {engine}:
            paused.enter_context(pair[name].paused())
        await client.ask(STREAMING, tokens=32)
        yield


def _window(arm: str, engine: str, number: int, n: int, adapters: Path) -> Window:
    neighbour = {"undisturbed": None, "warm": STREAMING, "cold": cold_name(number, n)}.get(arm, CHECKED[0])
    copied = adapters / copied_name(engine, number, n) / WEIGHTS if arm == "copied" else None
    return Window(arm, neighbour, copied)


def cold_name(number: int, window: int) -> str:
    """An adapter that each engine is asked for once."""
    return f"cold-{number}-{window}"


def copied_name(engine: str, number: int, window: int) -> str:
    """One that is read once, beside this engine, by another process."""
    return f"copied-{engine}-{number}-{window}"


def report(results: dict[str, dict[str, Arm]]) -> None:
    """Print every arm, then what cold adds beside what a neighbour adds that is loaded."""
    print(
        "| engine | arm | gap, median ms | stall, median ms (95 %) | stall, max ms | tokens/s | request ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for engine, name, arm in ((e, n, arm) for e, arms in results.items() for n, arm in arms.items()):
        low, high = interval(arm.stalls)
        stall = f"{statistics.median(arm.stalls):.0f} ({low:.0f} to {high:.0f}) | {max(arm.stalls):.0f}"
        asked = f"{statistics.median(arm.requests):.0f}" if arm.requests else "–"
        speed = statistics.median(arm.tokens_per_s)
        print(f"| {engine} | {name} | {statistics.median(arm.gaps):.1f} | {stall} | {speed:.1f} | {asked} |")
    print("\n| engine | beside | adds | cold adds | cold / it (95 %) | tokens/s, cold / it (95 %) |")
    print("|---|---|---|---|---|---|")
    for engine, name in itertools.product(results, LOADED):
        alone, loaded, cold = (results[engine][arm] for arm in ("undisturbed", name, "cold"))
        ratio, low, high = _ratio_of_added(alone.gaps, loaded.stalls, cold.stalls)
        kept = [a / b for a, b in zip(cold.tokens_per_s, loaded.tokens_per_s, strict=True)]
        least, most = interval(kept)
        added = [statistics.median(arm.stalls) - statistics.median(alone.gaps) for arm in (loaded, cold)]
        stalls = f"{added[0]:.0f} ms | {added[1]:.0f} ms | {ratio:.2f} ({low:.2f} to {high:.2f})"
        tokens = f"{statistics.median(kept):.2f} ({least:.2f} to {most:.2f})"
        print(f"| {engine} | {name} | {stalls} | {tokens} |", flush=True)


def _ratio_of_added(
    alone: Sequence[float], warm: Sequence[float], cold: Sequence[float]
) -> tuple[float, float, float]:
    """What cold adds over what warm adds, each at the median, and its 95 % interval by bootstrap."""

    def ratio(*samples: Sequence[float]) -> float:
        base, near, far = (statistics.median(sample) for sample in samples)
        return (far - base) / max(near - base, 0.1)

    drawn = sorted(ratio(*(random.choices(s, k=len(s)) for s in (alone, warm, cold))) for _ in range(2000))
    return ratio(alone, warm, cold), drawn[50], drawn[1949]


@contextmanager
def engines(
    options: argparse.Namespace, asked: Sequence[str], copied: Sequence[str] = ()
) -> Iterator[tuple[dict[str, Process], Path, Path]]:
    """Start both, with adapters on the slow volume; yields them, that folder, and one to write in.

    From then on this process comes first.

    Args:
        options: ``mbps``, ``latency_ms``, ``worker_apart``, ``kernels`` and ``memory_kept``.
        asked: adapters that are asked for, beside those that are loaded before.
        copied: of whose bytes another process reads.
    """
    with tempfile.TemporaryDirectory() as folder, EngineFarm(Path(folder)) as farm:
        work = Path(folder)
        model = make_big_model(work)
        for seed, name in enumerate((STREAMING, *CHECKED, *asked)):
            make_big_adapter(model, work / "adapters" / name, seed)
        register_all(work / "registry", model, work / "adapters")
        for name in copied:
            make_big_adapter(model, work / "adapters" / name, 0)
        speed = {"mbps": options.mbps, "latency_ms": options.latency_ms}
        with (
            kept() if options.memory_kept else nullcontext(),
            slow_volume(work / "adapters", work / "slow-adapters", work / "slow-a.log", **speed) as adapters,
            slow_volume(work / "registry", work / "slow-registry", work / "slow-r.log", **speed) as root,
        ):
            args = (*ENGINE_ARGS, "--max-cpu-loras", str(KEPT))
            how = {"worker_apart": options.worker_apart, "kernels": options.kernels}
            pair = engine_pair(farm, model, adapters, root, work, args, **how)
            come_first()
            yield pair, adapters, work


def main() -> None:
    """Make the model and its adapters, mount, start both engines, measure."""
    options = arguments(
        __doc__ or "",
        rounds=16,
        windows=2,
        mbps=100,
        latency_ms=2,
        worker_apart=False,
        kernels="auto",
        memory_kept=False,
    )
    heading(f"A stream beside cold adapters on a volume of {options.mbps} MB/s and {options.latency_ms} ms")
    numbers = list(itertools.product(range(options.rounds), range(options.windows)))
    asked = [cold_name(*at) for at in numbers]
    read = [copied_name(engine, *at) for engine in ("stock", "plugin") for at in numbers]
    with engines(options, asked, read) as (pair, adapters, work):
        report(asyncio.run(run(pair, adapters, work / "copy", options.rounds, options.windows)))


if __name__ == "__main__":
    main()
