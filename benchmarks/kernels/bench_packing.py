"""An adapter's way from the staged file into host memory: as PEFT wrote it, or already packed.

Packing converts to the engine's type, lays the A of a layer's slices under each other and turns B on
its side. A file that is packed already needs none of it, and is read in one piece; in the engine's
type, fp32 here, it is twice as long. Same bytes first, then times, in turns, from the page cache.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from figures import arguments, heading, interval, table
from safetensors import safe_open

from lora_fs.demo.big_llama import LAYERS, make_big_adapter
from lora_fs.demo.tiny_llama import ensure_model

SLICES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def from_peft(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Read, convert, stack and turn, as the plugin's loader does."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    block = torch.empty(sum(tensor.numel() for tensor in tensors.values()), dtype=dtype)
    at = 0
    for layer in range(LAYERS):
        for names in SLICES:
            part = "mlp" if "gate_proj" in names or "down_proj" in names else "self_attn"
            prefix = f"base_model.model.model.layers.{layer}.{part}"
            for which in ("A", "B"):
                for name in names:
                    source = tensors[f"{prefix}.{name}.lora_{which}.weight"]
                    into = block[at : at + source.numel()]
                    at += source.numel()
                    if which == "A":
                        into.view(source.shape).copy_(source)
                    else:
                        into.view(source.shape[1], source.shape[0]).copy_(source.to(dtype).T)
    return block


def from_packed(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Read in one piece."""
    block = torch.empty(path.stat().st_size // dtype.itemsize, dtype=dtype)
    with path.open("rb", buffering=0) as file:
        view = memoryview(block.view(torch.uint8).numpy())
        while view:
            view = view[file.readinto(view) or len(view) :]
    return block


def main() -> None:
    """Three ways, the same numbers."""
    options = arguments(__doc__ or "", rounds=30, threads=1)
    torch.set_num_threads(options.threads)
    heading("Packing an adapter of 19 MB")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        adapter = make_big_adapter(ensure_model(work / "tiny"), work / "adapter", 0)
        peft = adapter / "adapter_model.safetensors"
        ways: dict[str, Callable[[], torch.Tensor]] = {}
        for dtype in (torch.bfloat16, torch.float32):
            packed = work / f"packed-{dtype}"
            from_peft(peft, dtype).view(torch.uint8).numpy().tofile(packed)
            ways[f"{dtype}, as PEFT wrote it"] = lambda dtype=dtype: from_peft(peft, dtype)  # type: ignore[misc]
            ways[f"{dtype}, packed"] = lambda dtype=dtype, packed=packed: from_packed(packed, dtype)  # type: ignore[misc]
            both = [way().view(torch.uint8).numpy() for name, way in ways.items() if str(dtype) in name]
            assert np.array_equal(*both)
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name in random.sample(sorted(ways), len(ways)):
                began = time.perf_counter()
                ways[name]()
                samples[name].append(1000 * (time.perf_counter() - began))
    table([*samples.items()], "ms")
    for dtype in (torch.bfloat16, torch.float32):
        pairs = zip(samples[f"{dtype}, packed"], samples[f"{dtype}, as PEFT wrote it"], strict=True)
        ratios = [packed / peft for packed, peft in pairs]
        low, high = interval(ratios)
        print(
            f"packed / as written, {dtype}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}, 95 %)"
        )


if __name__ == "__main__":
    main()
