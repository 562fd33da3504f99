"""One engine's requests, stock vLLM with its filesystem resolver beside vLLM with the plugin.

Warm requests (goal: the plugin adds at most 1 %), first requests on a fast disk (goal: no slower
than stock), requests for an adapter in host memory that has to be put into a slot (goal: within
2 ms of a warm one), 32 first requests of one adapter at once and 8 adapters over 2 slots (how often
the volume is read), and what an unload gives back. The same answers first, then times, in turns.
``--worker-apart``: vLLM's worker in a process of its own, as on a CPU it is by default. It waits by
spinning, on the processor that the other engine's is bound to: so that one is stopped meanwhile.
``--kernels off``: the plugin computes with vLLM's own, as on a GPU it does by default.
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from watchdog.events import FileOpenedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, interval, table
from memory import Backed
from population import populate

from lora_fs.demo.big_llama import ENGINE_ARGS, engine_pair, make_big_adapter, make_big_model, register_all
from lora_fs.demo.engine import MAX_LORAS, EngineFarm
from lora_fs.demo.process import Process
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.tiny_llama import MODEL_NAME, ensure_model, make_adapter
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.catalog import Terms, build
from lora_fs.sidecar.registry.view.view import RegistryView

CONCURRENT, MANY, REPEATS, UNLOADED = 32, 8, 5, 4
RESOLVED = 1000
KEPT = 100  # adapters that stock keeps in host memory: as the plugin does here, all
KEPT_S = 3


class Engine:
    """One engine and one kept connection to it. ``base``: its model; ``spins``: where another may run."""

    def __init__(self, process: Process, volume: Path, base: str, *, spins: bool) -> None:
        self.process, self.volume, self.base, self.spins = process, volume, base, spins
        self._netloc = urlsplit(process.url).netloc
        self._connection = http.client.HTTPConnection(self._netloc, timeout=120)
        self._stale_at = 0.0

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """The body of a 200; anything else is an error."""
        if time.monotonic() > self._stale_at:
            self._connection.close()  # the server has done so by then, or soon will
        self._stale_at = time.monotonic() + KEPT_S
        headers = {"content-type": "application/json"}
        self._connection.request(method, path, json.dumps(body), headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, (path, body, answer.status, content)
        return content

    def ask(self, model: str, tokens: int = 1) -> tuple[str, float]:
        """A greedy answer, and the milliseconds to its last byte."""
        request = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        started = time.perf_counter()
        content = self.call("POST", "/v1/completions", request)
        took_ms = 1000 * (time.perf_counter() - started)
        return json.loads(content)["choices"][0]["text"], took_ms

    def ask_at_once(self, models: Sequence[str], tokens: int = 1) -> tuple[set[str], float]:
        """One request for each, all at once: the different answers, and the milliseconds to the last."""
        engines = [Engine(self.process, self.volume, self.base, spins=self.spins) for _ in models]
        with ThreadPoolExecutor(len(models)) as threads:
            started = time.perf_counter()
            answers = list(threads.map(lambda e, m: e.ask(m, tokens), engines, models))
            took_ms = 1000 * (time.perf_counter() - started)
        return {text for text, _ in answers}, took_ms

    def those(self, what: str) -> set[str]:
        """By the plugin, names of which ``what`` (residency, staged) is told."""
        listed = json.loads(self.call("GET", "/v1/lora_adapters"))["data"]
        return {card["name"] for card in listed if card[what]}

    def core_mib(self) -> float:
        """Resident memory of the process that holds the weights, the largest."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return float(max(process.memory_info().rss for process in family) / 2**20)


class Reads(FileSystemEventHandler):
    """How often each adapter's weights were read, told by the kernel.

    Opened again with no other file of the adapter between counts once: safetensors opens what it reads
    twice, and the kernel tells two such openings as one when the first was not fetched yet.
    """

    def __init__(self, *folders: Path) -> None:
        self._seen: list[Path] = []
        self._last: dict[Path, str] = {}
        self._observer = Observer()
        for folder in folders:
            self._observer.schedule(self, str(folder), recursive=True, event_filter=[FileOpenedEvent])
        self._observer.start()

    def on_opened(self, event: FileSystemEvent) -> None:
        path = Path(str(event.src_path))
        again = self._last.get(path.parent) == path.name
        self._last[path.parent] = path.name
        if path.name == "adapter_model.safetensors" and not again:
            self._seen.append(path)

    def of(self, engine: Engine, names: Sequence[str]) -> int:
        """Reads of these adapters' weights on the volume of ``engine``, so far."""
        time.sleep(0.2)  # the observer's thread
        return sum(path.is_relative_to(engine.volume) and path.parent.name in names for path in self._seen)

    def close(self) -> None:
        self._observer.stop()
        self._observer.join()


