"""vLLM's own calls to its manager, with a model of its layers: warm-up, sleep, and what is compiled."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from lora_fs.kernels.gpu.plan import FEWEST_ROWS, SMALL_ROWS
from lora_fs.kernels.memory.pinned import PinnedMemory
from lora_fs.kernels.segments import plan_rows
from lora_fs.kernels.weights.layout import Packed
from lora_fs.kernels.weights.slabs import Draft, Slab
from lora_fs.kernels.weights.tables import DeviceLayer
from lora_fs.worker_patch.worker.load.fits import DoesNotFit
from lora_fs.worker_patch.worker.load.in_place import InPlace
from lora_fs.worker_patch.worker.load.resident import Resident
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.models import TieredModelManager
from lora_fs.worker_patch.worker.ops import on_device, opaque, punica
from lora_fs.worker_patch.worker.slots.layers import ModelLayers, Target
from lora_fs.worker_patch.worker.slots.sleep import watch
from lora_fs.worker_patch.worker.slots.stacks import StackedLayers
from tests.plugin.block import (
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    RANK,
    SLOTS,
    STOCK,
    Make,
    Model,
    adapter,
    packed,
    serve,
    vllm_config,
)


def runner_of(manager: TieredModelManager) -> Any:
    """vLLM's runner, as far as it is about adapters."""
    worker: Any = TieredWorkerManager.__new__(TieredWorkerManager)
    worker._adapter_manager, worker._cached_dummy_lora = manager, False
    worker.embedding_modules = Model.embedding_modules
    worker.blank, worker.in_place = {}, InPlace()
    runner: Any = LoRAModelRunnerMixin()
    runner.lora_manager, runner.lora_config = worker, manager.lora_config
    runner.get_model = lambda: manager.model
    return runner


def sleeping(runner: Any) -> Any:
    """A worker that sleeps, as far as it is about adapters."""

    class Sleeps:
        model_runner = runner

        def sleep(self, level: int = 1) -> None: ...

        def wake_up(self, tags: list[str] | None = None) -> None: ...

    watch(Sleeps)
    worker = Sleeps()
    worker.sleep(level=2)
    return worker


def warm_up(runner: Any) -> None:
    """A dummy run of every slot, as when an engine starts."""
    rows = np.ones(2 * SLOTS, dtype=np.int32)
    with runner.maybe_dummy_run_with_lora(runner.lora_config, rows, rows, num_active_loras=SLOTS):
        assert set(runner.lora_manager._adapter_manager._active_adapters) == {1, 2, 3}


def slot_has(manager: TieredModelManager, lora: Resident) -> bool:
    """Whether an adapter is in a slot, with its own weights in every layer."""
    slot = manager.lora_index_to_id.index(lora.id)
    for name, target in manager.layers.targets.items():
        wanted = lora.slab.views.get(name)
        if isinstance(manager.layers, StackedLayers):
            assert all(map(torch.equal, stacks(target.module, slot), padded(target, wanted))), name
            continue
        found = target.layer.packed[slot]
        if found is None or wanted is None:
            assert found is wanted, name
            continue
        assert torch.equal(found.a, wanted.a), name
        assert all(map(torch.equal, found.b, wanted.b)), name
    return True


def stacks(module: Any, slot: int) -> list[torch.Tensor]:
    """vLLM's own of a slot: of each slice A, then of each B."""
    return [stack[slot, 0] for stack in (*module.lora_a_stacked, *module.lora_b_stacked)]


def padded(target: Target, packed: Packed | None) -> list[torch.Tensor]:
    """What vLLM's own stacks of a slot have to be, from the top left corner, and zero elsewhere."""
    wanted = [torch.zeros_like(one) for one in stacks(target.module, 0)]
    if packed is not None:
        of_slices = zip(packed.columns(), packed.b, strict=True)
        for number, ((begin, end), b) in enumerate(of_slices):
            if b is not None:
                wanted[number][: end - begin] = packed.a[begin:end]
                wanted[len(packed.b) + number][: b.shape[1], : end - begin] = b.T
    return wanted


KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton", "off"])
WORLD = pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (5, 8)])


@KERNELS
@WORLD
def test_a_warm_up(make: Make, kernels: str, rank: int, size: int) -> None:
    """Of every rank, and of as many adapters as there are slots, whatever the budget; nothing stays."""
    manager = make(kernels, rank, size)
    warm_up(runner_of(manager))
    assert (manager.tiers.entries, manager.tiers.slots) == ({}, [None] * SLOTS)
    assert not manager.list_adapters()
    assert not manager._active_adapters


