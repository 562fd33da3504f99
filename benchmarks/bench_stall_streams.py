"""What a stream feels whose neighbours ask one after the other, all of a stream's of one kind.

The procedure that the goal was set with; ``bench_stall``, where kinds take turns within a stream, is finer.
Beside a stream of 150 tokens come requests of one token, each 8 tokens after the last was answered: for its
own adapter (warm), for another that is in host memory (resident), each for one of rank 64 on the slow volume
that was never asked for before (cold), or none (undisturbed). Stalls are as many of the longest gaps between
two tokens as there were requests; what they add is told over the median gap of the undisturbed streams.
Engines and kinds in turns, in an order drawn anew, while the other engine is stopped. Goals and options are
``bench_stall``'s; needs root, too.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_stall import CHECKED, STREAMING, Client, Tokens, alone, compare, connect, engines
from figures import arguments, heading

from lora_fs.demo.process import Process

ARMS = ("undisturbed", "warm", "resident", "cold")
TOKENS, LEAD_TOKENS, REST_TOKENS = 150, 6, 8
MOST = 18  # requests beside one stream
PROMPT = "hello world this is"


@dataclass
class Stream:
    """The gaps between its tokens, and what each request beside it took, in milliseconds."""

    gaps: list[float]
    requests: list[float] = field(default_factory=list)


async def measure(client: Client, neighbours: Iterator[str] | None) -> Stream:
    """One stream, beside requests for ``neighbours`` until it nears its end."""
    tokens = Tokens()
    requests: list[float] = []
    stream = asyncio.create_task(client.stream(TOKENS, tokens))
    wanted = LEAD_TOKENS
    while neighbours is not None and wanted < TOKENS - REST_TOKENS and await tokens.reach(wanted):
        requests.append(await client.ask(next(neighbours)))
        wanted = len(tokens.times) + REST_TOKENS
    await stream
    return Stream([1000 * (later - earlier) for earlier, later in pairwise(tokens.times[1:])], requests)


async def run(pair: Mapping[str, Process], rounds: int) -> dict[str, dict[str, list[Stream]]]:
    """Compare the answers, then stream from each engine once a round and kind of neighbour."""
    results: dict[str, dict[str, list[Stream]]] = {engine: {arm: [] for arm in ARMS} for engine in pair}
    async with connect() as session:
        clients = {name: Client(session, engine.url, prompt=PROMPT) for name, engine in pair.items()}
        await compare(clients)
        for number in range(rounds):
            plan = list(itertools.product(pair, ARMS))
            for engine, arm in random.sample(plan, len(plan)):
                asked: dict[str, Iterator[str] | None] = {
                    "undisturbed": None,
                    "warm": itertools.repeat(STREAMING),
                    "resident": itertools.repeat(CHECKED[0]),
                    "cold": iter(cold_names(number)),
                }
                async with alone(pair, engine, clients[engine]):
                    results[engine][arm].append(await measure(clients[engine], asked[arm]))
        stock, plugin = (clients[engine].answers for engine in ("stock", "plugin"))
        both = stock.keys() & plugin.keys()  # a slower stream leaves time for fewer
        assert any(name in cold_names(0) for name, _ in both)
        assert all(stock[one] == plugin[one] for one in both)
    return results


def cold_names(number: int) -> list[str]:
    """The adapters that each engine is asked for in one round only."""
    return [f"cold-{number}-{n}" for n in range(MOST)]


def added(alone: Sequence[Stream], disturbed: Sequence[Stream]) -> float:
    """What a request adds to the stream that it is beside, at the median, in milliseconds."""
    longest = sorted(gap for stream in disturbed for gap in stream.gaps)
    stalls = longest[-sum(len(stream.requests) for stream in disturbed) :]
    return statistics.median(stalls) - statistics.median(gap for stream in alone for gap in stream.gaps)


def report(results: dict[str, dict[str, list[Stream]]]) -> None:
    """Print every kind, then what cold adds beside what a neighbour adds that is loaded."""
    print("| engine | beside | gap, median ms | adds, ms | max, ms | tokens/s | requests | each, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for engine, arm in itertools.product(results, ARMS):
        alone, streams = results[engine]["undisturbed"], results[engine][arm]
        gaps = [gap for stream in streams for gap in stream.gaps]
        requests = [one for stream in streams for one in stream.requests]
        adds = f"{added(alone, streams):.1f} | " if requests else "– | "
        print(f"| {engine} | {arm} | {statistics.median(gaps):.1f} | {adds}", end="")
        print(f"{max(gaps):.0f} | {1000 * len(gaps) / sum(gaps):.1f} | {len(requests)} | ", end="")
        print(f"{statistics.median(requests):.0f} |" if requests else "– |")
    print("\n| engine | cold / warm (95 %) | cold / resident (95 %) | tokens/s, cold / warm (95 %) |")
    print("|---|---|---|---|")
    for engine, arms in results.items():
        told = (_spread(arms, _adds, "warm"), _spread(arms, _adds, "resident"), _spread(arms, _keeps, "warm"))
        print(f"| {engine} | {' | '.join(told)} |", flush=True)


def _adds(alone: Sequence[Stream], loaded: Sequence[Stream], cold: Sequence[Stream]) -> float:
    return added(alone, cold) / max(added(alone, loaded), 0.1)


def _keeps(alone: Sequence[Stream], loaded: Sequence[Stream], cold: Sequence[Stream]) -> float:
    gaps = [[gap for stream in streams for gap in stream.gaps] for streams in (loaded, cold)]
    return statistics.mean(gaps[0]) / statistics.mean(gaps[1])


def _spread(arms: dict[str, list[Stream]], ratio: Callable[..., float], beside: str) -> str:
    """The ratio of cold to ``beside``, and its 95 % interval, from streams drawn again."""
    samples = [arms["undisturbed"], arms[beside], arms["cold"]]
    drawn = sorted(ratio(*(random.choices(s, k=len(s)) for s in samples)) for _ in range(2000))
    return f"{ratio(*samples):.2f} ({drawn[50]:.2f} to {drawn[1949]:.2f})"


def main() -> None:
    """Make the model and its adapters, mount, start both engines, measure."""
    options = arguments(
        __doc__ or "",
        rounds=8,
        mbps=100,
        latency_ms=2,
        worker_apart=False,
        kernels="auto",
        memory_kept=False,
    )
    heading(f"Streams beside neighbours, on a volume of {options.mbps} MB/s and {options.latency_ms} ms")
    asked = [name for number in range(options.rounds) for name in cold_names(number)]
    with engines(options, asked) as (pair, *_):
        report(asyncio.run(run(pair, options.rounds)))


if __name__ == "__main__":
    main()