Pair = dict[str, Engine]


def in_turns(pair: Pair, names: Sequence[str], ask: Callable[[Engine, str], float]) -> dict[str, list[float]]:
    """``ask`` each engine for each name, in an order drawn for each name."""
    samples: dict[str, list[float]] = {engine: [] for engine in pair}
    for name in names:
        for engine in random.sample(sorted(pair), len(pair)):
            with alone(pair, engine):
                samples[engine].append(ask(pair[engine], name))
    return samples


@contextmanager
def alone(pair: Pair, name: str) -> Iterator[None]:
    """Stop the other engine where they would spin on one processor, and have this one awake."""
    with ExitStack() as stopped:
        for other in pair.keys() - {name}:
            if pair[other].spins:
                stopped.enter_context(pair[other].process.paused())
                pair[name].ask(pair[name].base)
        yield


def first_requests(pair: Pair, names: Sequence[str], what: str, *, backed: bool = False) -> None:
    """Each is asked for the first time. ``backed``: beside memory enough that the host has behind it."""
    memory = Backed(len(names) * len(pair) if backed else 0)

    def ask(engine: Engine, name: str) -> float:
        if backed:
            memory.give()
        return engine.ask(name)[1]

    compare(f"first request, {what}", in_turns(pair, names, ask))


def compare(what: str, samples: dict[str, list[float]]) -> None:
    """Both engines' times, and the plugin's over stock's."""
    table([(f"{what}: {engine}", values) for engine, values in samples.items()], "ms")
    ratios = [b / a for a, b in zip(samples["stock"], samples["plugin"], strict=True)]
    low, high = interval(ratios)
    print(f"plugin / stock: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}, 95 %)\n", flush=True)


def check(pair: Pair, names: Sequence[str]) -> None:
    """The two say the same of each adapter, and something else of each."""
    said = [{name: engine.ask(name, 16)[0] for name in names} for engine in pair.values()]
    assert said[0] == said[1], said
    assert len(set(said[0].values())) == len(names), said


def host_hits(pair: Pair, what: str, rounds: int) -> None:
    """One adapter more than slots, in a ring: the first request for each finds it in host memory."""
    ring = [f"check-{n}" for n in range(MAX_LORAS + 1)]
    for engine in pair.values():
        for name in ring:
            engine.ask(name)
    added = in_turns(pair, ring * rounds, lambda engine, name: engine.ask(name)[1] - engine.ask(name)[1])
    for name, values in added.items():
        low, high = interval(values)
        median = statistics.median(values)
        print(f"host memory − warm, {what}, {name}: {median:.2f} ms ({low:.2f} to {high:.2f}, 95 %)")
    print(flush=True)


def at_once(pair: Pair, reads: Reads) -> None:
    """Many first requests of one adapter; then more adapters than slots, again and again."""
    fresh = [f"once-{n}" for n in range(REPEATS)]
    first = in_turns(pair, fresh, lambda engine, name: engine.ask_at_once([name] * CONCURRENT)[1])
    compare(f"{CONCURRENT} first requests of one adapter", first)
    many = [f"many-{n}" for n in range(MANY)]
    rounds = in_turns(pair, ["round"] * REPEATS, lambda engine, _: engine.ask_at_once(many, 8)[1])
    compare(f"{MANY} adapters over {MAX_LORAS} slots, 8 tokens each", rounds)
    rows = (f"{REPEATS} adapters × {CONCURRENT}", f"{MANY} adapters × {REPEATS}")
    print(f"| weights read on the volume | {rows[0]} | {rows[1]} |\n|---|---|---|")
    for name, engine in pair.items():
        print(f"| {name} | {reads.of(engine, fresh)} | {reads.of(engine, many)} |")
    for line in pair["plugin"].call("GET", "/metrics").decode().splitlines():
        if line.startswith("lora_fs_") and "loads_total" in line:
            print(f"plugin: {line}")
    print(flush=True)


def resolve(work: Path, adapter: Path) -> None:
    """What the plugin asks of its memory for every request, with 1,000 adapters in the registry."""
    registry = populate(work, adapter, RESOLVED)
    scope = Scope("default", "tiny")
    view = RegistryView(registry, (scope,))
    view.refresh()
    catalog = build(view.desired, Terms("tiny", ("default",)), 1)
    names = list(catalog.served)
    for what, asked in {
        "a name": names,
        "name@revision": [f"{name}@v1" for name in names],
        "an unknown name": [f"no-{name}" for name in names],
    }.items():
        started = time.perf_counter()
        found = [catalog.find(name) for name in asked]
        took_us = 1e6 * (time.perf_counter() - started) / len(asked)
        assert all(one is None for one in found) if "unknown" in what else all(found)
        print(f"resolve {what} among {RESOLVED}: {took_us:.2f} µs")
    print(flush=True)


