"""vLLM's own stacks hold, bit for bit, what vLLM would have put there, whatever was there before.

Filled by copies, as on a CPU, and by way of the device, as on a GPU, where ``test_interpreted`` has Triton
interpret.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.config.lora import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.platforms import current_platform

from lora_fs.kernels.gpu import scatter
from lora_fs.kernels.weights.slabs import Draft
from lora_fs.worker_patch.worker.load import resident
from lora_fs.worker_patch.worker.models import TieredModelManager
from lora_fs.worker_patch.worker.slots import layers, stacks
from lora_fs.worker_patch.worker.slots.stacks import StackedLayers
from tests.plugin.block import HIDDEN, STOCK, WHOLE, WORDS, Model, vllm_config
from tests.plugin.tensor_parallel import be_rank

LANDS = os.environ.get("TRITON_INTERPRET") == "1"
SLOTS, MOST = 2, 8
NAMES = (*WHOLE, "embed_tokens")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(seed: int, names: frozenset[str], rank: int, alpha: dict[str, int], dtype: Any) -> LoRAModel:
    """As vLLM's reader has an adapter's, with the file's type."""
    random = torch.Generator().manual_seed(seed)
    sizes = {**WHOLE, "embed_tokens": (WORDS, HIDDEN)}
    found = {}
    for name in sorted(names):
        inputs, outputs = sizes[name]
        a, b = (
            torch.randn(*shape, generator=random).to(dtype) for shape in ((rank, inputs), (outputs, rank))
        )
        found[name] = LoRALayerWeights(name, rank, alpha.get(name, rank), a, b)
    return LoRAModel(seed, rank, found)


Adapter = tuple[frozenset[str], int, dict[str, int], torch.dtype]
adapters: st.SearchStrategy[Adapter] = st.tuples(
    st.frozensets(st.sampled_from(NAMES), min_size=1),
    st.integers(1, MOST),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1, 3, 16]), max_size=3),
    st.sampled_from(DTYPES),
)


def managers(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, dtype: Any, *, host_bytes: int = 1 << 30
) -> tuple[Any, Any]:
    """vLLM's, and the plugin's with vLLM's kernels; each with a model of its own."""
    be_rank(monkeypatch, rank, size)
    monkeypatch.setenv("LORA_FS_KERNELS", "off")
    monkeypatch.setattr(StackedLayers, "_lands", lambda self, stacks: LANDS)
    monkeypatch.setattr(scatter, "PROGRAMS", 2)  # a stack: most of a GPU's find nothing to do here
    monkeypatch.setenv("LORA_FS_HOST_BYTES", str(host_bytes))
    monkeypatch.setattr(current_platform, "get_punica_wrapper", lambda: STOCK)
    config = LoRAConfig(max_lora_rank=MOST, max_loras=SLOTS, max_cpu_loras=100, lora_dtype=dtype)
    arguments = (8, 2048, WORDS, config, torch.device("cpu"))
    stock = LRUCacheLoRAModelManager(Model(), *arguments, vllm_config=vllm_config())
    plugin = TieredModelManager(Model(), *arguments, vllm_config=vllm_config())
    assert isinstance(plugin.layers, StackedLayers)
    assert plugin.layers.targets.keys() == {"qkv_proj", "o_proj", "gate_up_proj"}
    return stock, plugin


def of_slot(manager: Any, slot: int) -> dict[str, list[torch.Tensor]]:
    """All that vLLM's kernels read of a slot."""
    found = {}
    for name, module in manager.modules.items():
        a, b = module.lora_a_stacked, module.lora_b_stacked
        both = (*a, *b) if isinstance(a, tuple) else (a, b)
        found[name] = [stack[slot] for stack in both]
    return found


