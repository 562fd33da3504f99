"""vLLM's manager of a worker's adapters, with ``loader`` doing the reading beside the steps.

Put in place of ``LRUCacheWorkerLoRAManager`` (see ``hooks``). Steps call what ``slots.steps`` has. vLLM's
own calls keep working: what they load is read at once, and stays until they remove it.
Source: vllm/lora/worker_manager.py, 0.32.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_fs.worker_patch.notices import Notices
from lora_fs.worker_patch.versions.differences import modules_to_save
from lora_fs.worker_patch.worker.ids import check_room
from lora_fs.worker_patch.worker.load.alike import WEIGHTS, Alike, Kind
from lora_fs.worker_patch.worker.load.fits import check_finite, check_patterns
from lora_fs.worker_patch.worker.load.in_place import InPlace
from lora_fs.worker_patch.worker.load.loader import Loader
from lora_fs.worker_patch.worker.load.resident import AsOnDisk, Resident, size_bytes
from lora_fs.worker_patch.worker.load.under_way import Load, UnderWay
from lora_fs.worker_patch.worker.models import TieredModelManager
from lora_fs.worker_patch.worker.ops.punica import check_whole_steps
from lora_fs.worker_patch.worker.slots.sleep import watch
from lora_fs.worker_patch.worker.slots.steps import Blank, Steps, latest
from lora_fs.worker_patch.worker.slots.tiers import NoRoom

logger = logging.getLogger(__name__)

STOCK = "/vllm"  # who uses what came by vLLM's own calls; no replica's id, which is a segment


class TieredWorkerManager(Steps, LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """What the model runner calls in every step, and what ``rpc`` calls between them."""

    _adapter_manager: TieredModelManager
    in_place: InPlace

    _manager_cls = TieredModelManager

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_room(vllm_config)
        check_whole_steps(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        watch(vllm_config.parallel_config.worker_cls)
        self.notices = Notices()
        self._loader: Loader[Resident] = Loader()
        self._alone = vllm_config.parallel_config.world_size == 1
        self._alike = Alike()
        self.under_way: UnderWay[Resident] = UnderWay()
        self.named: dict[int, str] = {}  # adapter → its name, for people
        self.failures: dict[int, str] = {}
        self._too_big: dict[int, int] = {}  # adapter → bytes of a load that found no room
        self.blank: dict[int, Blank] = {}
        self.in_place = InPlace()
        self.counters: defaultdict[str, float] = defaultdict(float)

    @property
    def counted(self) -> dict[str, float]:
        """All counters of loads, tiers and slots."""
        return {**self.tiers.counters, **self._adapter_manager.counters, **self.counters}

    def create_lora_manager(self, *args: Any, **kwargs: Any) -> Any:
        model = super().create_lora_manager(*args, **kwargs)
        if self._adapter_manager.layers.targets:
            self._lora_model_cls = AsOnDisk
        self._adapter_manager.warm()
        return model

    # -- vLLM's own calls ------------------------------------------------------------------------

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        adapter = lora_request.lora_int_id
        if adapter not in self.tiers.entries or lora_request.load_inplace:
            self._load_now(lora_request)
        self.blank.pop(adapter, None)
        self.tiers.keep(adapter, STOCK, 0)
        if not self._adapter_manager.asleep:
            with suppress(NoRoom):  # the step that needs it finds it a slot
                self._adapter_manager.activate_adapter(adapter)
        return True

    def _load_now(self, request: LoRARequest, *, needed: bool = False) -> None:
        """Read an adapter, in the place of the weights that it has; after an error those stay.

        Args:
            needed: by the running step.
        """
        files = self.in_place.reading(request)
        lora = self._prepare(request, passing=True)  # whoever asked may write to them from now on
        self._adapter_manager.admit(lora, size_bytes(lora), needed=needed)
        self.in_place.read(request, files)

    def forget_blank(self, adapter: int) -> None:
        """Drop an adapter that ran blank, so that the next request loads it anew.

        What vLLM's own calls hold stays: no request loads it, and the next step tries it again.
        """
        if self.blank.pop(adapter, None) is not None:
            self.failures.pop(adapter, None)  # of a slot; whoever polls a load would take it for the load's
            entry = self.tiers.entries.get(adapter)
            if entry is not None and STOCK not in entry.holders:
                self.remove_adapter(adapter)

    def _prepare(self, request: LoRARequest, *, passing: bool = False) -> Resident:
        """Read and pack; touches nothing of the managers, so that any thread may.

        Args:
            passing: nobody reads its files after this: they may go, or change.
        """
        manager, folder, adapter = self._adapter_manager, request.lora_path, request.lora_int_id
        kind = Kind.of(folder) if manager.layers.targets else None
        recipe = self._alike.recipe(kind)
        if recipe is not None:
            return manager.pack(LoRAModel(adapter, recipe.rank, {}), recipe.draft(folder), alike=True)
        if kind is not None and kind.has_fused_experts:  # whoever asks for it need not know
            request.is_3d_lora_weight = True
        lora = self._load_adapter(request)
        check_patterns(folder)
        if not lora.loras and not modules_to_save(lora):
            raise ValueError(f"{folder} holds no LoRA weights")
        if not os.path.isfile(os.path.join(folder, WEIGHTS)):  # a pickle, whose values nobody has read
            check_finite(lora)
        draft = manager.draft(lora)
        resident = manager.pack(lora, draft)
        if kind is not None:
            learn = partial(self._alike.learn, folder, kind, resident, lora.tensors, draft)
            if passing:
                learn()
            else:
                self._loader.later(learn)
        return resident

    # -- loads in threads ------------------------------------------------------------------------

    def begin_load(self, request: LoRARequest, asked: Mapping[str, Any]) -> None:
        """Start to load, with room for this rank's share. A load that failed is begun anew.

        Args:
            asked: ``size_bytes``, ``dtype``, ``rank`` and ``target_modules`` of its files, ``priority``,
                ``pinned``, ``spare``, the ``user``, the ``sequence`` of the call, and whether the files are
                ``passing``.

        Raises:
            NoRoom: every adapter that could go for it is in use.
        """
        adapter = request.lora_int_id
        self._end_given_up()
        self.failures.pop(adapter, None)
        if adapter not in self.under_way:
            size = self._too_big.get(adapter) or self._packed_bytes(asked)
            self.tiers.reserve(adapter, size, spare=asked["spare"])
        self.named = {one: name for one, name in self.named.items() if one in self.tiers.entries}
        load = self.under_way.begin(adapter, asked)

        def tell(brought: Resident | None) -> None:
            size = None if brought is None else size_bytes(brought)
            self.notices.ended(adapter, load.number, size, but=load.caller)

        try:
            passing = asked.get("passing", False)
            self._loader.start(adapter, lambda: self._prepare(request, passing=passing), tell)
        except Exception:  # no thread is left
            self._end(adapter)
            raise

    def _packed_bytes(self, asked: Mapping[str, Any]) -> int:
        """The bytes of this rank's share of the files in memory, as far as known before the load."""
        size, files = int(asked["size_bytes"]), getattr(torch, str(asked.get("dtype")), None)
        manager, kept = self._adapter_manager, self.lora_config.lora_dtype.itemsize
        if isinstance(files, torch.dtype):
            kept = manager.layers.kept(files).itemsize
            size = size * kept // files.itemsize
        share = manager.shares.size_bytes(size, asked.get("target_modules", ()), asked.get("rank", 0), kept)
        return manager.layers.memory.taken_bytes(share)

    def loading(self, adapter: int) -> bool:
        """Whether a load of it is under way, or ended well and waits for its admission."""
        load = self.under_way.get(adapter)
        return load is not None and not load.failed

    def wait(self, adapter: int, most_s: float, user: str) -> None:
        """Wait for a load while the engine has nothing to do. ``user``: whose call this answers."""
        load = self.under_way.get(adapter)
        if load is not None:
            load.caller = user
            if not self._loader.wait(adapter, most_s):
                load.caller = None  # a load that ends just before this sends no notice: ``collect`` finds it
        self.collect()

    def collect(self) -> None:
        """See which loads ended. One rank alone admits them; of several each waits for ``admit``."""
        for done in self._loader.collect():
            if done.adapter is None:
                self._fail(done.id, done.reason)
            self.under_way.ended(done)
            load = self.under_way.get(done.id)
            if self._alone and load is not None:
                if load.failed or load.user is None:
                    self._end(done.id)
                else:
                    self.admit(done.id, [load.number], 0)

    def admit(self, adapter: int, numbers: Collection[str], most_bytes: int) -> None:
        """Take a load that ended into the host tier, if it is one of those ``numbers``.

        Args:
            most_bytes: what the largest of all ranks' shares takes: each counts as much, so that all evict
                the same.
        """
        load = self.under_way.take(adapter, numbers)
        if load is not None and load.adapter is not None:
            self._admit(adapter, load, load.adapter, max(most_bytes, size_bytes(load.adapter)))

    def _admit(self, adapter: int, load: Load[Resident], brought: Resident, size: int) -> None:
        self.tiers.cancel(adapter)
        self.forget_blank(adapter)  # of a step that could not wait for this
        self.failures.pop(adapter, None)
        if adapter in self.tiers.entries:  # by a call of vLLM's own meanwhile, whose holds count
            self.tiers.entries[adapter].users.add(str(load.user))
            return
        try:
            how = {key: load.asked[key] for key in ("priority", "pinned", "spare")}
            self._adapter_manager.admit(brought, size, **how)
        except NoRoom:  # the next request gets the error, or finds room for its true size
            self._too_big = latest({**self._too_big, adapter: size})
            return
        self.tiers.entries[adapter].users.add(str(load.user))
        self.counters["host_loads"] += 1
        self.counters["host_load_seconds"] += load.took_s
        self.counters["host_loads_alike"] += brought.alike
        self.counters["host_load_bytes"] += size
        layers, packed, room = self._adapter_manager.layers, brought.slab.data.nbytes, self.tiers.free_bytes
        self._loader.later(lambda: layers.prepare(packed, room))

    def end_unmeant(self, user: str, meant: Collection[int], sequence: int) -> None:
        """Give up a user's loads except those of ``meant``, as ``Tiers.keep_holds`` does holds; end them."""
        self.under_way.give_up_unmeant(user, meant, sequence)
        self._end_given_up()

    def _end_given_up(self) -> None:
        if self._alone:  # when it ends: somebody may want it before
            return
        for adapter in self.under_way.given_up():
            self._end(adapter)

    def _end(self, adapter: int) -> None:
        self.tiers.cancel(adapter)
        self.under_way.forget(adapter)
        self._loader.forget(adapter)

    # -- what is in the host tier ----------------------------------------------------------------

    def bring(self, adapter: int) -> None:
        """Have an adapter of the host tier on the device before the step that needs it, if there is room."""
        try:
            self._adapter_manager.bring(adapter)
        except Exception:
            logger.exception("adapter %d is copied to the device by the step that needs it", adapter)

    def rank(self, adapter: int) -> int:
        return int(self._adapter_manager.get_adapter(adapter).rank)

    def remove(self, adapter: int) -> None:
        """Remove an adapter from slot and host tier, and give its memory back to the system."""
        self.forget_blank(adapter)
        self.remove_adapter(adapter)
        self.named.pop(adapter, None)
        self._loader.later(self._give_back)

    def _give_back(self) -> None:
        """Free the memory ready for a next adapter and glibc's own: nobody may ever need it."""
        self._adapter_manager.layers.give_back()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