def registered_later(pair: Pair, model: Path, work: Path, what: str, *, backed: bool = False) -> None:
    """First requests of adapters that came while the engines ran, once the plugin has staged them."""
    names = sorted(folder.name for folder in (work / "later").iterdir())
    shutil.copytree(work / "later", work / "adapters", dirs_exist_ok=True)
    register_all(work / "registry", model, work / "later")
    deadline = time.monotonic() + 60
    while not pair["plugin"].those("staged") >= set(names):
        assert time.monotonic() < deadline, "not staged ahead"
        time.sleep(0.1)
    first_requests(pair, names, f"{what}, staged ahead", backed=backed)


def unload(pair: Pair) -> None:
    """Unload some, and see what the process that holds the weights gives back."""
    names = [f"many-{n}" for n in range(MANY - UNLOADED, MANY)]
    for name, engine in pair.items():
        engine.ask_at_once(names)
        before = engine.core_mib()
        for adapter in names:
            engine.call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter})
        deadline = time.monotonic() + 10
        while name == "plugin" and engine.those("residency") & set(names):
            assert time.monotonic() < deadline, "still resident"
            time.sleep(0.05)
        after = engine.core_mib()
        print(f"unload of {UNLOADED}, {name}: {before:.0f} → {after:.0f} MiB in the engine core")


def main() -> None:
    """Small adapters for what a request costs, big ones for what an adapter costs."""
    options = arguments(__doc__ or "", rounds=300, adapters=24, rank=64, worker_apart=False, kernels="auto")
    how = {"worker_apart": options.worker_apart, "kernels": options.kernels}
    heading("An engine's requests, stock and with the plugin")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checked = [f"check-{n}" for n in range(MAX_LORAS + 1)]
        cold = [f"cold-{n}" for n in range(options.adapters)]
        tiny = ensure_model(work / "small" / MODEL_NAME)
        for seed, name in enumerate((*checked, *cold)):
            make_adapter(tiny, work / "small" / "adapters" / name, seed)
            make_adapter(tiny, work / "small" / "later" / f"later-{name}", 100 + seed)
        resolve(work / "resolve", work / "small" / "adapters" / checked[0])
        with EngineFarm(work) as farm:
            pair = start(farm, tiny, work / "small", how)
            check(pair, checked)
            first_requests(pair, cold, "0.1 MB")
            registered_later(pair, tiny, work / "small", "0.1 MB")
            host_hits(pair, "0.1 MB", options.rounds // 5)
            warm = in_turns(pair, checked[:1] * options.rounds, lambda engine, name: engine.ask(name, 8)[1])
            compare("warm, 8 tokens", warm)
        big = make_big_model(work)
        names = [*checked, *cold, *(f"once-{n}" for n in range(REPEATS)), *(f"many-{n}" for n in range(MANY))]
        for seed, name in enumerate(names):
            make_big_adapter(big, work / "adapters" / name, seed, options.rank)
        for seed in range(options.adapters):
            make_big_adapter(big, work / "later" / f"later-{seed}", 100 + seed, options.rank)
        with EngineFarm(work) as farm:
            pair = start(farm, big, work, how, *ENGINE_ARGS, "--max-cpu-loras", str(KEPT))
            reads = Reads(work / "adapters", work / "registry")
            check(pair, checked)
            size = (work / "adapters" / cold[0] / "adapter_model.safetensors").stat().st_size
            what = f"{size / 1e6:.1f} MB"
            host_hits(pair, what, options.rounds // 15)
            first_requests(pair, cold, what, backed=True)
            registered_later(pair, big, work, what, backed=True)
            at_once(pair, reads)
            unload(pair)
            reads.close()


def start(farm: EngineFarm, model: Path, work: Path, how: Mapping[str, Any], *args: str) -> Pair:
    """Register what lies in ``work/adapters``, and start both engines."""
    register_all(work / "registry", model, work / "adapters")
    adapters, root = work / "adapters", work / "registry"
    engines = engine_pair(farm, model, adapters, root, work, args, **how)
    volumes = {"stock": adapters, "plugin": root}
    return {
        name: Engine(engine, volumes[name], model.name, spins=how["worker_apart"])
        for name, engine in engines.items()
    }


if __name__ == "__main__":
    main()
