"""The plugin of two checkouts, both engines up at once, a request to each in turn.

    python benchmarks/beside_before.py --before ../before --adapters 120

``--before``: a checkout of the commit before, with an environment of its own, as ``before_after.py`` wants.
Both engines are asked for an adapter within a few milliseconds, in an order drawn for each adapter. So what
else the machine does meets both alike, and their ratio tells less apart than that of whole runs in turns.
The processor's time is the API server's, of all its threads. Each two answers are compared first.

A median leaves out work that falls on fewer than half of the requests, such as reconcile passes. So the
last column compares the sums over all requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from before_after import HERE, python_of
from figures import heading, interval

from lora_fs.demo.big_llama import engine_pair, register_all
from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.tiny_llama import MODEL_NAME, ensure_model, make_adapter

WARM_TOKENS = 8
UNITS = ("wall", "processor")


class Took(NamedTuple):
    """Of one request, in ms."""

    wall: float
    processor: float


class Server:
    """One checkout's engine. ``pid``: of its API server."""

    def __init__(self, url: str, pid: int) -> None:
        self._pid = pid
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)

    def ask(self, model: str, tokens: int) -> tuple[str, Took]:
        """A greedy answer. The one before it, of the base model, is not timed: it wakes the server."""
        self._complete(MODEL_NAME, 1)
        used, began = self._used_ms(), time.perf_counter()
        text = self._complete(model, tokens)
        return text, Took(1000 * (time.perf_counter() - began), self._used_ms() - used)

    def _complete(self, model: str, tokens: int) -> str:
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0})
        self._connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, (model, answer.status, content)
        return str(json.loads(content)["choices"][0]["text"])

    def _used_ms(self) -> float:
        total = 0
        for thread in Path(f"/proc/{self._pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                total += int((thread / "schedstat").read_text().split()[0])
        return total / 1e6


@contextmanager
def server(checkout: Path, work: Path, adapters: int) -> Iterator[Server]:
    """Start a checkout's engine, of its own environment, with so many adapters registered."""
    command = [str(python_of(checkout)), "-P", __file__, "--serve", str(work), "--adapters", str(adapters)]
    with subprocess.Popen(
        command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url, pid = process.stdout.readline().split()
            yield Server(url, int(pid))
        finally:
            process.communicate()


def serve(work: Path, adapters: int) -> None:
    """Be the process of one checkout: its engine serves until the input ends."""
    model = ensure_model(work / MODEL_NAME)
    for seed in range(adapters):
        make_adapter(model, work / "adapters" / f"a{seed}", seed)
    with EngineFarm(work) as farm:
        register_all(work / "registry", model, work / "adapters")
        engines = engine_pair(farm, model, work / "adapters", work / "registry", work)
        engines["stock"].kill()
        print(engines["plugin"].url, engines["plugin"].pid, flush=True)
        sys.stdin.read()


def in_turns(servers: Sequence[Server], names: Sequence[str], tokens: int) -> list[tuple[Took, Took]]:
    """What each name's request took at both."""
    found = []
    for name in names:
        told: dict[Server, tuple[str, Took]] = {}
        for one in random.sample(servers, len(servers)):
            told[one] = one.ask(name, tokens)
        (before, took_before), (after, took_after) = (told[one] for one in servers)
        assert before == after, (name, before, after)
        found.append((took_before, took_after))
    return found


def compare(what: str, took: Sequence[tuple[Took, Took]]) -> None:
    """Print a row for the wall clock, and one for the processor."""
    for unit in UNITS:
        before, after = ([getattr(one[side], unit) for one in took] for side in (0, 1))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        pairs = list(zip(before, after, strict=True))
        row = (
            what,
            unit,
            f"{statistics.median(before):.2f}",
            f"{statistics.median(after):.2f}",
            ratio(statistics.median(ratios), interval(ratios)),
            ratio(together(pairs), interval(pairs, of=together)),
        )
        print(f"| {' | '.join(row)} |", flush=True)


def together(pairs: Sequence[tuple[float, float]]) -> float:
    """The sum after, divided by the sum before."""
    return sum(after for _, after in pairs) / sum(before for before, _ in pairs)


def ratio(found: float, spread: tuple[float, float]) -> str:
    return f"{found:.3f} ({spread[0]:.3f} to {spread[1]:.3f})"


def main() -> None:
    """First requests of adapters of 0.1 MB, then warm ones of one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--adapters", type=int, default=120)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is not None:
        serve(chosen.serve, chosen.adapters)
        return
    if chosen.before is None:
        parser.error("--before: which checkout to compare with")
    heading("The plugin's requests, request by request beside another checkout")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as up:
        servers = []
        for name, checkout in (("before", chosen.before.resolve()), ("after", HERE)):
            (work := Path(folder) / name).mkdir()
            servers.append(up.enter_context(server(checkout, work, chosen.adapters)))
        names = [f"a{seed}" for seed in range(chosen.adapters)]
        print("| what | unit | before ms | after ms | after / before, median (95 %) | of the sums (95 %) |")
        print("|---|---|---|---|---|---|")
        in_turns(servers, names[:2], 1)
        compare("first request, 0.1 MB", in_turns(servers, names[2:], 1))
        compare(f"warm, {WARM_TOKENS} tokens", in_turns(servers, names[:1] * len(names), WARM_TOKENS))


if __name__ == "__main__":
    main()
