"""A folder of 50 MB copied onto the volume, from the end of the copy until every sidecar lists it.

Two sidecars on a local filesystem, one folder after the other, copied by ``cp -r``.
Goal: the settle time (2 s there) and at most 1 s more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, table
from fleet import sidecars
from population import SCOPE
from stub_engine import stub_engine

from lora_fs.demo.waiting import wait_until

SETTLE_S = 2.0
HIDDEN, RANK, LAYERS, MODULES = 4096, 24, 32, ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(folder: Path, seed: int, rank: int = RANK) -> int:
    """Write an adapter as large as one for a 7B model; returns its size in bytes."""
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in MODULES:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for side, shape in (("A", (rank, HIDDEN)), ("B", (HIDDEN, rank))):
                values = numbers.standard_normal(shape, dtype=np.float32) / 100
                tensors[f"{prefix}.lora_{side}.weight"] = values.astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES)}
    config["base_model_name_or_path"] = "tiny"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return (folder / "adapter_model.safetensors").stat().st_size


def main() -> None:
    """Drop one folder after the other."""
    options = arguments(__doc__ or "", rounds=10, sidecars=2)
    with tempfile.TemporaryDirectory() as folder, stub_engine(Path(folder) / "stub.log") as engine:
        work = Path(folder)
        size = write_adapter(work / "big", 0)
        heading(f"A folder of {size / 1e6:.0f} MB dropped, {options.sidecars} sidecars")
        with sidecars(options.sidecars, work / "volume", engine, work) as running:
            took = []
            for number in range(options.rounds):
                name = f"big-{number}"
                target = work / "volume" / str(SCOPE) / "v1" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-r", str(work / "big"), str(target)], check=True)
                copied = time.monotonic()
                wait_until(
                    f"all list {name}",
                    lambda name=name: all(  # type: ignore[misc]
                        f'"{name}"' in httpx.get(f"{sidecar.url}/v1/models").text for sidecar in running
                    ),
                    timeout_s=30,
                )
                took.append(time.monotonic() - copied)
            table(
                [("copied → all list it", took), ("beyond the settle time", [t - SETTLE_S for t in took])],
                "s",
            )


if __name__ == "__main__":
    main()
