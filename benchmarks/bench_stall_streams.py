"""What a stream feels whose neighbours ask one after the other, all of a stream's of one kind.

The procedure that the goal was set with; ``bench_stall``, where kinds take turns within a stream, is finer.
Beside a stream of 150 tokens come requests of one token, each 8 tokens after the last was answered: for its
own adapter (warm), for another that is in host memory (resident), each for one of rank 64 on the slow volume
that was never asked for before (cold), or none (undisturbed). Stalls are as many of the longest gaps between
two tokens as there were requests; what they add is told over the median gap of the undisturbed streams.
The last line compares what cold adds in the plugin with what warm does in stock: what every neighbour cost
where the goal was set.
Of a stream's gaps those are 14 beside warm and 6 beside cold, whose requests are longer and therefore fewer:
where a machine lets single gaps be long by itself, they weigh more beside cold. With ``--every 28`` as many
requests come beside all kinds. In brackets stands what as many of the undisturbed streams' longest gaps as
beside cold add, and *itself* is what a request adds to the longest gap from its start to its end, over the
longest of as many gaps beside nobody, each at the median.
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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from bench_stall import CHECKED, STREAMING, Client, Tokens, alone, compare, connect, engines
from figures import arguments, heading

from lora_fs.demo.process import Process

ARMS = ("undisturbed", "warm", "resident", "cold")
TOKENS, LEAD_TOKENS, REST_TOKENS = 150, 6, 8
MOST = 18  # requests beside one stream
PROMPT = "hello world this is"


class Request(NamedTuple):
    """What it took, in milliseconds, and where in the stream's gaps it was asked and answered."""

    took: float
    during: slice


@dataclass
class Stream:
    """The gaps between its tokens, in milliseconds, and the requests beside it."""

    gaps: list[float]
    requests: list[Request] = field(default_factory=list)

    def longest(self, count: int) -> list[float]:
        """The longest gap of every stretch of so many."""
        return [max(self.gaps[at : at + count]) for at in range(len(self.gaps) - count + 1)]


async def measure(client: Client, neighbours: Iterator[str] | None, every: int = 0) -> Stream:
    """One stream, beside requests for ``neighbours`` until it nears its end.

    Args:
        every: ask when so many tokens have come since the last request, and ``REST_TOKENS`` since its answer.
    """
    tokens = Tokens()
    requests: list[Request] = []
    stream = asyncio.create_task(client.stream(TOKENS, tokens))
    wanted = LEAD_TOKENS
    while neighbours is not None and wanted < TOKENS - REST_TOKENS and await tokens.reach(wanted):
        asked = len(tokens.times)
        took = await client.ask(next(neighbours))
        # The first token is not told of; a gap lies before each that follows, the last one under way.
        requests.append(Request(took, slice(asked - 2, len(tokens.times) - 1)))
        wanted = max(len(tokens.times) + REST_TOKENS, wanted + every)
    await stream
    return Stream([1000 * (later - earlier) for earlier, later in pairwise(tokens.times[1:])], requests)


async def run(pair: Mapping[str, Process], rounds: int, every: int) -> dict[str, dict[str, list[Stream]]]:
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
                    results[engine][arm].append(await measure(clients[engine], asked[arm], every))
        stock, plugin = (clients[engine].answers for engine in ("stock", "plugin"))
        both = stock.keys() & plugin.keys()  # a slower stream leaves time for fewer
        assert any(name in cold_names(0) for name, _ in both)
        assert all(stock[one] == plugin[one] for one in both)
    return results


def cold_names(number: int) -> list[str]:
    """The adapters that each engine is asked for in one round only."""
    return [f"cold-{number}-{n}" for n in range(MOST)]


def added(alone: Sequence[Stream], disturbed: Sequence[Stream], beside: Sequence[Stream] = ()) -> float:
    """What a request adds to the stream that it is beside, at the median, in milliseconds.

    Args:
        beside: whose requests are counted, if not those of ``disturbed``.
    """
    longest = sorted(gap for stream in disturbed for gap in stream.gaps)
    stalls = longest[-sum(len(stream.requests) for stream in beside or disturbed) :]
    return statistics.median(stalls) - statistics.median(gap for stream in alone for gap in stream.gaps)


def added_itself(alone: Sequence[Stream], disturbed: Sequence[Stream], share: float = 0.5) -> float:
    """What a request adds to the longest gap from its start to its end, in milliseconds.

    Args:
        share: of the requests that add no more; 0.5 for the median.
    """
    asked = [stream.gaps[request.during] for stream in disturbed for request in stream.requests]
    nobody = [gap for stream in alone for gap in stream.longest(round(statistics.median(map(len, asked))))]
    longest = sorted(map(max, asked))
    return longest[int(share * len(longest))] - statistics.median(nobody)


