"""A module's product by every way: checked against the reference, then timed as CUDA graphs, in turns.

A way that is wrong, or breaks, is told with its reason and not timed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import gate
import peers
import torch
from grid import MODELS, Case

LEAST_MS = 2.0  # of one timed stretch

# For each way the time of one call, µs, round by round.
Times = dict[str, list[float]]


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


def checked(
    work: peers.Work, without: dict[str, str]
) -> tuple[dict[str, peers.Call], dict[str, str], dict[str, float]]:
    """The ways that may be timed, why others may not, and the worst error of each in tolerances."""
    right: dict[str, peers.Call] = {}
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name, call in peers.ways(work, without).items():
        if isinstance(call, str):
            refused[name] = call
            continue
        try:
            rounds_product = name in gate.ROUND_THE_PRODUCT
            errors[name] = check(work, call, twice=name == "ours", rounds_product=rounds_product)
        except Exception as error:
            # A peer that breaks on a case is told; the rest is measured.
            refused[name] = f"{type(error).__name__}: {error}"
            continue
        if errors[name] <= 1:
            right[name] = call
        else:
            refused[name] = f"{errors[name]:.3g} times the tolerance"
    return right, refused, errors


def check(work: peers.Work, call: peers.Call, *, twice: bool, rounds_product: bool = False) -> float:
    """The worst error of the first and the last copy, in units of what is allowed.

    Args:
        twice: whether a second run has to give the same bits.
        rounds_product: see ``gate.times_tolerance``.
    """
    worst = 0.0
    layer, plan = work.layer(), work.plan
    for copy in {0, len(work.x) - 1}:
        before = work.y[copy].clone()
        try:
            call(copy)
            found = work.y[copy].clone()
            x = work.x[copy]
            error = gate.times_tolerance(found, before, x, layer, plan, rounds_product=rounds_product)
            worst = max(worst, error)
            if twice:
                work.y[copy].copy_(before)
                call(copy)
                worst = worst if torch.equal(work.y[copy], found) else math.inf
        finally:
            work.y[copy].copy_(before)
    return worst


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


def captured(
    call: peers.Call, copies: int, stream: torch.cuda.Stream, warm_ups: int = 2
) -> torch.cuda.CUDAGraph:
    """One graph of a call for each copy; warmed up on the stream that captures it."""
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
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
