"""A fleet to take pictures of: real sidecars on one real registry, with real requests through them.

Only the engines behind are stubs. Some adapters are damaged after they were registered, as happens; one
has a canary.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from fleet import sidecars
from stub_engine import stub_engine

from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.sidecar.model import Policy, PolicyKind, Scope
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation

SCOPE = Scope("default", "tiny")
TASKS = "support billing search sql summarize triage routing legal intent extract rewrite tagging".split()
MARKETS = "de en es fr it ja ko nl pl pt-br sv zh".split()
DAMAGED = ("legal-ja", "sql-en", "triage-pl")
TRIED = "billing-de"  # has a canary, where its market is pictured
REQUESTS_PER_S = 20


@dataclass(frozen=True, slots=True)
class Pictured:
    """Where its registry lies, what is registered, and where its replicas answer."""

    root: Path
    names: list[str]
    urls: list[str]

    async def ask(self, until: float) -> None:
        """Requests as tenants make them: few adapters often, many seldom, others on each replica."""
        weights = [1 / (place + 1) for place in range(len(self.names))]
        urls = self.urls
        orders = [random.Random(at).sample(self.names, len(self.names)) for at in range(len(urls))]
        async with httpx.AsyncClient(timeout=30) as client:
            tasks: set[asyncio.Task[httpx.Response]] = set()
            while time.monotonic() < until:
                at = random.randrange(len(urls))
                body = {"model": random.choices(orders[at], weights)[0], "prompt": "x", "max_tokens": 1}
                tasks.add(asyncio.create_task(client.post(f"{urls[at]}/v1/completions", json=body)))
                tasks = {task for task in tasks if not task.done()}
                await asyncio.sleep(1 / REQUESTS_PER_S)
            await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def pictured(work: Path, replicas: int, markets: Sequence[str] = MARKETS) -> Iterator[Pictured]:
    """Start one in ``work``: a replica is named ``vllm-N``, and holds a third of the adapters at most."""
    with ExitStack() as stack:
        root = work / "volume"
        names = _register(root, ensure_model(work / "tiny"), work, markets)
        urls = []
        for number in range(replicas):
            own = work / f"replica-{number}"
            own.mkdir()
            engine = stack.enter_context(stub_engine(own / "stub.log"))
            loaded = str(len(names) // 3)
            options = ("--replica-id", f"vllm-{number}", "--max-loaded", loaded, "--default-ttl", "240")
            (sidecar,) = stack.enter_context(sidecars(1, root, engine, own, *options))
            urls.append(sidecar.url)
        yield Pictured(root, names, urls)


def _register(root: Path, base: Path, work: Path, markets: Sequence[str]) -> list[str]:
    """One adapter for each task and market; of some policies, some damaged afterwards."""
    registry = Registry(root, create=True)
    chance, names = random.Random(1), []
    for number, task in enumerate(TASKS):
        rank = (8, 16, 32)[number % 3]
        folder = make_adapter(base, work / "sources" / task, number, rank=rank)
        for market in markets:
            name = f"{task}-{market}"
            kind = chance.choices([None, PolicyKind.STICKY, PolicyKind.EAGER], [12, 2, 1])[0]
            policy = Policy(kind=kind) if kind is not None else None
            labels = {"team": task, "market": market}
            wanted = Registration(name, folder, folder.as_uri(), policy=policy, labels=labels)
            done = ingest.register(registry, SCOPE, wanted, Expectation(("tiny",)), writer="ci@build-7")
            names.append(name)
            if name in DAMAGED:
                weights = registry.layout.artifact(done.record.key) / "adapter_model.safetensors"
                weights.write_bytes(weights.read_bytes()[:-4096])
    if TRIED in names:
        folder = make_adapter(base, work / "sources" / "retrained", len(TASKS), rank=16)
        retrained = Registration(TRIED, folder, folder.as_uri(), activate=False)
        done = ingest.register(registry, SCOPE, retrained, Expectation(("tiny",)), writer="ci@build-8")
        release.set_canary(registry, SCOPE, TRIED, done.record.revision, 20, writer="ops@example")
    registry.close()
    return names
