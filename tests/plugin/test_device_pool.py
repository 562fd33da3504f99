"""More adapters on the device than there are slots, while they fit: who stays, and what a slot costs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from vllm.lora.lora_model import LoRAModel

from lora_fs.kernels.memory.arena import Arena
from lora_fs.worker_patch.notices import Notices
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.load.resident import size_bytes
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.models import TieredModelManager
from lora_fs.worker_patch.worker.slots.layers import DeviceLayers
from tests.plugin.block import SLOTS, Make, adapter, packed
from tests.plugin.test_device_slots import Counted

MANY = 3 * SLOTS


@pytest.fixture
def pool(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TieredModelManager]:
    """``pool(adapters)``: a manager with our kernels and ``MANY`` adapters in host memory."""

    def made(room: float | None = None, **settings: str) -> TieredModelManager:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        manager = make("triton")
        manager.tiers.budget_bytes = 1 << 30
        for number in range(1, MANY + 1):
            resident = packed(manager, adapter(number))
            manager.admit(resident, size_bytes(resident))
        if room is not None:  # smaller than any engine's would be, where these adapters are small
            of_one = manager._registered_adapters[1].slab.data.numel()
            arena(manager)._extents.size = int(room * of_one)
        return manager

    return made


def arena(manager: TieredModelManager) -> Arena:
    assert isinstance(manager.layers, DeviceLayers)
    return manager.layers._arena


def step(manager: TieredModelManager, *adapters: int) -> None:
    """As the worker's manager does."""
    manager.tiers.begin_step(adapters)
    for one in adapters:
        manager.activate_adapter(one)


def test_they_stay_beyond_the_slots(pool: Callable[..., TieredModelManager]) -> None:
    """Who was used once needs no copy again: its slot is one row of a table, and counted as a hit."""
    manager = pool()
    for number in range(1, MANY + 1):
        step(manager, number)
    assert manager.tiers.device == set(range(1, MANY + 1))
    moved, misses = manager.counters["gpu_load_bytes"], manager.tiers.counters["gpu_misses"]
    assert moved == sum(entry.size_bytes for entry in manager.tiers.entries.values())
    for number in range(1, MANY + 1):
        with Counted() as counted:
            step(manager, number)
        assert counted.done == ["aten::copy_"]  # the row
    assert manager.counters["gpu_load_bytes"] == moved
    assert manager.tiers.counters["gpu_misses"] == misses
    assert manager.counters["gpu_loads"] == 2 * MANY


def test_residency_says_gpu_beside_the_slots_too(pool: Callable[..., TieredModelManager]) -> None:
    """And ``cpu`` of who is in host memory alone."""
    manager = pool(room=SLOTS + 1)
    found = TieredWorkerManager.__new__(TieredWorkerManager)
    found._adapter_manager = manager
    for number in range(1, SLOTS + 2):
        step(manager, number)
    asked = SimpleNamespace(
        end_unmeant=lambda user, meant, sequence: None,
        collect=lambda: None,
        tiers=manager.tiers,
        named={},
        rank=lambda number: 4,
        blank={},
        counted={},
        notices=Notices(),
    )
    resident = rpc.sync(asked, {"policies": {}, "user": "api", "holds": [], "sequence": 1})["resident"]  # type: ignore[arg-type]
    assert {number for number, one in resident.items() if one["level"] == "gpu"} == {
        str(number) for number in range(1, SLOTS + 2)
    }
    assert resident[str(MANY)]["level"] == "cpu"


@pytest.mark.parametrize(("eviction", "gone"), [("lru", {2}), ("fifo", {1})])
def test_the_first_to_go_is_by_the_setting(
    pool: Callable[..., TieredModelManager], eviction: str, gone: set[int]
) -> None:
    """Least recently used, or first to come."""
    manager = pool(room=SLOTS, LORA_FS_EVICTION=eviction)
    for number in (1, 2, 3, 1, 4):
        step(manager, number)
    assert {1, 2, 3, 4} - manager.tiers.device == gone


