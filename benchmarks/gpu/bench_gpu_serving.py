"""Serving on a GPU: stock vLLM with its filesystem resolver, the plugin with vLLM's kernels, and with ours.

One model of random weights, with an 8B Llama's layers. The engines start together, and only one is asked at
a time. First come the same greedy answers of each, then tokens a second of 64 requests, then the longest gap
of a stream beside requests for adapters that its engine never had. Turns are in an order drawn anew. Results,
logs and metrics go to ``--out``. Needs what ``pack_engine.py`` packs, and 12 GB of the GPU for each engine of
16 layers. ``--urls`` measures engines that run already: ``stock=http://…,plugin=http://…``.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, write_json
from serving_engines import PORTS, make_adapters, make_model, start, wait_ready

WARM = 8  # adapters that share a batch
COLD = 6  # adapters beside a stream
REQUESTS, TOKENS, STREAMED = 64, 48, 200
BATCHES = {
    "base": ["model"] * REQUESTS,
    "one adapter": ["a0"] * REQUESTS,
    "eight adapters": [f"a{number % WARM}" for number in range(REQUESTS)],
    "one request": ["a0"],
}


async def complete(http: httpx.AsyncClient, url: str, model: str, tokens: int, prompt: str) -> Any:
    """The tokens of one greedy answer; a RuntimeError says why there is none."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = await http.post(f"{url}/v1/completions", json={**body, "return_token_ids": True})
    if answer.is_error:
        raise RuntimeError(f"{model}: {answer.status_code} {answer.text[:300]}")
    return answer.json()["choices"][0]["token_ids"]


async def batch(http: httpx.AsyncClient, url: str, models: Sequence[str]) -> tuple[float, list[Any]]:
    """Tokens a second, and the answers."""
    began = time.perf_counter()
    asked = (complete(http, url, model, TOKENS, f"hello {number}") for number, model in enumerate(models))
    answers = list(await asyncio.gather(*asked))
    return len(models) * TOKENS / (time.perf_counter() - began), answers


async def stream(http: httpx.AsyncClient, url: str, colds: Sequence[str]) -> dict[str, Any]:
    """The gaps of a stream of the base model, ms, and what the requests beside it took, ms."""
    times: list[float] = []
    came = asyncio.Event()

    async def read() -> None:
        body = {"model": "model", "prompt": "hello", "max_tokens": STREAMED, "ignore_eos": True}
        async with http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                    came.set()

    streaming, took, wanted = asyncio.create_task(read()), [], 20
    streaming.add_done_callback(lambda _: came.set())
    for cold in colds:
        while len(times) < wanted and not streaming.done():
            await came.wait()
            came.clear()
        began = time.perf_counter()
        await complete(http, url, cold, 1, "hello")
        took.append(1000 * (time.perf_counter() - began))
        wanted = len(times) + 8
    await streaming
    gaps = sorted(1000 * (later - earlier) for earlier, later in pairwise(times[1:]))
    return {"median": statistics.median(gaps), "longest": gaps[-5:], "took": took}


async def measure(urls: Mapping[str, str], rounds: int, found: dict[str, Any]) -> None:
    """Put into ``found`` answers, speeds and streams of each engine that answers for all of the adapters."""
    limits = httpx.Limits(max_connections=2 * REQUESTS)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        models = ["model", *(f"a{number}" for number in range(WARM))]
        for name, url in urls.items():
            try:
                answers = {
                    model: await complete(http, url, model, 12, "hello world this") for model in models
                }
            except (RuntimeError, httpx.HTTPError) as error:
                print(f"{name} is left out: {error!r}")
                continue
            found[name] = {"answers": answers, "speed": {}, "streams": {}}
        for number in range(rounds):
            for name in random.sample(sorted(found), len(found)):
                for what, each in BATCHES.items():
                    speed, of_batch = await batch(http, urls[name], each)
                    found[name]["speed"].setdefault(what, []).append(speed)
                    found[name]["answers"].setdefault(what, of_batch)
            colds = [f"a{WARM + COLD * number + nth}" for nth in range(COLD)]
            for name in random.sample(sorted(found), len(found)):
                for what, beside in (("alone", []), ("cold", colds), ("again", colds)):
                    told = await stream(http, urls[name], beside)
                    found[name]["streams"].setdefault(what, []).append(told)


def tell(found: Mapping[str, Any]) -> None:
    """Print what was found, and how many answers are the first engine's, which is stock where it answers."""
    first = next(iter(found))
    columns = ["engine", *(f"{what}, tokens/s" for what in BATCHES), f"answers as {first}'s"]
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for name, one in found.items():
        speeds = " | ".join(f"{statistics.median(one['speed'][what]):.0f}" for what in BATCHES)
        same = [answer == found[first]["answers"][key] for key, answer in one["answers"].items()]
        print(f"| {name} | {speeds} | {sum(same)} of {len(same)} |")
    columns = ["engine", "beside the stream", "median gap, ms", "longest, ms", "a request beside, ms"]
    print(f"\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for name, one in found.items():
        for what, streams in one["streams"].items():
            median = statistics.median(each["median"] for each in streams)
            longest = statistics.median(each["longest"][-1] for each in streams)
            took = [took for each in streams for took in each["took"]]
            beside = f"{statistics.median(took):.0f}" if took else ""
            print(f"| {name} | {what} | {median:.2f} | {longest:.2f} | {beside} |", flush=True)


def main() -> None:
    """Start the engines, unless they run already, and measure."""
    options = arguments(__doc__ or "", out="gpu-serving", layers=16, rank=32, rounds=3, urls="")
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    heading("Serving on a GPU", ("lora-fs", "vllm", "torch", "triton"))
    engines: dict[str, subprocess.Popen[bytes]] = {}
    found: dict[str, Any] = {}
    try:
        if options.urls:
            urls = dict(pair.split("=", 1) for pair in options.urls.split(","))
        else:
            work = out / "work"
            make_model(work / "model", options.layers)
            engines.update({name: start(name, work, out) for name in PORTS})
            make_adapters(work, options.layers, options.rank, WARM + COLD * options.rounds)
            urls = wait_ready(engines, {name: f"http://127.0.0.1:{port}" for name, port in PORTS.items()})
        asyncio.run(measure(urls, options.rounds, found))
        for name in urls.keys() - {"stock"}:
            (out / f"{name}.metrics").write_text(httpx.get(f"{urls[name]}/metrics").text, encoding="utf-8")
        if not found:
            sys.exit("no engine answered: see their logs")
        tell(found)
    finally:
        write_json(out / "serving.json", found)
        for engine in engines.values():
            engine.terminate()


if __name__ == "__main__":
    main()
