"""vLLM's manager of the model's adapters, with ``tiers`` deciding who has a slot and who stays.

``layers`` makes the slots; the rest of vLLM's manager, its packing and its warm-up, stays
as it is. Source: vllm/lora/model_manager.py, 0.32.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from lora_fs.kernels.memory.extents import StorageFullError
from lora_fs.kernels.memory.host import HostMemory
from lora_fs.kernels.weights.slabs import Draft
from lora_fs.sidecar.settings import load_settings
from lora_fs.worker_patch.versions.layers import tell_stranger
from lora_fs.worker_patch.worker.load.fits import (
    check_fits,
    check_head,
    drafts_without_mapping,
    drop_merged,
    name_as_the_model,
)
from lora_fs.worker_patch.worker.load.resident import Resident, convert
from lora_fs.worker_patch.worker.ops.punica import Planned, in_slots
from lora_fs.worker_patch.worker.slots.layers import DeviceLayers, ModelLayers
from lora_fs.worker_patch.worker.slots.shares import Shares
from lora_fs.worker_patch.worker.slots.stacks import StackedLayers
from lora_fs.worker_patch.worker.slots.tiers import NoRoom, Tiers

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 40  # adapters: the tiers' budget bounds them, in bytes


class TieredModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """Slots and host tier; every change of either goes through ``tiers``.

    Attributes:
        asleep: whether vLLM has unmapped the device's memory for weights: nothing may be copied there.
        counters: loads into slots, with their seconds and bytes, monotonic.
    """

    asleep = False

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=vllm_config, **kwargs)
        self.lora_index_to_id: list[int | None]
        self.layers: ModelLayers
        parallel = vllm_config.parallel_config
        self._whole_model = parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel
        self._no_heads = drafts_without_mapping(vllm_config)
        settings = load_settings()
        self.tiers = Tiers(self.lora_slots, settings.host_bytes, eviction=settings.eviction)
        self._warm_ups: set[int] = set()
        self._warm_up: Resident | None = None
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.layers.lock(settings.host_bytes)
        if self.layers.targets:
            self.layers.allocate()
        else:  # all stayed vLLM's own
            config, memory = self.lora_config, self.layers.memory
            self.layers = ModelLayers(self.lora_slots, config.max_lora_rank, config.lora_dtype)
            self.layers.memory = memory
        self.tiers.copies = self.layers.copies
        # With layers that stayed vLLM's nobody here knows the whole.
        ours = len(self.layers.targets) == len(self.modules)
        parts = self.layers.parts(lambda name: self.packed_modules.get(name, [name])) if ours else {}
        self.shares = Shares(parts)
        if self._ours:
            for name, target in self.layers.targets.items():
                target.module.set_mapping(target.module.punica_wrapper.bind(name, target))
            for wrapper in self.punica_wrapper_mapping.values():
                wrapper.theirs = len(self.layers.targets) < len(self.modules)

    def warm(self) -> None:
        """Have ready what the first steps need."""
        if self._ours:
            for wrapper in self.punica_wrapper_mapping.values():
                wrapper.warm(self.layers.targets.values())

    def begin_step(self) -> None:
        """A step begins, with the mapping of the last one or another."""
        if self._ours:
            for wrapper in self.punica_wrapper_mapping.values():
                wrapper.sampled_is_next = True

    def _set_adapter_mapping(self, mapping: Any) -> None:
        """vLLM's own metadata, and its classification head, take no adapter that has no slot."""
        if not self._ours or getattr(self, "_classification_head", None) is not None:
            mapping = in_slots(mapping, self.lora_index_to_id)
        super()._set_adapter_mapping(mapping)

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        super()._init_punica_wrapper(max_num_batched_tokens, vllm_config)
        wrappers = self.punica_wrapper_mapping.values()
        self._ours = all(isinstance(one, Planned) for one in wrappers)
        rows = vllm_config.model_config.dtype
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        read = [one.prepare(rows, captured) for one in wrappers if isinstance(one, Planned)]
        settings = load_settings()
        sizes = self.lora_slots, self.lora_config.max_lora_rank, self.lora_config.lora_dtype
        if not self._ours:
            self.layers = StackedLayers(*sizes, settings.device_bytes)
        elif settings.kernels == "triton":
            self.layers = DeviceLayers(*sizes, self.device, settings.device_bytes)
            self._mark_compiled(vllm_config)
        else:
            self.layers = ModelLayers(*sizes, *read[:1])

    def _mark_compiled(self, vllm_config: Any) -> None:
        """Let the cache of compiled models tell ours from others: its hash knows of vLLM's settings only.

        A part of a model that vLLM compiles by itself may have a config of its own.
        """
        parts = (getattr(module, "vllm_config", None) for module in self.model.modules())
        for config in {id(one): one for one in (vllm_config, *parts) if one is not None}.values():
            if isinstance(config.additional_config, dict):
                config.additional_config["lora_fs_kernels"] = "triton"
            else:
                logger.warning(
                    "additional_config is no dict: give this engine a VLLM_CACHE_ROOT of its own, or models "
                    "compiled with other LORA_FS_KERNELS are taken for its"
                )

    def register_module(self, module_name: str, module: Any) -> None:
        super().register_module(module_name, module)
        self.layers.take_over(module_name, module)
        tell_stranger(module_name, module)

    def draft(self, adapter: LoRAModel, *, whole: bool = True) -> Draft:
        """Check that an adapter fits, and return how to pack it. For any thread: it touches nothing here.

        Args:
            whole: of the whole model, as a file's are; else of this rank's sizes, and not looked at.
        Raises:
            DoesNotFit, ShapeError: it is not one for this model.
        """
        name_as_the_model(self, adapter)
        scales, as_they_are = {}, set()
        for name in self.layers.targets:
            names = self.packed_modules.get(name, [name])
            parts = [adapter.loras[part] for part in names if part in adapter.loras]
            if len({part.scaling for part in parts}) == 1:
                scales[name] = parts[0].scaling
                for part in parts:
                    part.scaling = 1
                as_they_are.update(names)
        rest = (weights for name, weights in adapter.loras.items() if name not in as_they_are)
        convert(rest, self.lora_config.lora_dtype)
        self._create_merged_loras_inplace(adapter)
        drop_merged(self, adapter)
        if whole:
            check_fits(self, adapter, whole_model=self._whole_model)
            if self._no_heads:
                check_head(self, adapter)
        found = {name: self._get_lora_layer_weights(adapter, name) for name in self.layers.targets}
        weights = {name: w for name, w in found.items() if w is not None}
        return self.layers.draft(weights, scales, whole=whole)

    def pack(self, adapter: LoRAModel, draft: Draft, *, alike: bool = False) -> Resident:
        """Copy an adapter to where the host tier has it; any thread may.

        Args:
            draft: of the layers that lora-fs took over.
            alike: packed as another of its kind.
        """
        return Resident(adapter, self.layers.pack(draft), self.layers.memory, alike=alike)

    @property
    def capacity(self) -> int:
        return _UNBOUNDED

    def add_adapter(self, lora: LoRAModel) -> bool:
        """Admit one of vLLM's warm-up adapters, which nothing else sends this way.

        They have this rank's sizes, come as many as there are slots, and go when the warm-up ends, so they
        need no budget. vLLM registers them at every dummy batch, and most are never used: the step that
        uses one packs it.
        """
        self.admit(lora, 0)
        self._warm_ups.add(lora.id)
        return True

    def _packed(self, lora_id: int) -> Resident:
        """An adapter as it fills a slot. Warm-ups, which are alike and zero, share one piece of memory."""
        adapter = self._registered_adapters[lora_id]
        if not isinstance(adapter, Resident):
            if self._warm_up is None:
                memory = HostMemory()  # not page-locked, where it would take an adapter's place
                draft = self.draft(adapter, whole=False)
                self._warm_up = Resident(adapter, self.layers.pack(draft, memory), memory)
            adapter = self._registered_adapters[lora_id] = self._warm_up.alias(lora_id)
        return adapter

    def admit(self, lora: LoRAModel, size: int, **how: Any) -> None:
        """Take a packed adapter, or a warm-up, into the host tier, as ``Tiers.admit`` says.

        Raises:
            NoRoom: nothing was evicted, and what it was to replace stays.
        """
        for victim in self.tiers.admit(lora.id, size, **how):
            self._forget(victim)
        self._forget(lora.id)
        self._registered_adapters[lora.id] = lora

    def bring(self, lora_id: int) -> None:
        """Start to copy an adapter of the host tier to the device, if there is room that nobody keeps.

        While vLLM sleeps there is none: the next hold or step brings it.
        """
        if lora_id not in self.tiers.slots and not self.asleep:
            with suppress(NoRoom):
                self._land(lora_id, needed=False)

    def _land(self, lora_id: int, *, needed: bool) -> None:
        """Have it on the device or on its way. Raises NoRoom."""
        if not self.layers.lands or lora_id in self.tiers.device:
            return
        while True:
            try:
                self.layers.bring(self._registered_adapters[lora_id].slab)
                break
            except StorageFullError:
                self._leave(self.tiers.leaving(needed=needed))
        self.tiers.land(lora_id)
        self.counters["gpu_load_bytes"] += self.tiers.entries[lora_id].size_bytes

    def _leave(self, lora_id: int) -> None:
        if not self.layers.copies:
            self.deactivate_adapter(lora_id)
        self.layers.drop(self._registered_adapters[lora_id].slab)

    def activate_adapter(self, lora_id: int) -> bool:
        """Fill a slot from host memory.

        Raises:
            NoRoom: every slot is in use. Any other error leaves the slot empty.
        """
        placed = self.tiers.place(lora_id)
        if placed is None:
            return False
        index, victim = placed
        if victim is not None:
            super().deactivate_adapter(victim)
        began = time.monotonic()
        try:
            self._fill(index, self._packed(lora_id))
            self._active_adapters[lora_id] = None
            self.counters["gpu_loads"] += 1
            if not self.layers.lands:
                self.counters["gpu_load_bytes"] += self.tiers.entries[lora_id].size_bytes
            self.counters["gpu_load_seconds"] += time.monotonic() - began
        except Exception:
            self.tiers.vacate(lora_id)
            self.layers.empty(index)
            raise
        finally:
            self.lora_index_to_id = list(self.tiers.slots)
        return True

    def _fill(self, index: int, adapter: Resident) -> None:
        """Let a slot mean an adapter: ours by reference, what stayed vLLM's by its own copies."""
        self._land(adapter.id, needed=True)
        self.layers.fill(index, adapter.slab)
        for name, module in self.modules.items():
            if name in self.layers.targets:
                continue
            if hasattr(module, "set_module_to_save"):  # a classification head
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
        """A warm-up ended, which may be beside requests: its adapters go. Or the device lost what it had, as
        when the engine slept.
        """
        if self._warm_ups:
            for adapter in self._warm_ups:
                self.remove_adapter(adapter)
            self._warm_ups.clear()
            self._warm_up = None
            return
        self.lose_device()

    def lose_device(self) -> None:
        """Take the device's memory for empty: steps fill the slots anew, from host memory."""
        for adapter in list(self._active_adapters):
            self.deactivate_adapter(adapter)
        self.tiers.device.clear()
        self.layers.restore()
        self._last_mapping = self._last_slot_layout = None

    def pin_adapter(self, lora_id: int) -> bool:
        """Keep it in the host tier and in a slot. Raises NoRoom: one slot stays free for the rest."""
        self.tiers.pin(lora_id)
        if not self.asleep:
            self.activate_adapter(lora_id)
        return True

    def _forget(self, adapter_id: int) -> bool:
        adapter = self._registered_adapters.get(adapter_id)
        if isinstance(adapter, Resident):
            self.layers.drop(adapter.slab)
        return bool(super().remove_adapter(adapter_id))
