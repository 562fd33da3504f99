"""What goes to the device beside the product: a copy's bandwidth, a step's metadata, an adapter's weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_timing import elapsed_ms
from grid import MODELS

from lora_fs.kernels import gpu
from lora_fs.kernels.memory.arena import Arena
from lora_fs.kernels.segments import plan_segments
from lora_fs.kernels.weights.layout import Shape
from lora_fs.kernels.weights.slabs import Weights, pack_slab

COPY_BYTES = 1 << 30


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy on the device; the median of 20."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    elapsed_ms(lambda: target.copy_(source), 3)
    return (
        2e3 * COPY_BYTES / statistics.median(elapsed_ms(lambda: target.copy_(source), 1) for _ in range(20))
    )


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
        row["ours_us"] = median_us(partial(_upload, plan, slots, lengths), rounds)
        if "vllm" not in without:
            try:
                update = vllm_metadata(slots, lengths, slots_of_arena)
                row["vllm_us"] = median_us(update, max(3, rounds // 10))
            except Exception as error:
                row["vllm"] = f"not measured: {type(error).__name__}: {error}"
        found.append(row)
    return found


def _upload(plan: gpu.DevicePlan, slots: np.ndarray, lengths: np.ndarray) -> None:
    plan.upload(plan_segments(slots, lengths))


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
