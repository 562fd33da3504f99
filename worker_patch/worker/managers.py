"""vLLM's two adapter managers, with ``tiers`` deciding who stays and ``loader`` doing the reading.

Put in place of ``LRUCacheWorkerLoRAManager`` (see ``hooks``). vLLM's own calls keep working: what
they load is read at once, and stays until they remove it. A step that needs an adapter which
cannot be had runs it blank and says so; it never raises, since that would end the engine.
Source: vllm/lora/worker_manager.py, model_manager.py, 0.32.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from vllm.lora.layers import ClassificationHeadWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_fs.sidecar.settings import load_settings
from lora_fs.worker_patch.worker.fits import check_fits
from lora_fs.worker_patch.worker.layers import DeviceLayers, ModelLayers, Ready
from lora_fs.worker_patch.worker.loader import Done, Loader
from lora_fs.worker_patch.worker.punica import Planned
from lora_fs.worker_patch.worker.tiers import NoRoom, Tiers

logger = logging.getLogger(__name__)

FAILURES_KEPT = 256
_UNBOUNDED = 1 << 40  # adapters: the tiers' budget bounds them, in bytes
STOCK = "vllm"  # who uses what came by vLLM's own calls


class Resident(LoRAModel):  # type: ignore[misc]
    """An adapter in the host tier.

    Attributes:
        ready: its weights for the layers that were taken over; ``loras`` has the rest.
    """

    def __init__(self, adapter: LoRAModel, ready: Ready) -> None:
        taken = ready.slab.places
        rest = {name: weights for name, weights in adapter.loras.items() if name not in taken}
        super().__init__(
            adapter.id, adapter.rank, rest, adapter.is_3d_lora_weight, modules_to_save=adapter.modules_to_save
        )
        self.ready = ready


class AsOnDisk(LoRAModel):  # type: ignore[misc]
    """vLLM's reader, without its conversions: packing does them, together with its copy."""

    @classmethod
    def from_lora_tensors(cls, *args: Any, **kwargs: Any) -> LoRAModel:
        return super().from_lora_tensors(*args, **{**kwargs, "dtype": None})


class TieredModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """Slots and host tier; every change of either goes through ``tiers``."""

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=vllm_config, **kwargs)
        self.lora_index_to_id: list[int | None]
        parallel = vllm_config.parallel_config
        self._whole_model = parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel
        self.tiers = Tiers(self.lora_slots, load_settings().host_bytes)
        self.layers.allocate()
        for target in self.layers.targets.values():
            target.module.set_mapping(target.module.punica_wrapper.bind(target))
        for wrapper in self.punica_wrapper_mapping.values():
            wrapper.theirs = len(self.layers.targets) < len(self.modules)

    def _init_punica_wrapper(self, *args: Any) -> None:
        super()._init_punica_wrapper(*args)
        config = self.lora_config
        self.layers = ModelLayers(self.lora_slots, config.max_lora_rank, config.lora_dtype)
        if load_settings().kernels == "triton":
            self.layers = DeviceLayers(self.lora_slots, config.max_lora_rank, config.lora_dtype, self.device)
        self._ours = all(isinstance(one, Planned) for one in self.punica_wrapper_mapping.values())

    def register_module(self, module_name: str, module: Any) -> None:
        super().register_module(module_name, module)
        if self._ours:
            self.layers.take_over(module_name, module)

    def pack(self, adapter: LoRAModel) -> Resident:
        """Make an adapter ready for slots; touches nothing of the manager, so that any thread may.

        Raises:
            DoesNotFit, ShapeError: it is not one for this model.
        """
        scales = {}
        for name in self.layers.targets:
            parts = [
                adapter.loras[part] for part in self.packed_modules.get(name, [name]) if part in adapter.loras
            ]
            if len({part.scaling for part in parts}) == 1:
                scales[name] = parts[0].scaling
                for part in parts:
                    part.scaling = 1
        self._create_merged_loras_inplace(adapter)
        check_fits(self, adapter, whole_model=self._whole_model)
        found = {name: self._get_lora_layer_weights(adapter, name) for name in self.layers.targets}
        return Resident(adapter, self.layers.pack({n: w for n, w in found.items() if w is not None}, scales))

    @property
    def capacity(self) -> int:
        return _UNBOUNDED

    def add_adapter(self, lora: LoRAModel) -> bool:
        """Pack and admit: vLLM's warm-up adapters come this way."""
        if lora.id in self._registered_adapters:
            return False
        resident = self.pack(lora)
        self.admit(resident, size_bytes(resident))
        return True

    def admit(self, lora: Resident, size: int, *, priority: int = 0, pinned: bool = False) -> None:
        """Take a packed adapter into the host tier.

        Raises:
            NoRoom: nobody was evicted.
        """
        for victim in self.tiers.admit(lora.id, size, priority=priority, pinned=pinned):
            self._forget(victim)
        self._registered_adapters[lora.id] = lora

    def activate_adapter(self, lora_id: int) -> bool:
        """Copy host → slot.

        Raises:
            NoRoom: every slot is in use. Any error of the copy leaves the slot empty.
        """
        placed = self.tiers.place(lora_id)
        if placed is None:
            return False
        index, victim = placed
        if victim is not None:
            super().deactivate_adapter(victim)
        try:
            self._fill(index, self._registered_adapters[lora_id])
            self._active_adapters[lora_id] = None
        except Exception:
            self.tiers.vacate(lora_id)
            raise
        finally:
            self.lora_index_to_id = list(self.tiers.slots)
        return True

    def _fill(self, index: int, adapter: Resident) -> None:
        """Let a slot mean an adapter: ours by reference, what stayed vLLM's by its own copies."""
        self.layers.fill(index, adapter.ready)
        for name, module in self.modules.items():
            if name in self.layers.targets:
                continue
            if isinstance(module, ClassificationHeadWithLoRA):
                full = self._get_module_to_save_weights(adapter, name)
                if full is None:
                    module.reset_module_to_save(index)
                else:
                    module.set_module_to_save(index, full.weight, full.bias)
            weights = self._get_lora_layer_weights(adapter, name)
            if weights:
                module.set_lora(index, weights.lora_a, weights.lora_b)
            else:
                module.reset_lora(index)

    def deactivate_adapter(self, adapter_id: int) -> bool:
        self.tiers.vacate(adapter_id)
        return bool(super().deactivate_adapter(adapter_id))

    def remove_adapter(self, adapter_id: int) -> bool:
        self.tiers.remove(adapter_id)
        return self._forget(adapter_id)

    def _deactivate_adapter(self, lora_id: int) -> None:
        if lora_id in self.lora_index_to_id:
            self.layers.empty(self.lora_index_to_id.index(lora_id))
        super()._deactivate_adapter(lora_id)

    def remove_all_adapters(self) -> None:
        self.tiers.clear()
        for slot in range(self.lora_slots):
            self.layers.empty(slot)
        super().remove_all_adapters()

    def pin_adapter(self, lora_id: int) -> bool:
        """Keep it in the host tier and in a slot. Raises NoRoom: one slot stays free for the rest."""
        self.tiers.pin(lora_id)
        self.activate_adapter(lora_id)
        return True

    def _forget(self, adapter_id: int) -> bool:
        return bool(super().remove_adapter(adapter_id))


class TieredWorkerManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """What the model runner calls in every step, and what ``rpc`` calls between them.

    Attributes:
        failures: adapter → why its last load failed, the latest ``FAILURES_KEPT``.
        counters: seconds and bytes of loads, blank runs.
    """

    _manager_cls = TieredModelManager
    _adapter_manager: TieredModelManager

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._lora_model_cls = AsOnDisk
        self._loader: Loader[Resident] = Loader()
        self._wanted: dict[int, Mapping[str, Any]] = {}
        self.named: dict[int, tuple[str, str]] = {}  # adapter → its name and path
        self.failures: dict[int, str] = {}
        self._blank: set[int] = set()
        self.counters: defaultdict[str, float] = defaultdict(float)

    @property
    def tiers(self) -> Tiers:
        return self._adapter_manager.tiers

    # -- what the step does ----------------------------------------------------------------------

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        ids = {request.lora_int_id for request in requests if request}
        if mapping is not None:
            # Requests are compared by name: two adapters of one name would be one in ``requests``.
            ids.update(mapping.index_mapping, mapping.prompt_mapping)
            ids.discard(0)
        if ids != self.tiers.step or not ids <= self._adapter_manager._active_adapters.keys():
            self._activate({int(adapter) for adapter in ids}, requests)
        if mapping is not None:
            self._adapter_manager.set_adapter_mapping(mapping)

    def _activate(self, ids: set[int], requests: set[Any]) -> None:
        needed = {request.lora_int_id: request for request in requests if request}
        self.tiers.begin_step(ids)
        for adapter in ids:
            try:
                if adapter not in self.tiers.entries:
                    self._load_now(needed[adapter])
                self._adapter_manager.activate_adapter(adapter)
            except Exception as error:
                self._run_blank(adapter, error)

    def _run_blank(self, adapter: int, error: Exception) -> None:
        """Let the step go on without the adapter's weights: it is this request's loss, not everybody's."""
        logger.error("adapter %d cannot be had, and runs without its weights: %r", adapter, error)
        self.counters["blank_runs"] += 1
        self._fail(adapter, repr(error))
        try:
            self.remove_adapter(adapter)
            blank = Resident(LoRAModel(adapter, 1, {}), self._adapter_manager.layers.pack({}, {}))
            self._adapter_manager.admit(blank, 0)
            self._blank.add(adapter)
            self._adapter_manager.activate_adapter(adapter)
        except Exception:
            logger.exception("adapter %d has no slot either: its rows are the base model's", adapter)

    def forget_blank(self, adapter: int) -> None:
        """What ran blank is not the adapter, whoever asks for it next."""
        if adapter in self._blank:
            self._blank.discard(adapter)
            self.remove_adapter(adapter)

    # -- vLLM's own calls ------------------------------------------------------------------------

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        adapter = lora_request.lora_int_id
        if adapter not in self.tiers.entries or lora_request.load_inplace:
            self._load_now(lora_request)
        self.tiers.hold(adapter, STOCK, 0)
        with suppress(NoRoom):  # the step that needs it finds it a slot
            self._adapter_manager.activate_adapter(adapter)
        return True

    def _load_now(self, request: LoRARequest) -> None:
        lora = self._prepare(request)
        self._adapter_manager.remove_adapter(lora.id)
        self._adapter_manager.admit(lora, size_bytes(lora))

    def _prepare(self, request: LoRARequest) -> Resident:
        """Read and pack; touches nothing of the managers, so that any thread may."""
        lora = self._load_adapter(request)
        if not lora.loras and not lora.modules_to_save:
            raise ValueError(f"{request.lora_path} holds no LoRA weights")
        return self._adapter_manager.pack(lora)

    # -- loads in threads ------------------------------------------------------------------------

    def begin_load(self, request: LoRARequest, wanted: Mapping[str, Any]) -> None:
        """Start to load. ``wanted``: ``size_bytes``, ``priority``, ``pinned`` and the ``user``.

        Raises:
            NoRoom: all that could be evicted for it is in use.
        """
        adapter = request.lora_int_id
        self.failures.pop(adapter, None)
        for victim in self.tiers.reserve(adapter, wanted["size_bytes"]):
            self._adapter_manager._forget(victim)
        for gone in self.named.keys() - self.tiers.entries.keys():
            del self.named[gone]
        self._blank &= self.tiers.entries.keys()
        self._wanted[adapter], self.named[adapter] = wanted, (request.lora_name, request.lora_path)
        self._loader.start(adapter, lambda: self._prepare(request))

    def rank(self, adapter: int) -> int:
        return int(self._adapter_manager.get_adapter(adapter).rank)

    def loading(self, adapter: int) -> bool:
        return self._loader.loading(adapter)

    def collect(self) -> None:
        """Admit the loads that ended."""
        for done in self._loader.collect():
            wanted = self._wanted.pop(done.id)
            self.counters["host_load_seconds"] += done.took_s
            try:
                self._admit(done, wanted)
            except NoRoom as error:
                self._fail(done.id, str(error))

    def _admit(self, done: Done[Resident], wanted: Mapping[str, Any]) -> None:
        if done.adapter is None:
            self.tiers.cancel(done.id)
            self._fail(done.id, done.reason)
            return
        size = size_bytes(done.adapter)
        self._adapter_manager.admit(done.adapter, size, priority=wanted["priority"], pinned=wanted["pinned"])
        self.tiers.entries[done.id].users.add(wanted["user"])
        self.counters["host_loads"] += 1
        self.counters["host_load_bytes"] += size

    def _fail(self, adapter: int, reason: str) -> None:
        self.failures = dict(list({**self.failures, adapter: reason}.items())[-FAILURES_KEPT:])

    def remove(self, adapter: int) -> None:
        """Remove an adapter from slot and host tier, and give its memory back to the system."""
        self.remove_adapter(adapter)
        self.named.pop(adapter, None)
        self._loader.later(_give_back)


def _give_back() -> None:
    """glibc keeps freed tensors for the next one, which may never come; other C libraries do not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def size_bytes(lora: Resident) -> int:
    """What its tensors take in host memory."""
    return sum(tensor.nbytes for tensor in _tensors(lora))


def _tensors(lora: Resident) -> Iterable[torch.Tensor]:
    yield lora.ready.slab.data
    for weights in lora.loras.values():
        for part in (weights.lora_a, weights.lora_b):
            yield from (t for t in (part if isinstance(part, list) else [part]) if t is not None)
    for full in lora.modules_to_save.values():
        yield from (t for t in (full.weight, full.bias) if t is not None)
