"""What one stream feels while another adapter is read from a slow volume: stock vLLM, and the plugin.

The demo's last step, and a short one: ``benchmarks/bench_stall.py`` measures it. The volume is a
mount of 100 MB/s and 2 ms, which takes root and ``/dev/fuse``; without them it is not shown.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import httpx

from lora_fs.demo.big_llama import ENGINE_ARGS, engine_pair, make_big_adapter, make_big_model, register_all
from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.slow_volume import slow_volume
from lora_fs.demo.transcript import Transcript

STREAMING, COLD = "streaming", ("cold-1", "cold-2", "cold-3")
SPACING_TOKENS = 12


def show(farm: EngineFarm, run_dir: Path, out: Transcript) -> None:
    """Both engines in turn, with the same model, adapters and volume."""
    with out.step("A stream beside adapters that are first asked for, on a slow volume"):
        if os.geteuid() != 0 or not Path("/dev/fuse").exists():
            out.say("Not shown here: to mount a slow volume takes root and /dev/fuse.")
            return
        work = run_dir / "stall"
        model = make_big_model(work)
        for seed, name in enumerate((STREAMING, *COLD)):
            make_big_adapter(model, work / "adapters" / name, seed)
        register_all(work / "registry", model, work / "adapters")
        with (
            slow_volume(work / "adapters", work / "slow-adapters", work / "slow-a.log") as adapters,
            slow_volume(work / "registry", work / "slow-registry", work / "slow-r.log") as root,
        ):
            engines = engine_pair(farm, model, adapters, root, work, ENGINE_ARGS)
            out.say("A volume of 100 MB/s and 2 ms; adapters of rank 64, 19 MB each.")
            pauses = {}
            for name, engine in engines.items():
                usual_ms, pauses[name] = pauses_beside(engine.url, COLD)
                who = "stock vLLM" if name == "stock" else "the plugin"
                out.say(
                    f"{who}: a token every {usual_ms:.0f} ms, and a pause of {pauses[name]:.0f} ms"
                    " while another adapter is loaded"
                )
                engine.kill()
            out.check("the plugin's pause is the shorter one", pauses["plugin"] < pauses["stock"])


def pauses_beside(url: str, cold: Sequence[str]) -> tuple[float, float]:
    """Stream, and ask for each of ``cold`` meanwhile.

    Returns:
        The median gap between two tokens, and the longest one beside a load, in ms: the least over ``cold``,
        since what else the machine does lengthens it.
    """
    times: list[float] = []
    tokens = SPACING_TOKENS * (len(cold) + 1)
    with httpx.Client(base_url=url, **LOCAL | {"timeout": 120}) as client:
        _complete(client, STREAMING, 2)
        stream = threading.Thread(target=_stream, args=(url, tokens, times))
        stream.start()
        begun = []
        for number, name in enumerate(cold, start=1):
            while len(times) < SPACING_TOKENS * number and stream.is_alive():
                time.sleep(0.002)
            begun.append(time.perf_counter())
            _complete(client, name, 1)
        stream.join()
    gaps = [(later, 1000 * (later - earlier)) for earlier, later in pairwise(times)]
    longest = [
        max((gap for at, gap in gaps if start < at <= end), default=0.0)
        for start, end in pairwise([*begun, float("inf")])
    ]
    return statistics.median(gap for _, gap in gaps), min(longest)


def _stream(url: str, tokens: int, times: list[float]) -> None:
    body = {**_body(STREAMING, tokens), "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, **LOCAL | {"timeout": 120}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())


def _complete(client: httpx.Client, model: str, tokens: int) -> None:
    client.post("/v1/completions", json=_body(model, tokens)).raise_for_status()


def _body(model: str, tokens: int) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
