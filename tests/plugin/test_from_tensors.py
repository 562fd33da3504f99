"""Adapters from memory: judged as files are, packed as files are, and written nowhere that lasts."""

from __future__ import annotations

import ast
import asyncio
import json
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from vllm.lora.request import LoRARequest
from vllm.v1.worker.worker_base import WorkerBase

from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, InputError, InvalidAdapter, NoSpareRoom
from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation, validate
from lora_fs.worker_patch import from_tensors
from lora_fs.worker_patch.api import in_memory
from lora_fs.worker_patch.from_tensors import (
    load_lora_adapter_from_tensors,
    load_lora_adapter_from_tensors_async,
    unload_lora_adapter,
    unload_lora_adapter_async,
)
from lora_fs.worker_patch.worker import hooks, rpc
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from tests.engine.bad_adapters import BAD
from tests.plugin.block import WHOLE, Make
from tests.plugin.test_room import worker

Tensors = dict[str, torch.Tensor]

RANK = 8
CONFIG = {"r": RANK, "lora_alpha": 8, "target_modules": set(WHOLE), "peft_type": "LORA"}
BASE = {  # of a Llama of two layers
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
ONLY_AS_FILES = {"fifo", "bad-json", "truncated", "no-weights"}


class InThisProcess:
    """What is asked of a vLLM in the caller's process; its one worker's manager is the real one."""

    def __init__(self, manager: TieredWorkerManager, base: dict[str, Any]) -> None:
        self.manager = manager
        self._worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
        model = SimpleNamespace(model="tiny", hf_config=SimpleNamespace(to_dict=lambda: base))
        self.vllm_config = SimpleNamespace(lora_config=manager.lora_config, model_config=model)
        self.llm_engine: Any = SimpleNamespace(vllm_config=self.vllm_config)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        assert method == hooks.RPC
        json.dumps(args)  # it crosses processes
        return [rpc.answer(self._worker, *args)]


class Beside(InThisProcess):
    """The same, while it serves."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:  # type: ignore[override]
        return super().collective_rpc(method, args)


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerBase, hooks.RPC, None, raising=False)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the files are for as long as a load takes."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(in_memory, "MEMORY", folder)
    return folder


def tensors(seed: int) -> Tensors:
    random, made = torch.Generator().manual_seed(seed), {}
    for name, (inputs, outputs) in WHOLE.items():
        made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=random)
        made[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=random)
    return made


@pytest.fixture
def llm(make: Make) -> Any:
    return InThisProcess(worker(make, 1 << 20), {})


def slab(manager: TieredWorkerManager, request: LoRARequest) -> torch.Tensor:
    return manager._adapter_manager._registered_adapters[request.lora_int_id].slab.data


def test_what_is_packed_is_what_a_folder_packs(llm: Any, memory: Path, tmp_path: Path) -> None:
    """To the bit; its files are gone when it is there."""
    request = load_lora_adapter_from_tensors(llm, "policy", tensors(1), CONFIG)
    assert list(memory.iterdir()) == []
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(tensors(1), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG, default=sorted))
    filed = llm.manager._prepare(LoRARequest("filed", 9, str(folder)))
    assert torch.equal(slab(llm.manager, request), filed.slab.data)
    assert llm.manager.named[request.lora_int_id] == "policy"


def test_other_tensors_are_another_revision(llm: Any, memory: Path) -> None:
    """It has another name and integer id in the engine; the same tensors have the same."""
    first, second, again = (
        load_lora_adapter_from_tensors(llm, "policy", tensors(seed), CONFIG) for seed in (1, 2, 1)
    )
    assert first.lora_name != second.lora_name
    assert first.lora_int_id != second.lora_int_id
    assert (again.lora_name, again.lora_int_id) == (first.lora_name, first.lora_int_id)
    assert first.lora_name.startswith("policy@")
    assert llm.manager.counters["host_loads"] == 2
    assert llm.manager.counters["host_loads_alike"] == 1
    for request in (first, second):
        unload_lora_adapter(llm, request)
    assert llm.manager.tiers.entries == {}


def test_tied_tensors_are_an_adapter_too(llm: Any, memory: Path) -> None:
    """Two names of one storage: the file's format has each by itself."""
    tied, one = tensors(3), "base_model.model.gate_proj.lora_A.weight"
    tied["base_model.model.up_proj.lora_A.weight"] = tied[one]
    apart = {name: tensor.clone() for name, tensor in tied.items()}
    found = [load_lora_adapter_from_tensors(llm, "policy", made, CONFIG) for made in (tied, apart)]
    assert len({request.lora_int_id for request in found}) == 1, "the same bytes"


def test_a_shard_is_no_adapter(tmp_path: Path) -> None:
    """To gather one is a call of all ranks, which only the program can make."""
    distributed.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        told = r"^x is a DTensor, .*: give tensor\.full_tensor\(\)$"
        with pytest.raises(InputError, match=told), in_memory.files_of({"x": shard}, CONFIG):
            pass
        with in_memory.files_of({"x": shard.full_tensor()}, CONFIG) as folder:
            assert torch.equal(load_file(folder / "adapter_model.safetensors")["x"], torch.ones(4, 4))
    finally:
        distributed.destroy_process_group()


def test_views_of_one_buffer_are_adapters_too(llm: Any, memory: Path) -> None:
    """As optimizers keep them flat, transposed, stacked, or with a gradient."""
    whole = tensors(3)
    flat = torch.cat([tensor.flatten() for tensor in whole.values()])
    parts = flat.split([tensor.numel() for tensor in whole.values()])
    views = {name: part.view(t.shape) for (name, t), part in zip(whole.items(), parts, strict=True)}
    turned = {name: torch.nn.Parameter(tensor.T.contiguous().T) for name, tensor in whole.items()}
    stacked = {name: torch.stack([tensor.T, tensor.T])[1].T for name, tensor in whole.items()}
    ways = (whole, views, turned, stacked)
    requests = [load_lora_adapter_from_tensors(llm, "p", made, CONFIG) for made in ways]
    assert len({request.lora_name for request in requests}) == 1


def test_pefts_own_configuration_is_taken(llm: Any, memory: Path) -> None:
    """And means what its dictionary means."""
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=list(WHOLE))
    by_peft = load_lora_adapter_from_tensors(llm, "p", tensors(1), config)
    by_hand = load_lora_adapter_from_tensors(llm, "p", tensors(1), CONFIG | {"lora_alpha": 16})
    assert torch.equal(slab(llm.manager, by_peft), slab(llm.manager, by_hand))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder that fits ``BASE``."""
    folder, made = tmp_path / "good", {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            made[f"{path}.lora_A.weight"] = torch.randn(4, 64)
            made[f"{path}.lora_B.weight"] = torch.randn(64, 4)
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    told = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("kind", sorted(BAD.keys() - ONLY_AS_FILES))
def test_bad_tensors_have_the_findings_of_bad_files(
    make: Make, memory: Path, good: Path, tmp_path: Path, kind: str
) -> None:
    """Code, file, field, message and hint are the same; nothing is loaded, and nothing is left."""
    folder = BAD[kind].make(good, tmp_path / "bad")
    manager = worker(make, 1 << 20)
    most = manager.lora_config.max_lora_rank
    filed = validate(folder, Expectation(("tiny",), BASE, most)).errors
    assert BAD[kind].finding in {finding.code for finding in filed}
    made = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    with pytest.raises(InvalidAdapter) as caught:
        load_lora_adapter_from_tensors(InThisProcess(manager, BASE), "bad", made, config)
    assert caught.value.findings == filed
    assert str(memory) not in str(caught.value)
    assert list(memory.iterdir()) == []
    assert manager.tiers.entries == {}


def test_what_does_not_fit_the_model_is_refused(llm: Any, memory: Path) -> None:
    """The worker says which layer; where its files were is nobody's matter."""
    made = {name.replace("o_proj", "no_proj"): tensor for name, tensor in tensors(1).items()}
    config = CONFIG | {"target_modules": sorted({*WHOLE, "no_proj"} - {"o_proj"})}
    with pytest.raises(EngineRejected, match="no_proj") as caught:
        load_lora_adapter_from_tensors(llm, "bad", made, config)
    assert str(memory) not in str(caught.value)
    assert llm.manager.tiers.entries == {}


