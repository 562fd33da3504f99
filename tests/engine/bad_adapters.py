"""Adapters that no engine should serve: how each is broken, and what validation calls it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BadAdapter:
    """One way to be broken.

    Attributes:
        spoil: breaks a good adapter's folder.
        finding: the code of the finding that refuses it.
        needs_base: it can only be told by looking at the base model.
    """

    spoil: Callable[[Path], None]
    finding: str
    needs_base: bool = False

    def make(self, good: Path, folder: Path) -> Path:
        """Copy ``good`` to ``folder`` and break the copy."""
        shutil.copytree(good, folder)
        self.spoil(folder)
        return folder


def _without_r(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    del config["r"]
    (folder / CONFIG).write_text(json.dumps(config))


def _configured(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def _change(folder: Path, change: Callable[[Array, int], Array]) -> None:
    """Change every tensor: given with the axis that is not its rank."""
    tensors = load_file(folder / WEIGHTS)
    changed = {name: change(array, 1 if ".lora_A." in name else 0) for name, array in tensors.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in changed.items()}, folder / WEIGHTS)


def _other_layers(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(".layers.", ".layers.7"): a for name, a in tensors.items()}, folder / WEIGHTS)


def _half_the_size(folder: Path) -> None:
    _change(folder, lambda array, axis: np.split(array, 2, axis)[0])


def _twice_the_size(folder: Path) -> None:
    _change(folder, lambda array, axis: np.repeat(array, 2, axis))


def _rank_64(folder: Path) -> None:
    _change(folder, lambda array, axis: np.repeat(array, 64 // array.shape[1 - axis], 1 - axis))
    _configured(folder, r=64)


def _not_a_number(folder: Path) -> None:
    _change(folder, lambda array, axis: np.full_like(array, np.nan))


def _fifo_config(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def overflow(folder: Path) -> None:
    """Make every weight finite and so large that a product of two is not."""
    _change(folder, lambda array, axis: array if axis else array * np.float32(1e30))


def truncate(weights: Path) -> None:
    """Cut the last tensor short."""
    os.truncate(weights, weights.stat().st_size - 100)


BAD: dict[str, BadAdapter] = {
    "fifo": BadAdapter(_fifo_config, "not-regular-file"),
    "no-r": BadAdapter(_without_r, "config-field"),
    "empty-object": BadAdapter(lambda folder: _write_config(folder, "{}"), "config-field"),
    "bad-json": BadAdapter(lambda folder: _write_config(folder, '{"r": 4'), "config-json"),
    "no-such-layers": BadAdapter(_other_layers, "no-such-module", needs_base=True),
    "half-hidden": BadAdapter(_half_the_size, "wrong-shape", needs_base=True),
    "other-rank": BadAdapter(lambda folder: _configured(folder, r=8), "rank-mismatch"),
    "nan": BadAdapter(_not_a_number, "non-finite"),
    "oversized": BadAdapter(_twice_the_size, "wrong-shape", needs_base=True),
    "truncated": BadAdapter(lambda folder: truncate(folder / WEIGHTS), "truncated"),
    "rank-too-high": BadAdapter(_rank_64, "rank-too-high"),
    "dora": BadAdapter(lambda folder: _configured(folder, use_dora=True), "dora"),
    "no-weights": BadAdapter(lambda folder: (folder / WEIGHTS).unlink(), "missing-weights"),
}


def _write_config(folder: Path, text: str) -> None:
    (folder / CONFIG).write_text(text)
