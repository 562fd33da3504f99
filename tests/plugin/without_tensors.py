"""A worker's manager over real tiers and real loads, and without weights: an adapter is a number of bytes."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from lora_fs.kernels.memory.host import HostMemory
from lora_fs.worker_patch.notices import Notices
from lora_fs.worker_patch.worker.load.in_place import InPlace
from lora_fs.worker_patch.worker.load.loader import Loader
from lora_fs.worker_patch.worker.load.under_way import UnderWay
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.slots.tiers import Eviction, Tiers


class Slots:
    """The model's manager, without a model."""

    asleep = False

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self._active_adapters = tiers, dict[int, None]()
        self.layers = SimpleNamespace(prepare=lambda size, room: None, give_back=lambda: None)

    def admit(self, lora: Any, size: int, **how: Any) -> None:
        self.tiers.admit(lora.id, size, **how)

    def activate_adapter(self, adapter: int) -> None:
        placed = self.tiers.place(adapter)
        if placed is not None:
            self._active_adapters.pop(placed[1] or 0, None)
        self._active_adapters[adapter] = None

    def remove_adapter(self, adapter: int) -> None:
        self.tiers.remove(adapter)
        self._active_adapters.pop(adapter, None)


def share(adapter: int, size_bytes: int) -> Any:
    """What a load brings."""
    slab = SimpleNamespace(data=torch.empty(size_bytes, dtype=torch.uint8))
    memory = HostMemory()
    return SimpleNamespace(id=adapter, slab=slab, memory=memory, loras={}, modules_to_save={}, alike=False)


class Worker(TieredWorkerManager):
    """One rank.

    Attributes:
        go: its loads wait for it.
        broken: adapter → why its load fails here.
        sizes: adapter → bytes of this rank's share, 10 if it is not said.
        loads, brought: the adapters whose load was begun, and that were sent to the device.
    """

    _adapter_manager: Any

    def __init__(
        self, budget_bytes: int = 20, *, slots: int = 2, alone: bool = True, eviction: Eviction = "lru"
    ) -> None:
        self._adapter_manager = Slots(Tiers(slots, budget_bytes, eviction=eviction))
        self.notices, self._loader = Notices(), Loader()
        self._alone, self.under_way = alone, UnderWay()
        self.named, self.failures, self._too_big = {}, {}, {}
        self.blank, self.in_place, self.counters = {}, InPlace(), defaultdict(float)
        self.go = threading.Event()
        self.go.set()
        self.broken: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self.loads: list[int] = []
        self.brought: list[int] = []

    def begin_load(self, request: LoRARequest, asked: Any) -> None:
        super().begin_load(request, asked)
        self.loads.append(request.lora_int_id)

    def _packed_bytes(self, asked: Any) -> int:
        return 10

    def _prepare(self, request: LoRARequest, *, passing: bool = False) -> Any:
        assert self.go.wait(60)
        if request.lora_int_id in self.broken:
            raise ValueError(self.broken[request.lora_int_id])
        return share(request.lora_int_id, self.sizes.get(request.lora_int_id, 10))

    def bring(self, adapter: int) -> None:
        self.brought.append(adapter)

    def rank(self, adapter: int) -> int:
        return 8

    @property
    def counted(self) -> dict[str, float]:
        return {**self.tiers.counters, **self.counters}