def test_it_stays_until_it_is_unloaded(llm: Any, memory: Path) -> None:
    """Nobody makes it go: what comes when host memory is full is refused, and leaves nothing."""
    first = load_lora_adapter_from_tensors(llm, "first", tensors(1), CONFIG)
    llm.manager.tiers.budget_bytes = 2 * llm.manager.tiers.used_bytes - 1
    with pytest.raises(NoSpareRoom, match="second"):
        load_lora_adapter_from_tensors(llm, "second", tensors(2), CONFIG)
    assert llm.manager.tiers.entries.keys() == {first.lora_int_id}
    unload_lora_adapter(llm, first)
    second = load_lora_adapter_from_tensors(llm, "second", tensors(2), CONFIG)
    assert llm.manager.tiers.entries.keys() == {second.lora_int_id}


@pytest.mark.anyio
async def test_an_engine_that_serves_loads_it_beside(make: Make, memory: Path) -> None:
    """The same adapter; the program's loop is not blocked by the call."""
    llm: Any = Beside(worker(make, 1 << 20), {})
    request = await load_lora_adapter_from_tensors_async(llm, "policy", tensors(1), CONFIG)
    assert llm.manager.tiers.entries.keys() == {request.lora_int_id}
    assert list(memory.iterdir()) == []
    await unload_lora_adapter_async(llm, request)
    assert llm.manager.tiers.entries == {}