def test_a_pin_and_a_priority_stay(pool: Callable[..., TieredModelManager]) -> None:
    """While anybody else may go."""
    manager = pool(room=SLOTS)
    manager.tiers.prefer({1: (0, True), 2: (9, False)})
    for number in range(1, MANY + 1):
        step(manager, number)
    assert manager.tiers.device == {1, 2, MANY}


def test_a_hold_makes_nobody_go_who_is_held(pool: Callable[..., TieredModelManager]) -> None:
    """Its adapter is copied by the step then; an idle one goes at once, and leaves its slot."""
    manager = pool(room=SLOTS)
    for number in range(1, SLOTS + 1):
        step(manager, number)
        manager.tiers.hold(number, "api", number)
    manager.bring(SLOTS + 1)
    assert manager.tiers.device == set(range(1, SLOTS + 1))
    manager.tiers.keep_holds("api", set(range(2, SLOTS + 1)), MANY)
    manager.bring(SLOTS + 1)
    assert manager.tiers.device == set(range(2, SLOTS + 2))
    assert 1 not in manager.tiers.slots
    with Counted() as counted:
        step(manager, SLOTS + 1)
    assert counted.done == ["aten::copy_"]


def test_a_pool_too_small_for_a_step_is_refused(pool: Callable[..., TieredModelManager]) -> None:
    """At the start, with the number that would do."""
    with pytest.raises(ValueError, match=r"LORA_FS_DEVICE_BYTES is 1000, and 3 adapters .* take (\d+)"):
        pool(LORA_FS_DEVICE_BYTES="1000")


def test_the_pool_is_as_large_as_is_said(pool: Callable[..., TieredModelManager]) -> None:
    """Else as large as vLLM's padded stacks, which the smallest pool is."""
    size = arena(pool())._storage.nbytes
    for times in (1, 4):
        assert arena(pool(LORA_FS_DEVICE_BYTES=str(times * size)))._storage.nbytes == times * size


def test_an_adapter_that_is_removed_leaves_the_device(pool: Callable[..., TieredModelManager]) -> None:
    """With its slot; and after a sleep nobody is there."""
    manager = pool()
    step(manager, 1)
    free = arena(manager)._extents.free
    manager.remove_adapter(1)
    assert manager.tiers.device == set()
    assert arena(manager)._extents.free > free
    step(manager, 2)
    manager.remove_all_adapters()
    assert manager.tiers.device == set()
    step(manager, 2)
    assert manager.tiers.device == {2}


def test_new_weights_take_the_place_of_the_old_ones(pool: Callable[..., TieredModelManager]) -> None:
    """As of an adapter that is loaded in place: the old ones leave the device, and their slot."""
    manager = pool()
    step(manager, 1)
    free, again = arena(manager)._extents.free, packed(manager, adapter(1))
    manager.admit(again, size_bytes(again))
    assert arena(manager)._extents.free > free
    assert not manager._active_adapters
    step(manager, 1)
    assert arena(manager)._extents.free == free


def test_adapters_of_a_step_do_not_drive_each_other_out(pool: Callable[..., TieredModelManager]) -> None:
    """Each has its weights on the device when the step runs."""
    manager = pool(room=SLOTS)
    for first in range(1, MANY - SLOTS + 2):
        batch = tuple(range(first, first + SLOTS))
        step(manager, *batch)
        assert manager.tiers.device == set(batch) == set(manager.tiers.slots)


def test_the_adapters_are_told_apart(pool: Callable[..., TieredModelManager]) -> None:
    """Each slot's weights are its adapter's, whoever was there before."""
    manager = pool(room=SLOTS + 1.5)
    for number in (*range(1, MANY + 1), 2, 5, 1):
        step(manager, number)
        slot = manager.tiers.slots.index(number)
        wanted: LoRAModel = adapter(number)
        found = manager.layers.targets["o_proj"].layer.packed[slot]
        assert found is not None
        assert found.a.equal(wanted.loras["o_proj"].lora_a)
