"""What a step's metadata cost: which rows belong to which adapter.

From requests, as the kernels take it; from the tuple of an id a token that vLLM hands its wrapper;
and vLLM's own work on that tuple. Goal from requests: 60 µs for 256 tokens, 150 µs for 16,384.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from figures import arguments, heading
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_fs.kernels.segments import NO_SLOT, plan_segments
from lora_fs.worker_patch.worker.ops.punica import _plan

SLOTS = 8


def median_us(run: Callable[[], object], rounds: int) -> float:
    """Of one call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    """Batches of decode, of prefill, and of both."""
    options = arguments(__doc__ or "", rounds=300)
    heading("Metadata of a step")
    print("| tokens | requests | from requests µs | from vLLM's tuple µs | vLLM's own µs |")
    print("|---" * 5 + "|")
    for tokens, requests in ((1, 1), (64, 64), (256, 256), (256, 8), (2048, 64), (16384, 8), (16384, 256)):
        slots = np.random.default_rng(0).integers(NO_SLOT, SLOTS, requests)
        lengths = np.full(requests, tokens // requests)
        ids = tuple(np.repeat(slots + 1, lengths))
        of_slots = {slot + 1: slot for slot in range(SLOTS)}
        wrapper = PunicaWrapperCPU(max(tokens, 8), max(requests, 8), "cpu")
        mapping = LoRAMapping(ids, tuple(slots + 1), is_prefill=True)
        taken = (
            median_us(lambda s=slots, n=lengths: plan_segments(s, n), options.rounds),  # type: ignore[misc]
            median_us(lambda i=ids, o=of_slots: _plan(i, o), options.rounds),  # type: ignore[misc]
            median_us(
                lambda w=wrapper, m=mapping, o=of_slots: w.update_metadata(m, [*o], SLOTS + 1, 512),  # type: ignore[misc]
                max(3, options.rounds // 10),
            ),
        )
        print(f"| {tokens} | {requests} | " + " | ".join(f"{one:.0f}" for one in taken) + " |", flush=True)


if __name__ == "__main__":
    main()
