"""Which configurations are fast on this GPU, of every target's modules.

First those shipped with each size changed alone; then the changes that helped, together. A candidate is
timed as CUDA graphs over copies of the module, as in ``bench_gpu_ops``, once its result is near that of the
first. Processes compile all of them before. Results go to ``--json``, after every module; ``--seconds`` ends
it early. ``--only 0,2`` is the first and the third target. Needs a GPU.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import peers
import torch
from figures import arguments, origin, write_json
from gpu_timing import captured, elapsed_ms
from grid import MODELS, TARGETS, Case, slots_of
from peers import Configs

from lora_fs.kernels.gpu import launch, shared_bytes
from lora_fs.kernels.gpu.configs import configs_for
from lora_fs.kernels.gpu.plan import tile_rows
from lora_fs.kernels.segments import NO_SLOT, plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape
from lora_fs.kernels.weights.tables import tables_of

SHRINK: dict[str, tuple[Any, ...]] = {
    "ranks": (16, 32, 64, 128),
    "inputs": (32, 64, 128, 256, 512),
    "warps": (2, 4, 8),
    "stages": (2, 3, 4, 5),
    "most_splits": (1, 2, 4, 8, 16, 32),
}
EXPAND: dict[str, tuple[Any, ...]] = {
    "ranks": (16, 32, 64, 128),
    "columns": (32, 64, 128, 256),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4),
}
# Sizes of the two halves, by name.
Change = tuple[dict[str, Any], dict[str, Any]]
WAVES = (1, 2, 3, 4, 6, 8, 12)
ROWS = (16, 32, 64, 128)


def shipped(case: Case, shape: Shape, processors: int, shared: int) -> Configs:
    """What a step of this case launches, on a GPU of so many processors and bytes of shared memory."""
    plan = plan_rows(slots_of(case))
    capacity = case.max_rank * len(shape.outputs)
    return configs_for(shape, tile_rows(plan, case.tokens), capacity, torch.bfloat16, processors, shared)


def candidates(base: Configs, processors: int, *, tiles: bool) -> Iterator[tuple[str, Change]]:
    """What to change alone, and a name that says it.

    Args:
        tiles: whether a plan may have other tiles.
    """
    shrink, expand = base
    for name, values in SHRINK.items():
        for value in values:
            yield f"shrink.{name}={value}", ({name: value}, {})
    for name, values in EXPAND.items():
        for value in values:
            yield f"expand.{name}={value}", ({}, {name: value})
    for waves in WAVES:
        yield f"shrink.waves={waves}", ({"programs": waves * processors}, {})
        yield f"expand.waves={waves}", ({}, {"programs": waves * processors})
    for rows in ROWS:
        if rows <= shrink.rows:
            yield f"expand.rows={rows}", ({}, {"rows": rows})
        if tiles:
            yield f"tile.rows={rows}", ({"rows": rows}, {"rows": min(64, rows)})


def changed(base: Configs, change: Change) -> Configs:
    """Both halves with some of their sizes changed."""
    return replace(base[0], **change[0]), replace(base[1], **change[1])


def first_round(case: Case, shape: Shape, processors: int, shared: int) -> dict[str, Configs]:
    """What is shipped; that launched early; and each size of that changed alone."""
    plain = shipped(case, shape, processors, shared)
    plain = changed(plain, ({"early": False}, {"early": False}))
    base = changed(plain, ({"early": True}, {"early": True}))
    found = {"plain": plain, "expand early": changed(plain, ({}, {"early": True})), "base": base}
    for name, change in candidates(base, processors, tiles=case.tokens > 512):
        configs = changed(base, change)
        if configs not in found.values():
            found[name] = configs
    return found


def second_round(found: dict[str, Configs], us: dict[str, Any], processors: int) -> dict[str, Configs]:
    """The changes that helped most, added one after the other: a size each."""
    base = found["base"]
    every = dict(candidates(base, processors, tiles=True))
    best: dict[str, tuple[float, str]] = {}
    for name, took in us.items():
        size = name.split("=")[0]
        if name in every and isinstance(took, float) and took < 0.99 * us["base"]:
            best[size] = min(best.get(size, (took, name)), (took, name))
    added, configs = {}, base
    for number, (_, name) in enumerate(sorted(best.values())):
        configs = changed(configs, every[name])
        if number:
            added[f"{number + 1}: and {name}"] = configs
    return dict(list(added.items())[:6])


def chosen(only: str) -> list[tuple[Case, str]]:
    """The modules of the targets: all of them, or of those that ``only`` numbers."""
    which = [int(number) for number in only.split(",")] if only else range(len(TARGETS))
    return [(TARGETS[number].case, module) for number in which for module in MODELS["8B"]]


@dataclass(slots=True)
class Module:
    """A module of a case, and what is tried of it."""

    case: Case
    name: str
    shape: Shape
    found: dict[str, Configs]


def compile_all(jobs: list[tuple[Case, str, Configs]]) -> int:
    """Launch each once, in a process whose compiled kernels the next one finds; how many failed."""
    failed = 0
    for case, module, configs in jobs:
        small = replace(case, tokens=min(case.tokens, 256))
        shape = MODELS[case.model][module]
        try:
            work = peers.make_work(small, shape, torch.device("cuda"), torch.bfloat16, copies=1)
            peers.ours(work, peers.in_arena(work), peers.plan_of(work, configs[0].rows), configs)(0)
            torch.cuda.synchronize()
        except Exception:
            # What it fails with comes up again when it is timed, and is kept there.
            failed += 1
    return failed


def parts(work: peers.Work, layers: list[Layer], base: Configs) -> Iterator[tuple[str, peers.Call]]:
    """What of a call is the launches, and what the shrink."""
    bare = replace(work, slots=np.full_like(work.slots, NO_SLOT))
    nobody, plan = peers.plan_of(bare, base[0].rows), peers.plan_of(work, base[0].rows)
    for early in (False, True):
        configs = changed(base, ({"early": early}, {"early": early}))
        yield f"no rows, early={early}", peers.ours(bare, layers, nobody, configs)
    plain = replace(base[0], early=False)

    def shrink(copy: int) -> None:
        layer = layers[copy]
        launch.shrink_planes(work.x[copy], layer.shape, tables_of(layer), plan, plain, next_early=False)

    yield "shrink alone", shrink


def time_module(
    case: Case, shape: Shape, found: dict[str, Configs], rounds: int, *, apart: bool
) -> dict[str, Any]:
    """µs of a call with each; or why there is none.

    Args:
        apart: time the parts of a call, too.
    """
    work = peers.make_work(case, shape, torch.device("cuda"), torch.bfloat16)
    layers, stream = peers.in_arena(work), torch.cuda.Stream()
    # A graph reads its call's plan: all of them are kept.
    plans = {rows: peers.plan_of(work, rows) for rows in {configs[0].rows for configs in found.values()}}
    calls = dict(parts(work, layers, found["base"])) if apart else {}
    graphs = {name: captured(call, len(work.x), stream) for name, call in calls.items()}
    before, wanted, told = work.y[0].clone(), None, {}
    for name, configs in found.items():
        try:
            call = peers.ours(work, layers, plans[configs[0].rows], configs)
            work.y[0].copy_(before)
            call(0)
            got = work.y[0].clone()
            wanted = got if wanted is None else wanted
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.05)
            graphs[name] = captured(call, len(work.x), stream, warm_ups=0)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {str(error)[:200]}"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    repeats = {
        name: max(1, math.ceil(1.0 / max(elapsed_ms(graph.replay, 1), 1e-3)))
        for name, graph in graphs.items()
    }
    for _ in range(rounds):
        for name, graph in graphs.items():
            took = elapsed_ms(graph.replay, repeats[name])
            times[name].append(1e3 * took / repeats[name] / len(work.x))
    return {**told, **{name: statistics.median(of) for name, of in times.items()}}


def main() -> None:
    """Compile, then time module after module, twice."""
    options = arguments(__doc__ or "", only="", rounds=5, processes=14, seconds=0, json="tune.json")
    began = time.monotonic()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shared = shared_bytes(torch.device("cuda"))
    modules = []
    for case, name in chosen(options.only):
        shape = MODELS[case.model][name]
        modules.append(Module(case, name, shape, first_round(case, shape, processors, shared)))
    results: dict[str, Any] = {"origin": origin("torch", "triton"), "modules": []}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number in (1, 2):
            jobs = [(one.case, one.name, configs) for one in modules for configs in one.found.values()]
            shares = [jobs[first :: 4 * options.processes] for first in range(4 * options.processes)]
            failed = sum(pool.map(compile_all, shares, chunksize=1))
            took = time.monotonic() - began
            print(f"round {number}: {len(jobs)} candidates, {failed} failed, after {took:.0f} s", flush=True)
            for one in modules:
                if options.seconds and time.monotonic() - began > options.seconds:
                    print(f"left: {one.case.label} {one.name}")
                    continue
                torch.cuda.empty_cache()
                us = time_module(one.case, one.shape, one.found, options.rounds, apart=number == 1)
                results["modules"].append(
                    {
                        "case": one.case.label,
                        "module": one.name,
                        "configs": {name: [asdict(half) for half in of] for name, of in one.found.items()},
                        "us": us,
                    }
                )
                print(summary(one, us), flush=True)
                write_json(Path(options.json), results)
                base = {"base": one.found["base"]}
                one.found = base | second_round(one.found, us, processors) if number == 1 else base
            modules = [one for one in modules if len(one.found) > 1]


def summary(module: Module, us: dict[str, Any]) -> str:
    """One line: those that are not sizes changed alone, then the fastest."""
    timed = sorted((took, name) for name, took in us.items() if isinstance(took, float))
    told = [f"{name} {took:.2f}" for took, name in timed if "=" not in name or name.startswith("no rows")]
    fastest = [f"{name} {took:.2f}" for took, name in timed[:6]]
    return f"{module.case.label} {module.name}: {', '.join(told)}; fastest {', '.join(fastest)}"


if __name__ == "__main__":
    main()
