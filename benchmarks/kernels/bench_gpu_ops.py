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

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import peers
import torch
from figures import arguments, heading, origin, write_json
from gpu_summary import line, rows_of, summarize
from gpu_timing import measure
from gpu_transfers import copy_bandwidth, metadata, swap
from grid import cases, prediction_table
from plot import write_plot

PACKAGES = ("torch", "triton", "vllm", "sglang")
MOST_DRAWN = 60


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
