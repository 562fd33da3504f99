"""What is told of a case: a layer's times, their ratios and intervals, the floor, and the targets missed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from figures import interval
from gpu_timing import Times
from grid import TARGETS, Case, floor_us
from plot import Row


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


def layer_times(modules: Mapping[str, Mapping[str, Any]]) -> Times:
    """A layer's time, round by round, of the ways that have all of its modules."""
    of_modules = [module["us"] for module in modules.values()]
    names = [name for name in of_modules[0] if all(name in times for times in of_modules)]
    return {
        name: [sum(parts) for parts in zip(*(times[name] for times in of_modules), strict=True)]
        for name in names
    }


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
