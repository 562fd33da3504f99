"""What the effect probe costs a stream: the gaps between its tokens just after another adapter's first load.

One stock vLLM on the CPU with the demo's tiny model, and two sidecars beside it: one with the probe, one
without. An adapter streams through the second, one answer after the other. In each turn both sidecars are
asked once for an adapter that the engine never had, in an order drawn anew. The stream's gaps in the
``--seconds`` from that answer on count. The probe sends two requests for an adapter that changes answers, as
these do. Checked: the stream's answers are one text; the probe finds that each adapter has an effect; the
other sidecar says nothing. A ratio is of one turn, probe over no probe, with a 95 % interval by bootstrap.
Goal: 0.95 to 1.05.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, interval, percentile, table

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import Volume

MODEL, STREAMING, WARM, TOKENS, LEAD = "tiny", "streaming", "warm", 200, 20
READY_S = 120.0
WEIGHTS = "adapter_model.safetensors"
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "p95": lambda values: percentile(values, 95),
    "longest": max,
}


@dataclass
class Stream:
    """One adapter's answers, one after the other. ``gaps``: between two tokens of one answer, in ms."""

    gaps: list[float] = field(default_factory=list)
    answers: set[str] = field(default_factory=set)
    led: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {"model": STREAMING, "prompt": "hello world", "max_tokens": TOKENS, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        while not self.ended.is_set():
            last, text = None, ""
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append(1000 * (now - last))
                        last = now
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if len(self.gaps) >= LEAD:
                            self.led.set()
            self.answers.add(text)


async def ask(session: aiohttp.ClientSession, url: str, name: str) -> None:
    body = {"model": name, "prompt": "hello", "max_tokens": 1}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def verdict(session: aiohttp.ClientSession, url: str, name: str, replica: str) -> str | None:
    """Return what a sidecar knows of an adapter's effect."""
    async with session.get(f"{url}/v1/dashboard/adapters/{name}") as answer:
        told = await answer.json()
    found: str | None = told["replicas"].get(replica, {}).get("effect")
    return found


async def judged(session: aiohttp.ClientSession, url: str, name: str) -> str:
    """Wait for the verdict of the sidecar that has the probe."""
    async with asyncio.timeout(READY_S):
        while (found := await verdict(session, url, name, "on")) is None:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    return found


async def measure(urls: dict[str, str], new: Sequence[dict[str, str]], seconds: float) -> None:
    """Take turns, and print what they show.

    Args:
        urls: of the sidecars ``on`` and ``off``. new: in each turn, what each is asked for.
    """
    gaps: dict[str, list[float]] = {"off": [], "on": []}
    ratios: dict[str, list[float]] = {what: [] for what in STATISTICS}
    soon = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S)) as session:
        await ask(session, urls["on"], WARM)
        await judged(session, urls["on"], WARM)  # it has asked the base model
        stream = Stream()
        running = asyncio.create_task(stream.run(session, urls["off"]))
        await stream.led.wait()
        for names in new:
            found: dict[str, list[float]] = {}
            for which in random.sample(["off", "on"], 2):
                await ask(session, urls[which], names[which])
                begins = len(stream.gaps)
                await asyncio.sleep(seconds)
                found[which] = stream.gaps[begins:]
                if which == "on":
                    soon += await verdict(session, urls["on"], names["on"], "on") is not None
                    told = await judged(session, urls["on"], names["on"])
                    assert told == "some", (names, told)
                else:
                    assert await verdict(session, urls["off"], names["off"], "off") is None
                gaps[which] += found[which]
            for what, of in STATISTICS.items():
                ratios[what].append(of(found["on"]) / of(found["off"]))
        stream.ended.set()
        await running
    assert len(stream.answers) == 1, stream.answers
    table([("gaps, no probe", gaps["off"]), ("gaps, probe", gaps["on"])], "ms")
    print(f"judged by the window's end: {soon} of {len(new)}\n")
    for what, values in ratios.items():
        low, high = interval(values)
        print(
            f"{what} gap, probe / no probe: {statistics.median(values):.3f} ({low:.3f} to {high:.3f}, 95 %)"
        )


def written(first: Path, out: Path) -> Path:
    """Write an adapter of bytes that no other one has, near the first one's."""
    shutil.copytree(first, out)
    weights, random_of = load_file(out / WEIGHTS), numpy.random.default_rng()
    for tensor in weights.values():
        tensor += random_of.normal(0, 0.01, tensor.shape).astype(tensor.dtype)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return out


def documents(sources: dict[str, Path], file: Path) -> Path:
    """Write what ``apply`` registers."""
    head = {"apiVersion": "lora-fs/v1", "kind": "LoraAdapter"}
    every = [head | {"metadata": {"name": name}, "spec": {"source": str(at)}} for name, at in sources.items()]
    file.write_text("\n---\n".join(map(json.dumps, every)) + "\n", encoding="utf-8")
    return file


@contextmanager
def beside(engine_url: str, volumes: dict[str, Volume], work: Path, keeps: int) -> Iterator[dict[str, str]]:
    """Run both sidecars, each on a volume of its own; yields their URLs."""
    started = {}
    try:
        for which, probes in (("off", "false"), ("on", "true")):
            settings = {"LORA_FS_PROBE_EFFECT": probes, "LORA_FS_MAX_LOADED": str(keeps)}
            args = ("--replica-id", which, "--stage-dir", str(work / f"stage-{which}"))
            env = {**volumes[which].env, **settings}
            started[which] = start_sidecar(which, engine_url, *args, log=work / f"{which}.log", env=env)
        for one in started.values():
            one.wait_ready("/readyz")
        yield {which: one.url for which, one in started.items()}
    finally:
        for one in started.values():
            one.stop()


def main() -> None:
    """Make the model, the adapters, the volumes and an engine, then measure."""
    options = arguments(__doc__ or "", turns=120, seconds=0.5)
    heading("A stream's gaps while another adapter is judged", ("lora-fs", "vllm"))
    with tempfile.TemporaryDirectory() as folder, EngineFarm(Path(folder) / "engines") as farm:
        work, keeps = Path(folder), 2 * options.turns + 8
        model = ensure_model(work / MODEL)
        engine = farm.start("stock", model, args=["--max-cpu-loras", str(keeps)])
        first = make_adapter(model, work / "first", 1)
        volumes, names = dict[str, Volume](), dict[str, list[str]]()
        for which, named in (("off", STREAMING), ("on", WARM)):
            names[which] = [f"{which}-{turn}" for turn in range(options.turns)]
            sources = {name: written(first, work / name) for name in (named, *names[which])}
            volumes[which] = Volume(work / f"volume-{which}", MODEL, cwd=work)
            volumes[which].run("init")
            volumes[which].run("apply", "-f", str(documents(sources, work / f"{which}.yaml")))
        engine.wait_ready()
        new = [{"off": off, "on": on} for off, on in zip(names["off"], names["on"], strict=True)]
        with beside(engine.url, volumes, work, keeps) as urls:
            asyncio.run(measure(urls, new, options.seconds))


if __name__ == "__main__":
    main()
