"""Slots in the device's arena: one whose filling failed is as empty as before, and who left one may stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_fs.kernels.weights.layout import Layer, Shape
from lora_fs.kernels.weights.slabs import Slab, Weights, pack_slab
from lora_fs.worker_patch.worker.slots.layers import DeviceLayers, Target

SHAPES = {"q": Shape(16, (16,))}


def of_slots(slots: int) -> DeviceLayers:
    layers = DeviceLayers(slots, 8, torch.float32, torch.device("cpu"))
    layers.targets["q"] = Target(None, SHAPES["q"], False, Layer.empty(SHAPES["q"], slots))
    layers.allocate()
    return layers


def adapter(rank: int, value: int) -> Slab:
    weights = Weights([torch.full((rank, 16), value)], [torch.full((16, rank), value)])
    return pack_slab(SHAPES, {"q": weights}, torch.float32)


class Counted(TorchDispatchMode):  # type: ignore[misc]
    """What a device would be asked to do: every operation that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(
            part in func._schema.name for part in ("slice", "narrow", "as_strided", "select", "detach")
        ):
            self.done.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_slot_is_one_row_of_a_table() -> None:
    """An adapter that was brought moves no weights in the step, nor one that was in a slot before."""
    layers = of_slots(2)
    made = [adapter(2, value) for value in range(1, 5)]  # four of rank 2 where two of rank 8 have room
    for one in made:
        layers.bring(one)
    for first, second in ((0, 1), (2, 3), (0, 1)):
        with Counted() as counted:
            layers.fill(0, made[first])
            layers.fill(1, made[second])
        assert counted.done == ["aten::copy_"] * 2
        seen = [layers.targets["q"].layer.packed[slot] for slot in range(2)]
        assert [None if one is None else one.a[0, 0].item() for one in seen] == [first + 1, second + 1]


def test_the_smallest_pool_has_room_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adapters of the largest rank, whose matrices begin at whole cache lines."""
    monkeypatch.setitem(SHAPES, "odd", Shape(7, (5, 3)))
    layers = DeviceLayers(2, 3, torch.float32, torch.device("cpu"))
    layers.targets["odd"] = Target(None, SHAPES["odd"], False, Layer.empty(SHAPES["odd"], 2))
    layers.allocate()
    largest = Weights([torch.ones(3, 7)] * 2, [torch.ones(5, 3), torch.ones(3, 3)])
    for slot in range(2):
        layers.fill(slot, pack_slab({"odd": SHAPES["odd"]}, {"odd": largest}, torch.float32))


def test_after_a_sleep_nothing_is_there() -> None:
    """It is copied again when a slot needs it."""
    layers, one = of_slots(1), adapter(2, 1)
    layers.bring(one)
    layers.restore()
    layers._arena._storage.fill_(torch.nan)
    layers.fill(0, one)
    seen = layers.targets["q"].layer.packed[0]
    assert seen is not None
    assert torch.equal(seen.a, torch.ones(2, 16))


@pytest.mark.parametrize("step", ["show", "begin", "_place"])
def test_a_slot_that_was_not_filled_can_be(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whether it had taken its room in the arena or not."""
    layers, slab = of_slots(1), adapter(4, 1)

    def fails(*_: object) -> None:
        raise MemoryError("no page-locked memory")

    with monkeypatch.context() as patch:
        patch.setattr(layers._arena, step, fails)
        with pytest.raises(MemoryError):
            layers.fill(0, slab)
    layers.fill(0, slab)
    layers.empty(0)
