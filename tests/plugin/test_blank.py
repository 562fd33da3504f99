"""A step that needs an adapter which cannot be had goes on, and what it ran is not taken for it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.notices import Notices
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.load.loader import Loader
from lora_fs.worker_patch.worker.load.under_way import UnderWay
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.slots.layers import ModelLayers
from lora_fs.worker_patch.worker.slots.tiers import Tiers

LOST, FINE = LoRARequest("lost", 7, "/gone"), LoRARequest("fine", 8, "/there")


class Models:
    """The inner manager, without a model."""

    def __init__(self) -> None:
        self.tiers = Tiers(2, 100)
        self.layers = ModelLayers(2, 8, torch.float32)
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
    found._loader, found._alone, found.under_way, found.blank = Loader(), True, UnderWay(), set()
    found.failures, found.named, found.counters = {}, {}, defaultdict(float)

    def load(request: LoRARequest) -> None:
        if request is LOST:
            raise FileNotFoundError("/gone/adapter_config.json")
        found._adapter_manager.admit(LoRAModel(request.lora_int_id, 4, {}), 10)

    monkeypatch.setattr(found, "_load_now", load)
    manager: TieredWorkerManager = found
    return manager


def test_the_step_goes_on(manager: TieredWorkerManager) -> None:
    mapping = SimpleNamespace(index_mapping=(7, 8, 0), prompt_mapping=(7, 8, 0))
    manager.set_active_adapters({LOST, FINE}, mapping)
    assert set(manager._adapter_manager.ran) == {7, 8}
    assert manager.counters["blank_runs"] == 1
    assert "/gone/adapter_config.json" in manager.failures[7]


@pytest.mark.parametrize(("failures", "ran"), [(1, [8]), (2, [])], ids=["weights", "slots"])
def test_a_slot_that_cannot_be_filled(manager: TieredWorkerManager, failures: int, ran: list[int]) -> None:
    """Its weights are let go of; where even that leaves no slot, its rows have no adapter."""
    manager._adapter_manager.failures = [MemoryError() for _ in range(failures)]
    manager.set_active_adapters({FINE}, SimpleNamespace(index_mapping=(8,), prompt_mapping=(8,)))
    assert manager._adapter_manager.ran == ran
    assert manager.counters["blank_runs"] == 1
    assert "MemoryError" in manager.failures[8]


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
def test_what_ran_blank_is_not_the_adapter(
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
