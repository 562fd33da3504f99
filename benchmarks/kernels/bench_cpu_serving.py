"""Tokens a second of a real vLLM on the CPU: base model, one adapter, eight adapters in every batch.

Stock vLLM beside the plugin, in turns, on a model of 1024 hidden units in 8 layers with adapters
of rank 64 in fp32; prompts of 60 words, and as many requests at once as adapters. Goal: the plugin
9 times stock with eight adapters, and LoRA at most 20 % of a step. The answers are compared first.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from figures import arguments, heading, interval

from lora_fs.demo.big_llama import ENGINE_ARGS, engine_pair, make_big_adapter, make_big_model, register_all
from lora_fs.demo.engine import EngineFarm

ADAPTERS = 8
ARGS = (*ENGINE_ARGS, "--max-loras", str(ADAPTERS), "--max-cpu-loras", str(2 * ADAPTERS))
WORDS = "hello world " * 30


def serve(http: httpx.Client, models: Sequence[str], tokens: int) -> tuple[list[str], float]:
    """Ask each model once, all at the same time: the answers, and tokens a second."""

    def ask(numbered: tuple[int, str]) -> str:
        number, model = numbered
        body = {"model": model, "prompt": f"{WORDS}{number}", "max_tokens": tokens}
        answer = http.post("/v1/completions", json={**body, "temperature": 0, "ignore_eos": True})
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(models)) as threads:
        began = time.perf_counter()
        answers = list(threads.map(ask, enumerate(models)))
        return answers, len(models) * tokens / (time.perf_counter() - began)


def main() -> None:
    """Compare the answers, then time the three mixes in turns."""
    options = arguments(__doc__ or "", rounds=5, tokens=8)
    heading("Tokens a second on the CPU")
    with tempfile.TemporaryDirectory() as folder, EngineFarm(Path(folder)) as farm:
        work = Path(folder)
        model = make_big_model(work)
        names = [f"a{number}" for number in range(ADAPTERS)]
        for seed, name in enumerate(names):
            make_big_adapter(model, work / "adapters" / name, seed)
        register_all(work / "root", model, work / "adapters")
        engines = engine_pair(farm, model, work / "adapters", work / "root", work, ARGS)
        clients = {name: httpx.Client(base_url=one.url, timeout=600) for name, one in engines.items()}
        mixes = {"base": [model.name] * ADAPTERS, "one adapter": ["a0"] * ADAPTERS, "eight adapters": names}
        alone = [serve(clients["plugin"], [name], options.tokens)[0][0] for name in names]
        for mix, models in mixes.items():
            texts = {name: serve(client, models, options.tokens)[0] for name, client in clients.items()}
            alike = sum(a == b for a, b in zip(*texts.values(), strict=True))
            print(f"{mix}: {alike} of {ADAPTERS} answers alike")
        print(f"first words alone and together: {alone[0]!r}, {texts['plugin'][0]!r}\n")
        rates: dict[tuple[str, str], list[float]] = {(n, m): [] for n in clients for m in mixes}
        for _ in range(options.rounds):
            for name, mix in random.sample(sorted(rates), len(rates)):
                rates[name, mix].append(serve(clients[name], mixes[mix], options.tokens)[1])
        print("| tokens/s | stock | plugin | ratio | 95 % |\n|---|---|---|---|---|")
        for mix in mixes:
            stock, ours = rates["stock", mix], rates["plugin", mix]
            ratios = [b / a for a, b in zip(stock, ours, strict=True)]
            low, high = interval(ratios)
            medians = f"{statistics.median(stock):.1f} | {statistics.median(ours):.1f}"
            print(f"| {mix} | {medians} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} |")
        base = statistics.median(rates["plugin", "base"])
        for mix in ("one adapter", "eight adapters"):
            share = 1 - statistics.median(rates["plugin", mix]) / base
            print(f"share of LoRA in the plugin, {mix}: {share:.1%}")


if __name__ == "__main__":
    main()
