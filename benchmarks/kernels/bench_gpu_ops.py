"""A layer's LoRA product on a GPU: ours, vLLM's Triton ops, SGLang's csgmv and triton_v2.

Every way is checked against the fp64 reference first; one that fails is told and not timed. Timed are
CUDA graphs over 32 copies of a module, so that no weights stay in a cache, in turns; a layer is the sum
of its four modules. Told are the peers' times over ours, and the floor's share of ours.

``--predict`` prints what is predicted, and needs no GPU. ``--quick`` measures the rows that have
targets, else the whole grid of docs/kernels.md follows; ``--seconds`` ends that early. ``--bandwidth``,
in GB/s, is for the floor instead of what a copy on the device reaches. Results go to ``--json``, after
every case, and as a chart to ``--plot``. vLLM takes its tuned tables from VLLM_TUNED_CONFIG_FOLDER.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import gate
import numpy as np
import peers
import torch
from figures import arguments, heading, interval, origin, write_json
from grid import MODELS, TARGETS, Case, cases, floor_us, prediction_table
from plot import Row, write_plot

from lora_fs.kernels import gpu
from lora_fs.kernels.arena import Arena
from lora_fs.kernels.layout import Shape
from lora_fs.kernels.segments import plan_segments
from lora_fs.kernels.slabs import Weights, pack_slab

PACKAGES = ("torch", "triton", "vllm", "sglang")
LEAST_MS = 2.0  # of one timed stretch
COPY_BYTES = 1 << 30
MOST_DRAWN = 60

# For each way the time of one call, µs, round by round.
Times = dict[str, list[float]]


def check(work: peers.Work, call: peers.Call, *, twice: bool) -> float:
    """The worst error of the first and the last copy, in units of what is allowed.

    Args:
        twice: whether a second run has to give the same bits.
    """
    worst = 0.0
    layer, plan = work.layer(), work.plan
    for copy in {0, len(work.x) - 1}:
        before = work.y[copy].clone()
        try:
            call(copy)
            found = work.y[copy].clone()
            worst = max(worst, gate.times_tolerance(found, before, work.x[copy], layer, plan))
            if twice:
                work.y[copy].copy_(before)
                call(copy)
                worst = worst if torch.equal(work.y[copy], found) else math.inf
        finally:
            work.y[copy].copy_(before)
    return worst


def checked(
    work: peers.Work, without: dict[str, str]
) -> tuple[dict[str, peers.Call], dict[str, str], dict[str, float]]:
    """The ways that may be timed, why others may not, and the worst error of each."""
    right: dict[str, peers.Call] = {}
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name, call in peers.ways(work, without).items():
        if isinstance(call, str):
            refused[name] = call
            continue
        try:
            errors[name] = check(work, call, twice=name == "ours")
        except Exception as error:
            # A peer that breaks on a case is told; the rest is measured.
            refused[name] = f"{type(error).__name__}: {error}"
            continue
        if errors[name] <= 1:
            right[name] = call
        else:
            refused[name] = f"{errors[name]:.3g} times the tolerance"
    return right, refused, errors


def captured(call: peers.Call, copies: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """One graph of a call for each copy; warmed up on the stream that captures it."""
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for copy in range(copies):
                call(copy)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for copy in range(copies):
            call(copy)
    return graph


def elapsed_ms(run: Callable[[], object], times: int) -> float:
    """Of the device, for so many runs."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(times):
        run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def time_module(right: Mapping[str, peers.Call], copies: int, rounds: int, refused: dict[str, str]) -> Times:
    """Each way's call in µs, in turns; ``refused`` gets those that cannot be captured."""
    stream = torch.cuda.Stream()
    graphs = {}
    for name, call in right.items():
        try:
            graphs[name] = captured(call, copies, stream)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    repeats = {
        name: max(1, math.ceil(LEAST_MS / max(elapsed_ms(graph.replay, 1), 1e-3)))
        for name, graph in graphs.items()
    }
    times: Times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(sorted(graphs), len(graphs)):
            took_ms = elapsed_ms(graphs[name].replay, repeats[name])
            times[name].append(1e3 * took_ms / repeats[name] / copies)
    return times


def measure(case: Case, rounds: int, without: dict[str, str]) -> dict[str, Any]:
    """Check and time the four modules of a case."""
    device = torch.device("cuda", torch.cuda.current_device())
    modules = {}
    for module, shape in MODELS[case.model].items():
        torch.cuda.empty_cache()
        work = peers.make_work(case, shape, device, torch.bfloat16)
        right, refused, errors = checked(work, without)
        times = time_module(right, len(work.x), rounds, refused) if "ours" in right else {}
        modules[module] = {
            "copies": len(work.x),
            "us": times,
            "refused": refused,
            "worst": errors,
        }
        del work, right
    return {"case": asdict(case), "label": case.label, "modules": modules}