@KERNELS
def test_a_warm_up_in_several_runs(make: Make, kernels: str) -> None:
    """As of graphs that are captured one after the other: it ends when vLLM says so."""
    manager = make(kernels)
    runner = runner_of(manager)
    for _ in range(2):
        with runner.maybe_setup_dummy_loras(runner.lora_config, remove_lora=False):
            assert manager.list_adapters().keys() == {1, 2, 3}
    runner.maybe_remove_all_loras(runner.lora_config)
    assert not manager.list_adapters()


@KERNELS
def test_a_warm_up_that_no_step_uses_packs_nothing(
    make: Make, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an idle rank's of data-parallel experts, at each step of the others; those in use share one pack."""
    manager = make(kernels)
    runner, packed_as = runner_of(manager), list[Draft]()
    pack = manager.layers.pack

    def counted(draft: Draft, *memory: Any) -> Slab:
        packed_as.append(draft)
        return pack(draft, *memory)

    monkeypatch.setattr(manager.layers, "pack", counted)
    # Page-locked memory is for adapters: a warm-up takes none of it, nor complains that there is none.
    memory = PinnedMemory(1, lambda size: torch.empty(size).byte())
    monkeypatch.setattr(manager.layers, "memory", memory)
    rows = np.ones(4, dtype=np.int32)
    with runner.maybe_dummy_run_with_lora(runner.lora_config, rows, rows):
        assert manager.list_adapters().keys() == {1, 2, 3}
    assert packed_as == []
    free = memory.free_bytes
    warm_up(runner)
    assert len(packed_as) == 1
    assert memory.free_bytes == free
    assert (manager.tiers.entries, manager.list_adapters(), manager._warm_up) == ({}, {}, None)


@KERNELS
def test_warm_ups_that_share_a_pack_have_a_slot_each(make: Make, kernels: str) -> None:
    """One that goes takes nothing from another."""
    manager = make(kernels)
    runner = runner_of(manager)
    with runner.maybe_setup_dummy_loras(runner.lora_config):
        for number in (1, 2):
            manager.activate_adapter(number)
        manager.remove_adapter(1)
        kept: Any = manager.get_adapter(2)
        assert slot_has(manager, kept)
        assert manager.tiers.slots.count(2) == 1


@KERNELS
@WORLD
def test_an_adapter_is_the_whole_models(make: Make, kernels: str, rank: int, size: int) -> None:
    """Its share is taken; one that has a rank's sizes already is refused, unlike a warm-up's."""
    manager = make(kernels, rank, size)
    lora = adapter(101)
    k = lora.loras["k_proj"].lora_b
    resident = serve(manager, lora)
    assert slot_has(manager, resident)
    heads = max(1, KV_HEADS // size)
    begin = rank * KV_HEADS // size * HEAD
    found: Any = resident.slab.views["qkv_proj"].b[1]
    assert torch.equal(found.T, k[begin : begin + heads * HEAD])
    if size > 1:
        with pytest.raises(DoesNotFit, match="o_proj"):
            packed(manager, adapter(102, {"o_proj": (HEADS * HEAD // size, HIDDEN)}))


@KERNELS
def test_a_warm_up_beside_requests(make: Make, kernels: str) -> None:
    """As an idle rank's, where several share the requests: adapters and their slots stay."""
    manager = make(kernels)
    one, other = (serve(manager, adapter(number)) for number in (2, 101))  # 2 is an id of vLLM's warm-up
    runner = runner_of(manager)
    rows = np.ones(4, dtype=np.int32)
    with runner.maybe_dummy_run_with_lora(runner.lora_config, rows, rows):
        assert manager.list_adapters().keys() == {1, 2, 3, 101}
    assert manager.list_adapters().keys() == {2, 101}
    assert slot_has(manager, one)
    assert slot_has(manager, other)


@KERNELS
@pytest.mark.parametrize("told", ["reset_lora_state", "wake_up"])
def test_the_device_lost_its_memory(make: Make, kernels: str, told: str) -> None:
    """After a deep sleep: the next step fills its slots from host memory, and plans anew.

    vLLM resets the adapters only if it loads the base model's weights itself; a program may do that.
    """
    manager = make(kernels)
    resident = serve(manager, adapter(101))
    mapping = LoRAMapping((101, 0), (101, 0))
    manager.set_adapter_mapping(mapping)
    wrapper: Any = manager.punica_wrapper_mapping["language_model"]
    there = {
        name: target.layer.tables
        for name, target in manager.layers.targets.items()
        if isinstance(target.layer, DeviceLayer)
    }
    wanted = [table.columns.clone() for table in there.values()]
    assert bool(wanted) == (kernels == "triton")
    for table in there.values():
        for tensor in (table.weights, table.offsets, table.ends, table.scales, table.columns):
            tensor.fill_(77)
    for target in manager.layers.targets.values() if kernels == "off" else ():
        for stack in (*target.module.lora_a_stacked, *target.module.lora_b_stacked):
            stack.fill_(77)
    wrapper.tokens = punica.NOBODY
    runner = runner_of(manager)
    if told == "wake_up":
        sleeping(runner).wake_up()
    else:
        runner.reset_lora_state()
    assert manager.list_adapters().keys() == {101}
    assert manager.tiers.slots == [None] * SLOTS
    manager.activate_adapter(101)
    manager.set_adapter_mapping(mapping)
    assert slot_has(manager, resident)
    if kernels == "off":
        assert wrapper.token_lora_indices.tolist() == [0, -1]
        return
    assert [(segment.slot, segment.rows) for segment in wrapper.tokens.segments] == [(0, 1)]
    assert all(map(torch.equal, wanted, (table.columns for table in there.values())))
    for name, table in there.items():
        packed = resident.slab.views.get(name)
        assert table.ends[0, -1] == (0 if packed is None else packed.rank)
        if packed is not None:
            assert torch.equal(table.weights[table.offsets[0, 0] :][: packed.a.numel()], packed.a.flatten())


@pytest.mark.parametrize("removed", ["remove_adapter", "deactivate_adapter"])
def test_no_plan_names_an_empty_slot(make: Make, removed: str) -> None:
    """What the tables say of it is another's by then, or nobody's."""
    manager = make("triton")
    serve(manager, adapter(101))
    serve(manager, adapter(102))
    mapping = LoRAMapping((101, 102, 102), (101, 102))
    manager.set_adapter_mapping(mapping)
    getattr(manager, removed)(101)
    manager.set_adapter_mapping(mapping)
    wrapper: Any = manager.punica_wrapper_mapping["language_model"]
    for there in (wrapper.tokens_there, wrapper.sampled_there):
        assert there.block[0] == 1  # tile
        assert there.block[3] == manager.lora_index_to_id.index(102)


@pytest.mark.parametrize(
    "others",
    [{"fully_sharded": True, "model": lambda: Model(embedding=False)}, {"wrapper": STOCK}],
    ids=["sharded", "a platform's own"],
)
def test_vllms_own_stacks_are_filled(make: Make, others: dict[str, Any]) -> None:
    """By vLLM itself where no layer could be taken over, and where only its kernels are not ours by us."""
    manager = make("triton", 1, 2, **others)
    assert type(manager.layers) is (StackedLayers if "wrapper" in others else ModelLayers)
    warm_up(runner_of(manager))
    serve(manager, adapter(101))
    slot = manager.lora_index_to_id.index(101)
    module: Any = manager.modules["o_proj"]
    assert module.lora_a_stacked[0][slot, 0, :RANK].all()
    runner_of(manager).reset_lora_state()
    assert manager.lora_index_to_id == [None] * SLOTS


def test_layers_are_called_alike_in_every_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names in the model, and by which of the process's wrappers it is."""
    starts = []
    for _ in range(2):
        monkeypatch.setattr(on_device, "_numbers", count())
        monkeypatch.setattr(opaque, "_bound", {})
        make("triton")
        make("triton")
        starts.append(list(opaque._bound))
    assert starts[0] == starts[1]
    names = ("embed_tokens", "qkv_proj", "o_proj", "gate_up_proj")
    assert starts[0] == [f"{number}.{name}" for number in (0, 1) for name in names]


def test_what_was_compiled_for_other_kernels(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Is not what vLLM's cache has for these; a part of the model may have a config of its own."""
    for kernels, told in (("triton", {"lora_fs_kernels": "triton"}), ("torch", {})):
        model, config = Model(), vllm_config()
        part: Any = model.o_proj
        part.vllm_config = vllm_config(additional={"theirs": 1})
        make(kernels, config=config, model=lambda part=model: part)
        assert config.additional_config == told
        assert part.vllm_config.additional_config == {"theirs": 1, **told}
    assert not caplog.records
    opaque_config = SimpleNamespace(compute_hash=lambda: "")
    make("triton", config=vllm_config(additional=opaque_config))
    assert "VLLM_CACHE_ROOT" in caplog.text


@pytest.mark.parametrize(
    ("captured", "small"), [(None, SMALL_ROWS), (0, SMALL_ROWS), (256, SMALL_ROWS), (1024, 1024)]
)
def test_graphs_of_large_batches(make: Make, captured: int | None, small: int) -> None:
    """Whatever a graph is captured of has the same tiles whenever it is replayed."""
    manager = make("triton", config=vllm_config(captured))
    wrapper: Any = manager.punica_wrapper_mapping["language_model"]
    for there in (wrapper.tokens_there, wrapper.sampled_there):
        there.upload(plan_rows(np.zeros(small, dtype=np.int64)))
        assert there.tile_rows == FEWEST_ROWS
        there.upload(plan_rows(np.zeros(small + 1, dtype=np.int64)))
        assert there.tile_rows > FEWEST_ROWS