def report(results: dict[str, dict[str, list[Stream]]]) -> None:
    """Print every kind, then what cold adds beside what a neighbour adds that is loaded."""
    print(
        "| engine | beside | gap, median ms | adds, ms | itself: median, p90 ms | max, ms | tokens/s | ",
        end="",
    )
    print("requests | each, ms |\n|---|---|---|---|---|---|---|---|---|")
    for engine, arm in itertools.product(results, ARMS):
        alone, streams = results[engine]["undisturbed"], results[engine][arm]
        gaps = [gap for stream in streams for gap in stream.gaps]
        took = [request.took for stream in streams for request in stream.requests]
        print(f"| {engine} | {arm} | {statistics.median(gaps):.1f} | ", end="")
        if took:
            itself = [f"{added_itself(alone, streams, share):.1f}" for share in (0.5, 0.9)]
            print(f"{added(alone, streams):.1f} | {', '.join(itself)} | ", end="")
        else:
            print(f"({added(alone, streams, results[engine]['cold']):.1f}) | – | ", end="")
        print(f"{max(gaps):.0f} | {1000 * len(gaps) / sum(gaps):.1f} | {len(took)} | ", end="")
        print(f"{statistics.median(took):.0f} |" if took else "– |")
    print("\n| engine | cold / warm (95 %) | cold / resident (95 %) | itself: cold / warm (95 %) | ", end="")
    print("itself: cold / resident (95 %) | tokens/s, cold / warm (95 %) |\n|---|---|---|---|---|---|")
    for engine, arms in results.items():
        ratios = [_spread(arms, how, to) for how in (_adds, _adds_itself) for to in ("warm", "resident")]
        print(f"| {engine} | {' | '.join([*ratios, _spread(arms, _keeps, 'warm')])} |", flush=True)
    print(
        f"\nplugin's cold / stock's warm (95 %): {_across(results['plugin'], results['stock'])}", flush=True
    )


def _adds(alone: Sequence[Stream], loaded: Sequence[Stream], cold: Sequence[Stream]) -> float:
    return added(alone, cold) / max(added(alone, loaded), 0.1)


def _adds_itself(alone: Sequence[Stream], loaded: Sequence[Stream], cold: Sequence[Stream]) -> float:
    return added_itself(alone, cold) / max(added_itself(alone, loaded), 0.1)


def _keeps(alone: Sequence[Stream], loaded: Sequence[Stream], cold: Sequence[Stream]) -> float:
    gaps = [[gap for stream in streams for gap in stream.gaps] for streams in (loaded, cold)]
    return statistics.mean(gaps[0]) / statistics.mean(gaps[1])


def _adds_to_another(
    alone: Sequence[Stream], cold: Sequence[Stream], others: Sequence[Stream], loaded: Sequence[Stream]
) -> float:
    return added(alone, cold) / max(added(others, loaded), 0.1)


def _spread(arms: dict[str, list[Stream]], ratio: Callable[..., float], beside: str) -> str:
    """The ratio of cold to ``beside``, and its 95 % interval, from streams drawn again."""
    return _drawn(ratio, arms["undisturbed"], arms[beside], arms["cold"])


def _across(arms: dict[str, list[Stream]], others: dict[str, list[Stream]]) -> str:
    """The ratio of what cold adds in one engine to what warm adds in the other."""
    return _drawn(_adds_to_another, arms["undisturbed"], arms["cold"], others["undisturbed"], others["warm"])


def _drawn(ratio: Callable[..., float], *samples: list[Stream]) -> str:
    drawn = sorted(ratio(*(random.choices(s, k=len(s)) for s in samples)) for _ in range(2000))
    return f"{ratio(*samples):.2f} ({drawn[50]:.2f} to {drawn[1949]:.2f})"


def main() -> None:
    """Make the model and its adapters, mount, start both engines, measure."""
    options = arguments(
        __doc__ or "",
        rounds=8,
        every=0,
        mbps=100,
        latency_ms=2,
        worker_apart=False,
        kernels="auto",
        memory_kept=False,
    )
    heading(f"Streams beside neighbours, on a volume of {options.mbps} MB/s and {options.latency_ms} ms")
    asked = [name for number in range(options.rounds) for name in cold_names(number)]
    with engines(options, asked) as (pair, *_):
        report(asyncio.run(run(pair, options.rounds, options.every)))


if __name__ == "__main__":
    main()
