"""A valid adapter of less than a kilobyte: where records are counted and no weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "tiny",
}


def make_adapter(folder: Path) -> Path:
    """Write it; returns the folder."""
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    tensors = {"lora_A": (4, 16), "lora_B": (16, 4)}
    save_file(
        {
            f"{MODULE}.{name}.weight": numbers.random(shape, dtype=np.float32)
            for name, shape in tensors.items()
        },
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder
