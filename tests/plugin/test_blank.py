"""A step that needs an adapter which is not available goes on without it, and a later step tries again."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.notices import Notices
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.load.in_place import InPlace
from lora_fs.worker_patch.worker.load.loader import Loader
from lora_fs.worker_patch.worker.load.under_way import UnderWay
from lora_fs.worker_patch.worker.managers import STOCK, TieredWorkerManager
from lora_fs.worker_patch.worker.slots import steps
from lora_fs.worker_patch.worker.slots.tiers import NoRoom, Tiers

LOST, FINE = LoRARequest("lost", 7, "/gone"), LoRARequest("fine", 8, "/there")


class Models:
    """The inner manager, without a model."""

    asleep = False

    def __init__(self) -> None:
        self.tiers = Tiers(2, 100)
        self._active_adapters: dict[int, None] = {}
        self.ran: list[int] = []
        self.failures: list[Exception] = []  # of the next slots that are filled

    def admit(self, lora: LoRAModel, size: int) -> None:
        self.tiers.admit(lora.id, size)

    def activate_adapter(self, adapter: int) -> None:
        if self.failures:
            raise self.failures.pop()
        self.tiers.place(adapter)
        self._active_adapters[adapter] = None
        self.ran.append(adapter)

    def deactivate_adapter(self, adapter: int) -> None:
        self.tiers.vacate(adapter)
        self._active_adapters.pop(adapter, None)

    def remove_adapter(self, adapter: int) -> None:
        self.tiers.remove(adapter)
        self._active_adapters.pop(adapter, None)

    def set_adapter_mapping(self, mapping: object) -> None:
        assert mapping

    def begin_step(self) -> None: ...


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> TieredWorkerManager:
    found: Any = TieredWorkerManager.__new__(TieredWorkerManager)
    found._adapter_manager = Models()
    found.notices = Notices()
    found._loader, found._alone, found.under_way, found.blank = Loader(), True, UnderWay(), {}
    found.in_place, found.lost = InPlace(), {LOST.lora_int_id}
    found.failures, found.named, found.counters = {}, {}, defaultdict(float)

    def load(request: LoRARequest, *, needed: bool = False) -> None:
        if request.lora_int_id in found.lost:
            raise FileNotFoundError("/gone/adapter_config.json")
        found._adapter_manager.admit(LoRAModel(request.lora_int_id, 4, {}), 10)

    monkeypatch.setattr(found, "_load_now", load)
    manager: TieredWorkerManager = found
    return manager


class Clock:
    """The steps' clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(steps, "monotonic", clock)
    return clock


def test_the_step_goes_on(manager: TieredWorkerManager, caplog: pytest.LogCaptureFixture) -> None:
    mapping = SimpleNamespace(index_mapping=(7, 8, 0), prompt_mapping=(7, 8, 0))
    manager.set_active_adapters({LOST, FINE}, mapping)
    assert manager._adapter_manager.ran == [8]
    assert manager.tiers.entries.keys() == {8}, "nothing stands for an adapter that is not there"
    assert manager.counters["blank_runs"] == 1
    assert "/gone/adapter_config.json" in manager.failures[7]
    assert "/gone/adapter_config.json" in caplog.text


def test_a_slot_that_cannot_be_filled(manager: TieredWorkerManager, clock: Clock) -> None:
    """The adapter keeps its weights, its holders and its pin, and a later step gives it a slot."""
    manager.add_adapter(FINE)
    manager.tiers.pin(8)
    manager._adapter_manager.deactivate_adapter(8)
    manager._adapter_manager.ran.clear()
    manager._adapter_manager.failures = [MemoryError()]
    mapping = SimpleNamespace(index_mapping=(8,), prompt_mapping=(8,))
    for _ in range(3):
        manager.set_active_adapters({FINE}, mapping)
    assert (manager._adapter_manager.ran, manager.counters["blank_runs"]) == ([], 1)
    assert "MemoryError" in manager.failures[8]
    clock.now += steps.RETRY_S
    manager.set_active_adapters({FINE}, mapping)
    assert (manager._adapter_manager.ran, manager.counters["blank_runs"]) == ([8], 1)
    entry = manager.tiers.entries[8]
    assert (entry.size_bytes, entry.pinned, {*entry.holders}) == (10, True, {STOCK})
    assert manager.blank == {}


def test_what_vllms_own_calls_hold_stays(manager: TieredWorkerManager, clock: Clock) -> None:
    """Nothing would load it anew; the next step tries it again at once."""
    manager.add_adapter(FINE)
    manager._adapter_manager.deactivate_adapter(8)
    manager._adapter_manager.failures = [MemoryError()]
    manager.set_active_adapters({FINE}, None)
    manager.forget_blank(8)
    assert manager.tiers.entries.keys() == {8}
    manager.set_active_adapters({FINE}, None)
    assert (manager._adapter_manager.ran[-1], manager.blank) == (8, {})


def test_a_folder_that_comes_late(manager: TieredWorkerManager, clock: Clock) -> None:
    """A later step loads it. Until then each step that begins with it counts, and no step reads the files."""
    other: Any = manager
    tries, load = list[str](), manager._load_now

    def counted(request: LoRARequest, *, needed: bool) -> None:
        tries.append(request.lora_name)
        load(request, needed=needed)

    other._load_now = counted
    for _ in range(2):
        manager.set_active_adapters({LOST}, None)
        manager.set_active_adapters({FINE}, None)
    assert tries == ["lost", "fine"]
    assert manager.counters["blank_runs"] == 2
    other.lost.clear()
    clock.now += steps.RETRY_S
    manager.set_active_adapters({LOST}, None)
    assert manager._adapter_manager.ran[-1] == 7
    assert manager.counters["blank_runs"] == 2


def test_tries_take_a_tenth_of_the_time(manager: TieredWorkerManager, clock: Clock) -> None:
    """A load within a step holds up every request of the engine."""
    other: Any = manager

    def slow(request: LoRARequest, *, needed: bool) -> None:
        assert needed
        clock.now += 3
        raise OSError("slow, and then nothing")

    other._load_now = slow
    manager.set_active_adapters({LOST}, None)
    assert manager.blank[7].until == clock.now + 30


def test_vllms_own_call_takes_a_blank_adapter_for_absent(manager: TieredWorkerManager) -> None:
    """It loads the adapter, or says why not; it never says True without the weights."""
    other: Any = manager
    manager.set_active_adapters({LOST}, None)
    with pytest.raises(FileNotFoundError):
        manager.add_adapter(LOST)
    other.lost.clear()
    assert manager.add_adapter(LOST)
    assert (manager.blank, manager._adapter_manager.ran) == ({}, [7])


def test_an_adapter_that_lost_its_slot_within_the_step(
    manager: TieredWorkerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other may take it; if one does, that is a blank run as any other."""
    models: Any = manager._adapter_manager
    place = models.activate_adapter

    def takes_anothers(adapter: int) -> None:
        models._active_adapters.clear()
        place(adapter)

    monkeypatch.setattr(models, "activate_adapter", takes_anothers)
    manager.set_active_adapters({FINE, LoRARequest("other", 9, "/there")}, None)
    assert manager.counters["blank_runs"] == 1
    [lost] = manager.blank
    assert manager.failures[lost] == repr(NoRoom("another adapter of the same step has its slot"))


def test_an_adapter_that_only_the_mapping_names(manager: TieredWorkerManager) -> None:
    """As when two adapters of one name were one in the set of requests."""
    mapping = SimpleNamespace(index_mapping=(7,), prompt_mapping=(7,))
    manager.set_active_adapters(set(), mapping)
    assert manager.counters["blank_runs"] == 1


def test_a_step_begins_where_its_adapters_are_others(manager: TieredWorkerManager) -> None:
    """Also where all of them are in slots already; one like the step before begins nothing."""
    other = LoRARequest("other", 9, "/there")
    for requests, begun in (({FINE, other}, {8, 9}), ({FINE}, {8}), ({FINE}, set())):
        manager._adapter_manager.ran.clear()
        manager.set_active_adapters(requests, None)
        assert set(manager._adapter_manager.ran) == begun
        assert manager.tiers.step == {request.lora_int_id for request in requests}


@pytest.mark.parametrize("call", ["hold", "load"])
def test_the_gate_loads_what_ran_blank_anew(
    manager: TieredWorkerManager, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.set_active_adapters({LOST}, None)
    begun = []

    def begin(request: LoRARequest, ask: Any) -> None:
        begun.append(request.lora_int_id)
        manager.under_way.begin(request.lora_int_id, ask)

    monkeypatch.setattr(manager, "begin_load", begin)
    ask = {"id": 7, "user": "api", "sequence": 1, "name": "lost", "path": "/gone", "again": True, "wait_s": 0}
    answer = rpc.CALLS[call](manager, ask)
    expected: dict[str, Any] = {"held": False}
    if call == "load":
        told = {"load": "api 1", "from": manager.notices.name}
        expected = {"state": "loading", "reason": "", **told, "notifies": False}
    assert answer == expected
    assert begun == ([] if call == "hold" else [7])


def test_why_a_step_ran_blank_fails_no_load(
    manager: TieredWorkerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two API servers load it; a request of one finds its slot not filled, and the other asks again."""
    manager.add_adapter(FINE)
    manager.tiers.entries[8].holders.clear()
    manager._adapter_manager.deactivate_adapter(8)
    manager._adapter_manager.failures = [MemoryError()]
    manager.set_active_adapters({FINE}, None)
    assert rpc.hold(manager, {"id": 8, "user": "api-0", "sequence": 1}) == {"held": False}
    monkeypatch.setattr(manager, "begin_load", lambda request, ask: manager.under_way.begin(8, ask))
    ask = {"id": 8, "user": "api-1", "sequence": 2, "name": "fine", "path": "/p", "again": False, "wait_s": 0}
    assert rpc.load(manager, ask)["state"] == "loading"
