"""Slots in the device's arena: one whose filling failed is as empty as before."""

from __future__ import annotations

import pytest
import torch

from lora_fs.kernels.layout import Layer, Shape
from lora_fs.kernels.slabs import Weights, pack_slab
from lora_fs.worker_patch.worker.layers import DeviceLayers, Target

SHAPES = {"q": Shape(16, (16,))}


@pytest.mark.parametrize("step", ["_publish", "begin"])
def test_a_slot_that_was_not_filled_can_be(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whether it had taken its room in the arena or not."""
    layers = DeviceLayers(1, 8, torch.float32, torch.device("cpu"))
    layers.targets["q"] = Target(None, SHAPES["q"], False, Layer.empty(SHAPES["q"], 1))
    layers.allocate()
    weights = Weights([torch.ones(4, 16)], [torch.ones(16, 4)])
    slab = pack_slab(SHAPES, {"q": weights}, torch.float32)

    def fails(*_: object) -> None:
        raise MemoryError("no page-locked memory")

    with monkeypatch.context() as patch:
        patch.setattr(layers._arena, step, fails)
        with pytest.raises(MemoryError):
            layers.fill(0, slab)
    layers.fill(0, slab)
    layers.empty(0)