class Ranks(Beside):
    """Two ranks of one engine; the second is ``slow``, or ``breaks``."""

    def __init__(self, make: Make, budget_bytes: int) -> None:
        super().__init__(worker(make, budget_bytes), {})
        self.slow, self.breaks, self.asked = False, False, asyncio.Event()
        self.second = worker(make, budget_bytes)
        self._second: Any = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=self.second))
        self.manager._alone = self.second._alone = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:  # type: ignore[override]
        answers = await super().collective_rpc(method, args)
        if args[0] == "load" and self.slow:
            self.asked.set()
            return [*answers, {"state": "loading", "reason": ""}]
        if args[0] == "load" and self.breaks:
            return [*answers, {"error": "no thread is left"}]
        return [*answers, rpc.answer(self._second, *args)]


@pytest.mark.anyio
@pytest.mark.parametrize("why", ["cancelled", "broken on one rank"])
async def test_a_load_that_nobody_waits_for_any_more_takes_no_room(
    make: Make, memory: Path, why: str
) -> None:
    """Its room is the next one's, on every rank, and its name can be loaded again."""
    llm: Any = Ranks(make, 1 << 20)
    request = await load_lora_adapter_from_tensors_async(llm, "policy", tensors(1), CONFIG)
    size = llm.manager.tiers.used_bytes
    await unload_lora_adapter_async(llm, request)
    for manager in (llm.manager, llm.second):
        manager.tiers.budget_bytes = 3 * size // 2
    llm.slow, llm.breaks = why == "cancelled", why != "cancelled"
    load = asyncio.create_task(load_lora_adapter_from_tensors_async(llm, "policy", tensors(2), CONFIG))
    if llm.slow:
        await llm.asked.wait()
        load.cancel()
    with pytest.raises(asyncio.CancelledError if llm.slow else EngineUnavailable):
        await load
    llm.slow = llm.breaks = False
    for seed in (3, 2):
        request = await load_lora_adapter_from_tensors_async(llm, "policy", tensors(seed), CONFIG)
        for manager in (llm.manager, llm.second):
            assert manager.tiers.entries.keys() == {request.lora_int_id}
        await unload_lora_adapter_async(llm, request)
    assert list(memory.iterdir()) == []


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    marker.create(folder)
    monkeypatch.setenv("LORA_FS_ROOT", str(folder))
    return folder


def files(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_the_volume_is_written_to_for_who_asks(llm: Any, memory: Path, root: Path) -> None:
    """Without it nothing there changes; with it the name has a revision with the same bytes."""
    before = files(root)
    kept = load_lora_adapter_from_tensors(llm, "policy", tensors(1), CONFIG)
    assert files(root) == before
    registered = load_lora_adapter_from_tensors(llm, "policy", tensors(1), CONFIG, register=True)
    registry = Registry(root)
    _, record = registry.latest(registry.records(AdapterKey("default", "tiny", "v1", "policy")))
    assert record is not None
    assert registered.lora_int_id == record.spec.int_id
    assert registered.lora_name == f"policy@v1@{kept.lora_name.rpartition('@')[2]}"
    assert torch.equal(slab(llm.manager, kept), slab(llm.manager, registered))


@pytest.mark.parametrize(
    ("made", "config", "says"),
    [
        ({"a": [1.0]}, CONFIG, "no dense torch.Tensor"),
        ({"a": torch.empty(2, device="meta")}, CONFIG, "no dense torch.Tensor"),
        ({"a": torch.ones(2)}, {"r": torch.ones(1)}, "is not JSON"),
        ({"a": torch.ones(2)}, {("r", 8): 8}, "is not JSON"),
        ({"a": torch.ones(2)}, {"target_modules": {"q", 1}}, "is not JSON"),
        ({1: torch.ones(2)}, CONFIG, "no tensors that a safetensors file can hold"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, CONFIG, "can hold: torch.complex128"),
    ],
)
def test_what_is_no_adapter_at_all(llm: Any, memory: Path, made: Any, config: Any, says: str) -> None:
    """Says what to give."""
    with pytest.raises(InputError, match=says):
        load_lora_adapter_from_tensors(llm, "bad", made, config)
    assert list(memory.iterdir()) == []


def test_an_engine_without_the_plugin(llm: Any, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting that is missing at its start."""
    monkeypatch.delattr(WorkerBase, hooks.RPC)
    with pytest.raises(InputError, match="VLLM_PLUGINS=lora_fs"):
        load_lora_adapter_from_tensors(llm, "policy", tensors(1), CONFIG)


def test_the_page_calls_what_is_there() -> None:
    """Names and arguments of its example."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "from-memory.md"
    tree = ast.parse(page.read_text().split("```text\n")[1].split("```")[0])
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    ours = [call for call in calls if hasattr(from_tensors, call.func.id)]  # type: ignore[attr-defined]
    assert len(ours) == 2
    for call in ours:
        function = getattr(from_tensors, call.func.id)  # type: ignore[attr-defined]
        signature(function).bind(*call.args, **{str(one.arg): one.value for one in call.keywords})
