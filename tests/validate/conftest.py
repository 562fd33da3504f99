"""Adapters on the disk: a good one, and what it takes to break it in one place."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

RANK, HIDDEN, KV = 4, 32, 16
BASE_CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "int8": "I8", "uint16": "BF16"}

Array = npt.NDArray[Any]


def tensor_name(module: str, part: str) -> str:
    """Name a tensor the way PEFT does."""
    return f"base_model.model.{module}.{part}.weight"


def good_config() -> dict[str, Any]:
    """Make the config of a plain LoRA."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": "acme/tiny-llama",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }


def good_tensors() -> dict[str, Array]:
    """Make the tensors that belong to ``good_config``; no element is zero."""
    draw = np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    for layer in range(2):
        for module, width in (("q_proj", HIDDEN), ("v_proj", KV)):
            name = f"model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (width, RANK))):
                values = draw.uniform(0.1, 1.0, shape).astype(np.float32)
                tensors[tensor_name(name, part)] = values
    return tensors


def safetensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """Encode tensors by hand; an array of uint16 is written as BF16, which numpy lacks."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    return raw_safetensors(header, b"".join(values.tobytes() for values in tensors.values()))


def raw_safetensors(header: object, data: bytes) -> bytes:
    """Join a header, right or wrong, and the bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@dataclass
class Draft:
    """An adapter about to be written: change what the case is about, then ``write``."""

    folder: Path
    config: dict[str, Any] = field(default_factory=good_config)
    tensors: dict[str, Array] = field(default_factory=good_tensors)

    def write(self) -> Path:
        """Write both files and return the folder."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / CONFIG_FILE).write_text(json.dumps(self.config))
        (self.folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(self.tensors))
        return self.folder


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """A good adapter, not written yet."""
    return Draft(tmp_path / "adapter")


@pytest.fixture
def adapter(draft: Draft) -> Path:
    """A good adapter's folder."""
    return draft.write()


Change = Callable[[Draft], None]
