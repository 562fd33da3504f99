"""The first request of an adapter, to its last byte: the sidecar and vLLM's own two ways.

Three real vLLMs of one model: behind a sidecar, which verifies the adapter and stages it; with
vLLM's filesystem resolver, which reads it from the folder; and with a call to the runtime load
API before the request. Each adapter's answers are compared. In turns, each adapter once a way.
``--keeps``: how many adapters each engine keeps in memory; 0: all, and nothing is ever evicted.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, interval, table

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT, SidecarReplica
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import Volume


def complete(http: httpx.Client, url: str, name: str) -> str:
    """One greedy answer."""
    request = {"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    answer = http.post(f"{url}/v1/completions", json=request).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def main() -> None:
    """Make the adapters and the three engines, then ask for every adapter once a way."""
    options = arguments(__doc__ or "", adapters=60, keeps=0)
    keeps = options.keeps or options.adapters
    heading(f"The first request of {options.adapters} adapters, of which an engine keeps {keeps}")
    more = ["--max-cpu-loras", str(keeps)]
    with tempfile.TemporaryDirectory() as folder, EngineFarm(Path(folder)) as farm:
        work = Path(folder)
        model = ensure_model(work / "tiny")
        adapters = {
            f"a{n}": make_adapter(model, work / "adapters" / f"a{n}", n) for n in range(options.adapters)
        }
        volume = Volume(work / "volume", "tiny", cwd=work)
        volume.run("init")
        for name, path in adapters.items():
            volume.run("register", name, str(path))
        bound = {"max_loaded": str(keeps)}
        replica = SidecarReplica("a", farm, model, volume, work, engine_args=more, settings=bound)
        resolving = {
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(work / "adapters"),
        }
        resolver = farm.start("resolver", model, args=more, env=resolving)
        runtime = farm.start("runtime", model, args=more)
        for process in (resolver, runtime):
            process.wait_ready()
        replica.wait_ready()
        http = httpx.Client(timeout=60)

        def by_runtime_api(name: str) -> str:
            body = {"lora_name": name, "lora_path": str(adapters[name])}
            http.post(f"{runtime.url}/v1/load_lora_adapter", json=body).raise_for_status()
            return complete(http, runtime.url, name)

        ways: dict[str, Callable[[str], str]] = {
            "sidecar": lambda name: complete(http, replica.url, name),
            "filesystem resolver": lambda name: complete(http, resolver.url, name),
            "runtime load API": by_runtime_api,
        }
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for name in adapters:
            answers = set()
            for way in random.sample(sorted(ways), len(ways)):
                started = time.perf_counter()
                answers.add(ways[way](name))
                samples[way].append(1000 * (time.perf_counter() - started))
            assert len(answers) == 1, (name, answers)
        table([*samples.items()], "ms")
        for peer in ("filesystem resolver", "runtime load API"):
            ratios = [a / b for a, b in zip(samples["sidecar"], samples[peer], strict=True)]
            low, high = interval(ratios)
            print(f"sidecar / {peer}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}, 95 %)")
        replica.close()


if __name__ == "__main__":
    main()