@settings(
    max_examples=6 if LANDS else 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    made=st.lists(adapters, min_size=1, max_size=5),
    of_rank=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_slot_is_as_vllm_fills_it(
    monkeypatch: pytest.MonkeyPatch, made: list[Adapter], of_rank: tuple[int, int], dtype: torch.dtype
) -> None:
    """After any others, in any of them, some layers or slices left alone; of each tensor-parallel rank."""
    with monkeypatch.context() as patch:
        stock, plugin = managers(patch, *of_rank, dtype)
        for number, (names, rank, alpha, on_disk) in enumerate(made, 1):
            theirs = weights(number, names, rank, alpha, on_disk)
            for layer in theirs.loras.values():
                layer.lora_a, layer.lora_b = layer.lora_a.to(dtype), layer.lora_b.to(dtype)
            stock.add_adapter(theirs)
            stock.activate_adapter(number)
            ours = weights(number, names, rank, alpha, on_disk)
            plugin.admit(plugin.pack(ours, plugin.draft(ours)), 1)
            plugin.bring(number)
            plugin.activate_adapter(number)
            wanted = of_slot(stock, stock.lora_index_to_id.index(number))
            found = of_slot(plugin, plugin.lora_index_to_id.index(number))
            for name, tensors in wanted.items():
                assert all(map(torch.equal, tensors, found[name])), (number, name)


def test_the_next_of_a_kind_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written where the one before was, and nothing is zeroed for it; for another kind all is."""
    stock, plugin = managers(monkeypatch, 0, 1, torch.float32)
    names, alpha = frozenset({"q_proj", "v_proj", "o_proj"}), {"o_proj": 3}
    first = plugin.draft(weights(1, names, 4, alpha, torch.float32))
    other = plugin.draft(weights(2, names, 4, alpha, torch.float32))
    alike = Draft(first.outline, first.dtype, other.sources)  # as a recipe makes it
    zeroed: list[str] = []
    for name, target in plugin.layers.targets.items():

        def reset(slot: int, name: str = name, reset: Any = target.module.reset_lora) -> None:
            zeroed.append(name)
            reset(slot)

        monkeypatch.setattr(target.module, "reset_lora", reset)
    plugin.layers.fill(0, plugin.layers.pack(first))
    assert zeroed == list(plugin.layers.targets)
    plugin.layers.fill(0, plugin.layers.pack(alike))
    assert zeroed == list(plugin.layers.targets)
    stock.add_adapter(weights(2, names, 4, alpha, torch.float32))
    stock.activate_adapter(2)
    wanted, found = of_slot(stock, 0), of_slot(plugin, 0)
    assert all(all(map(torch.equal, wanted[name], found[name])) for name in wanted)
    plugin.layers.fill(0, plugin.layers.pack(other))
    assert zeroed == 2 * list(plugin.layers.targets)


def test_who_is_in_a_slot_needs_no_place_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is a copy: the next of the same step takes the place, and a hold brings nobody back."""
    monkeypatch.setitem(globals(), "LANDS", True)
    monkeypatch.setattr(scatter, "scatter", lambda *args, **how: None)
    _, plugin = managers(monkeypatch, 0, 1, torch.float32)
    for number in range(1, SLOTS + 1):
        lora = weights(number, frozenset(WHOLE), 4, {}, torch.float32)
        ready = plugin.pack(lora, plugin.draft(lora))
        plugin.admit(ready, 1)
    landing: Any = plugin.layers
    landing._landing._extents.size = ready.slab.data.numel()
    plugin.tiers.begin_step(range(1, SLOTS + 1))
    for number in range(1, SLOTS + 1):
        plugin.activate_adapter(number)
    assert sorted(plugin._active_adapters) == sorted(plugin.lora_index_to_id) == [*range(1, SLOTS + 1)]
    plugin.bring(1)
    assert plugin.tiers.device == {SLOTS}


class Locked:
    """Stands in for the system, which locks nothing without a GPU, and counts what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        monkeypatch.setattr(stacks, "PIN_MEMORY", True)
        monkeypatch.setattr(layers, "page_locked", self)
        monkeypatch.setattr(torch.Tensor, "pin_memory", self.refuse)
        empty = torch.empty

        def allocate(*sizes: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return self.refuse() if pin_memory else empty(*sizes, **kwargs)

        monkeypatch.setattr(torch, "empty", allocate)

    def __call__(self, size_bytes: int) -> torch.Tensor:
        self.sizes.append(size_bytes)
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def refuse(self, *args: Any) -> torch.Tensor:
        raise AssertionError("a load locks memory")


def test_memory_is_locked_at_the_start_and_by_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU to copy to: what is packed, and what stays vLLM's own, lie in one arena."""
    locked = Locked(monkeypatch)
    _, plugin = managers(monkeypatch, 0, 1, torch.float32, host_bytes=1 << 20)
    memory = plugin.layers.memory
    assert sum(locked.sizes) == memory.size_bytes == memory.free_bytes == (1 << 20) + (1 << 17)
    locked.sizes.clear()
    kept = []
    for seed in range(12):
        names = frozenset(NAMES) if seed % 3 else frozenset({"embed_tokens"})
        ours = weights(seed + 1, names, 1 + seed % MOST, {}, torch.bfloat16)
        words = ours.loras["embed_tokens"].lora_a.clone()
        before = memory.free_bytes
        kept.append(plugin.pack(ours, plugin.draft(ours)))
        assert before - memory.free_bytes == resident.size_bytes(kept[-1])
        assert kept[-1].loras.keys() == {"embed_tokens"}
        assert torch.equal(kept[-1].loras["embed_tokens"].lora_a, words.float())
        if seed % 4 == 3:
            del kept[0]
    parts = [part.memory for part in memory._parts]
    arena = [range(part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts]
    for one in kept:
        table = one.loras["embed_tokens"]
        there = [t.data_ptr() for t in (one.slab.data, table.lora_a, table.lora_b) if t.numel()]
        assert all(any(address in part for part in arena) for address in there)
    del ours, table, one
    kept.clear()
    assert memory.free_bytes == memory.size_bytes
    assert locked.sizes == []


def test_memory_that_cannot_be_locked_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not start: it would copy from pageable memory, in its steps."""
    locked = Locked(monkeypatch)

    def refuse(size_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(layers, "page_locked", refuse)
    with pytest.raises(MemoryError, match="set a smaller LORA_FS_HOST_BYTES, now 1048576"):
        managers(monkeypatch, 0, 1, torch.float32, host_bytes=1 << 20)
    assert locked.sizes == []


def test_a_failed_copy_leaves_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slot was half filled with is zero again wherever the next adapter does not write."""
    stock, plugin = managers(monkeypatch, 0, 1, torch.float32)
    large = weights(1, frozenset(WHOLE), MOST, {}, torch.float32)
    plugin.admit(plugin.pack(large, plugin.draft(large)), 1)
    copy = torch._foreach_copy_

    def fail(targets: list[torch.Tensor], sources: list[torch.Tensor], **kwargs: Any) -> None:
        copy(targets[::2], sources[::2], **kwargs)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch, "_foreach_copy_", fail)
    with pytest.raises(RuntimeError, match="device"):
        plugin.activate_adapter(1)
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    assert plugin.lora_index_to_id == [None] * SLOTS
    for manager in (stock, plugin):
        other = weights(2, frozenset({"o_proj"}), 2, {}, torch.float32)
        if manager is stock:
            manager.add_adapter(other)
        else:
            manager.admit(manager.pack(other, manager.draft(other)), 1)
        manager.activate_adapter(2)
    wanted, found = of_slot(stock, 0), of_slot(plugin, 0)
    assert all(all(map(torch.equal, wanted[name], found[name])) for name in wanted)