def layer_times(modules: Mapping[str, Mapping[str, Any]]) -> Times:
    """A layer's time, round by round, of the ways that have all of its modules."""
    of_modules = [module["us"] for module in modules.values()]
    names = [name for name in of_modules[0] if all(name in times for times in of_modules)]
    return {
        name: [sum(parts) for parts in zip(*(times[name] for times in of_modules), strict=True)]
        for name in names
    }


def summarize(result: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """Add what is told of a case: medians, ratios with their 95 % interval, the floor and its share."""
    case = Case(**result["case"])
    floor = floor_us(case, bandwidth)
    times = layer_times(result["modules"])
    told: dict[str, Any] = {"floor_us": floor, "us": {n: statistics.median(t) for n, t in times.items()}}
    if "ours" in times:
        told["floor_share"] = floor / told["us"]["ours"]
        told["ratios"] = {
            name: ratio_of(theirs, times["ours"]) for name, theirs in times.items() if name != "ours"
        }
    return {**result, "layer": told}


def ratio_of(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """The median of their time over ours, and its 95 % interval."""
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    return (statistics.median(ratios), *interval(ratios))


def line(result: Mapping[str, Any]) -> str:
    """One row of the printed table."""
    layer = result["layer"]
    if "ratios" not in layer:
        reasons = {m: r["refused"].get("ours", "") for m, r in result["modules"].items()}
        return f"| {result['label']} | {layer['floor_us']:.1f} | not timed: {reasons} | | | |"
    ratios = ", ".join(
        f"{name} {middle:.2f} ({low:.2f} to {high:.2f})"
        for name, (middle, low, high) in layer["ratios"].items()
    )
    ours = f"{layer['us']['ours']:.1f} | {layer['floor_share']:.0%}"
    return f"| {result['label']} | {layer['floor_us']:.1f} | {ours} | {ratios} | {verdict(result)} |"


def verdict(result: Mapping[str, Any]) -> str:
    """Which targets a row misses; empty where it has none. They are an H100's."""
    target = next((one for one in TARGETS if asdict(one.case) == result["case"]), None)
    if target is None:
        return ""
    layer = result["layer"]
    missed = []
    if target.most_us is not None and layer["us"]["ours"] > target.most_us:
        missed.append(f"≤ {target.most_us} µs")
    if target.floor_share is not None and layer["floor_share"] < target.floor_share:
        missed.append(f"≥ {target.floor_share:.0%} of the floor")
    for peer, least in target.ratios.items():
        if peer not in layer["ratios"]:
            missed.append(f"{peer} not compared")
        elif layer["ratios"][peer][0] < least:
            missed.append(f"{peer} ≥ {least}")
    return f"misses {', '.join(missed)}" if missed else "reached"


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What is drawn: the ratios of each case that has some."""
    return [
        Row(result["label"], {name: tuple(ratio) for name, ratio in result["layer"]["ratios"].items()})
        for result in results
        if result["layer"].get("ratios")
    ]


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy on the device; the median of 20."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    elapsed_ms(lambda: target.copy_(source), 3)
    return (
        2e3 * COPY_BYTES / statistics.median(elapsed_ms(lambda: target.copy_(source), 1) for _ in range(20))
    )


def median_us(run: Callable[[], object], rounds: int) -> float:
    """Wall time of a run and of all that it starts on the device."""
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def metadata(rounds: int, without: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a step's metadata take until they are on the device, µs.

    SGLang makes its own of its scheduler's batch, which is not at hand here: not compared.
    """
    found = []
    slots_of_arena = 8
    for tokens, requests in ((1, 1), (64, 64), (256, 256), (4096, 8), (16384, 8)):
        slots = np.arange(requests) % slots_of_arena
        lengths = np.full(requests, tokens // requests)
        plan = gpu.DevicePlan(tokens, slots_of_arena, "cuda")
        row: dict[str, Any] = {"tokens": tokens, "requests": requests}
        row["ours_us"] = median_us(lambda s=slots, n=lengths, p=plan: p.upload(plan_segments(s, n)), rounds)
        if "vllm" not in without:
            try:
                update = vllm_metadata(slots, lengths, slots_of_arena)
                row["vllm_us"] = median_us(update, max(3, rounds // 10))
            except Exception as error:
                row["vllm"] = f"not measured: {type(error).__name__}: {error}"
        found.append(row)
    return found


def vllm_metadata(slots: np.ndarray, lengths: np.ndarray, most: int) -> Callable[[], None]:
    """vLLM's own update of its wrapper, from an id a token."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    tokens = int(lengths.sum())
    ids, of_requests = tuple(np.repeat(slots + 1, lengths).tolist()), tuple((slots + 1).tolist())
    mapping = LoRAMapping(ids, of_requests, is_prefill=True)
    config = SimpleNamespace(max_loras=most, specialize_active_lora=False)
    wrapper = PunicaWrapperGPU(tokens, tokens, torch.device("cuda"), lora_config=config)
    names = list(range(1, most + 1))
    return lambda: wrapper.update_metadata(mapping, names, most + 1, 32000)


def swap(rounds: int) -> dict[str, Any]:
    """Bringing one rank-16 adapter of all of 8B's 32 layers from pinned memory to the device, µs.

    ``plain`` is one copy of as many bytes; ``by tensor`` the 448 copies and 448 fills that vLLM 0.32
    makes of them, into slots of rank 16.
    """
    shapes = {f"{layer}.{name}": s for layer in range(32) for name, s in MODELS["8B"].items()}

    def weights(shape: Shape) -> Weights:
        a = [torch.randn(16, shape.inputs).bfloat16() for _ in shape.outputs]
        return Weights(a, [torch.randn(width, 16).bfloat16() for width in shape.outputs])

    adapter = {name: weights(shape) for name, shape in shapes.items()}
    slab = pack_slab(shapes, adapter, torch.bfloat16, pinned=True)
    size = slab.data.numel() * slab.data.itemsize
    arena = Arena(shapes, 2, 2 * size, 16, torch.bfloat16, "cuda")
    target = torch.empty_like(slab.data, device="cuda")
    pinned = [one.pin_memory() for w in adapter.values() for one in (*w.a, *w.b) if one is not None]
    places = [torch.empty_like(one, device="cuda") for one in pinned]

    def load() -> None:
        arena.load(0, slab)

    def by_tensor() -> None:
        for place, one in zip(places, pinned, strict=True):
            place.zero_()
            place.copy_(one, non_blocking=True)

    times = {"plain": median_us(lambda: target.copy_(slab.data, non_blocking=True), rounds)}
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        load()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - began))
        # Not timed, and done before the next load is.
        arena.free(0)
    times["ours"] = statistics.median(taken)
    times["by tensor"] = median_us(by_tensor, max(3, rounds // 3))
    return {"bytes": size, "us": times}


def main() -> None:
    """Predict, or measure case after case."""
    options = arguments(
        __doc__ or "",
        rounds=20,
        quick=False,
        predict=False,
        seconds=0,
        bandwidth=0,
        json="",
        plot="",
    )
    if options.predict:
        print(prediction_table())
        return
    if not torch.cuda.is_available():
        print("No CUDA device here: the GPU part was not run. Its --predict says what is predicted.")
        return
    began = time.monotonic()
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    heading(f"LoRA of a layer on one {device.name}", ("lora-fs", *PACKAGES))
    without = peers.missing()
    for peer, reason in without.items():
        print(f"{peer} is not compared: {reason}")
    bandwidth = 1e9 * options.bandwidth or copy_bandwidth()
    how = "given" if options.bandwidth else "measured by a copy"
    print(f"{bandwidth / 1e12:.2f} TB/s, {how}\n")
    chosen = cases(quick=options.quick)
    results: dict[str, Any] = {
        "origin": origin(*PACKAGES),
        "device": {"name": device.name, "processors": device.multi_processor_count},
        "bandwidth": {"bytes_per_s": bandwidth, "how": how},
        "tuned_vllm": os.environ.get("VLLM_TUNED_CONFIG_FOLDER") is not None,
        "without": without,
        "metadata": metadata(options.rounds * 5, without),
        "swap": swap(options.rounds),
        "cases": [],
        "not_measured": [],
        "left": len(chosen),
    }
    print(f"metadata: {results['metadata']}\nswap: {results['swap']}\n")
    print("| case | floor µs | ours µs | of the floor | their time over ours (95 %) | targets (H100) |")
    print("|---" * 6 + "|")
    for case in chosen:
        if options.seconds and time.monotonic() - began > options.seconds:
            break
        try:
            results["cases"].append(summarize(measure(case, options.rounds, without), bandwidth))
            print(line(results["cases"][-1]), flush=True)
        except torch.cuda.OutOfMemoryError as error:
            results["not_measured"].append({"label": case.label, "reason": str(error)})
            print(f"| {case.label} | | not measured: out of memory | | | |", flush=True)
        results["left"] -= 1
        keep(results, options.json, options.plot)
    if results["left"]:
        print(f"\n{results['left']} cases of {len(chosen)} are left: {options.seconds} s are over")
    wrong = [one["label"] for one in results["cases"] if "ratios" not in one["layer"]]
    if wrong:
        sys.exit(f"ours was not timed in {len(wrong)} cases, of which the first is {wrong[0]}")


def keep(results: dict[str, Any], json: str, plot: str) -> None:
    """Write what there is so far, where that is wanted."""
    if json:
        write_json(Path(json), results)
    if plot:
        rows = rows_of(results["cases"])
        drawn = "" if len(rows) <= MOST_DRAWN else f"; the first {MOST_DRAWN} of {len(rows)} cases"
        note = f"{results['device']['name']}, commit {results['origin']['commit']}; 95 % intervals{drawn}"
        title = "LoRA of a layer on a GPU: a peer's time over ours"
        write_plot(Path(plot), title, rows[:MOST_DRAWN], note)


if __name__ == "__main__":
    main()
