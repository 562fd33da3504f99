"""What the gateway gains: six adapters asked for in turns at both replicas, and the same through one address.

Each replica has room for four of them. Hits are counted by the replicas themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.replica import PROMPT, Replica
from lora_fs.demo.sidecar import start_gateway
from lora_fs.demo.tiny_llama import make_adapter
from lora_fs.demo.transcript import Transcript
from lora_fs.demo.waiting import wait_until

NAMES = tuple(f"tenant-{number}" for number in range(1, 7))
ROUNDS = 4
_IN_LIMIT_S = 30.0


def show(pair: Pair[Replica], model_dir: Path, run_dir: Path, out: Transcript) -> None:
    """Ask without the gateway, then with it."""
    with out.step("One address for both: `lora-fs gateway` sends each request to who has its adapter"):
        for seed, name in enumerate(NAMES, 100):
            make_adapter(model_dir, pair.volume.cwd / "adapters" / name, seed)
            pair.volume.run("register", name, f"./adapters/{name}")
        pair.wait_listed(NAMES[-1])
        in_turns = [pair.both[(turn + number) % 2].url for turn in range(ROUNDS) for number in range(6)]
        before, answers = _asked(pair, in_turns)
        out.say(f"{len(in_turns)} requests for 6 adapters, in turns at a and b: {before:.0%} hits")
        with gateway(pair, run_dir) as one:
            replicas = " ".join(f"--replica {replica.url}" for replica in pair.both)
            out.command(f"lora-fs gateway {replicas} --port {one.url.rpartition(':')[2]}")
            after, same = _asked(pair, [one.url] * len(in_turns))
            out.say(f"the same {len(in_turns)} requests at {one.url}: {after:.0%} hits")
        out.check("each adapter answers as before", same == answers)
        out.check("the gateway's share of hits is the larger one", after > before)


@contextmanager
def gateway(pair: Pair[Replica], run_dir: Path) -> Iterator[Process]:
    """Run one before both replicas; it has found both when the block begins."""
    process = start_gateway((replica.url for replica in pair.both), log=run_dir / "gateway.log")
    try:
        process.wait_ready()
        wait_until("the gateway finds both replicas", lambda: _ready(process.url) == 2, timeout_s=_IN_LIMIT_S)
        yield process
    finally:
        process.stop()


def _ready(url: str) -> int:
    return len(httpx.get(f"{url}/health", **LOCAL).json()["ready"])


def _asked(pair: Pair[Replica], urls: Sequence[str]) -> tuple[float, dict[str, str]]:
    """Ask for one adapter after the other; return the share of hits, and what each answered."""
    hits, answers = _hits(pair), {}
    with httpx.Client(**LOCAL) as client:
        for number, url in enumerate(urls):
            name = NAMES[number % len(NAMES)]
            body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            answer = client.post(f"{url}/v1/completions", json=body).raise_for_status()
            answers[name] = str(answer.json()["choices"][0]["text"])
    return (_hits(pair) - hits) / len(urls), answers


def _hits(pair: Pair[Replica]) -> float:
    """Requests whose adapter was in the engine when they came, at both."""
    lines = (line for one in pair.both for line in one.http.get("/metrics").text.splitlines())
    return sum(float(line.split()[1]) for line in lines if line.startswith("lora_fs_request_hits_total "))
