"""What a load is given room for, and what becomes of it where there is none."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import defaultdict
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from lora_fs.kernels.memory.extents import StorageFullError
from lora_fs.kernels.weights.slabs import Slab
from lora_fs.worker_patch.notices import Notices
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.load import fits, loader
from lora_fs.worker_patch.worker.load.alike import Alike
from lora_fs.worker_patch.worker.load.in_place import InPlace
from lora_fs.worker_patch.worker.load.loader import Loader
from lora_fs.worker_patch.worker.load.resident import AsOnDisk, Resident
from lora_fs.worker_patch.worker.load.under_way import UnderWay
from lora_fs.worker_patch.worker.managers import STOCK, TieredWorkerManager
from tests.plugin.block import WHOLE, WORDS, Make, Model

ID = 7


class Files:
    """An adapter on the disk, in float32."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        tensors = {}
        for name, (inputs, outputs) in WHOLE.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(8, inputs)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 8)
        save_file(tensors, folder / "adapter_model.safetensors")
        told = {"r": 8, "lora_alpha": 8, "target_modules": list(WHOLE), "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(told))
        self.path = str(folder)
        self.size_bytes = (folder / "adapter_model.safetensors").stat().st_size

    def break_it(self) -> None:
        Path(self.path, "adapter_model.safetensors").write_bytes(b"")

    @property
    def request(self) -> LoRARequest:
        return LoRARequest("support", ID, self.path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "support")


def worker(
    make: Make,
    budget_bytes: int,
    dtype: torch.dtype = torch.float32,
    *,
    rank: int = 0,
    size: int = 1,
    kernels: str = "torch",
) -> TieredWorkerManager:
    """A worker's manager, of a model with a host tier of so many bytes."""
    found: Any = TieredWorkerManager.__new__(TieredWorkerManager)
    manager = found._adapter_manager = make(kernels, rank, size, dtype=dtype)
    manager.tiers.budget_bytes = budget_bytes
    found._cached_dummy_lora, found._lora_model_cls, found._loader, found._alike = (
        False,
        AsOnDisk,
        Loader(),
        Alike(),
    )
    found.notices = Notices()
    found._alone, found.under_way = True, UnderWay()
    found.named, found.failures, found._too_big, found.blank = {}, {}, {}, {}
    found.in_place = InPlace()
    found.counters = defaultdict(float)
    found.lora_config, found.vocab_size, found.max_position_embeddings = manager.lora_config, WORDS, 128
    found.embedding_modules = Model.embedding_modules
    return found  # type: ignore[no-any-return]


def load(manager: TieredWorkerManager, files: Files, **more: object) -> dict[str, Any]:
    """As the API server asks, which waits."""
    ask = {
        "id": ID,
        "name": "support",
        "path": files.path,
        "size_bytes": files.size_bytes,
        "dtype": "float32",
    }
    ask |= {
        "priority": 0,
        "pinned": False,
        "spare": False,
        "user": "api",
        "sequence": 1,
        "again": True,
        "wait_s": 20,
        **more,
    }
    runner = SimpleNamespace(lora_manager=manager)
    return rpc.answer(SimpleNamespace(model_runner=runner), "load", ask)


def test_files_of_a_wider_type_than_the_engines(make: Make, files: Files) -> None:
    """They take half in memory, and have room where their files would have none."""
    manager = worker(make, files.size_bytes * 3 // 4, torch.bfloat16)
    assert manager._packed_bytes({"size_bytes": 1000, "dtype": "float32"}) == 500
    assert load(manager, files) == {"state": "ready", "reason": ""}
    assert manager.tiers.used_bytes <= files.size_bytes // 2


@pytest.mark.parametrize(
    ("kernels", "dtype", "times"),
    [("torch", "float8_e4m3fn", 4), ("torch", "bfloat16", 2), ("numba", "bfloat16", 1), ("torch", "?", 1)],
)
def test_files_of_a_narrower_type_than_the_engines(make: Make, kernels: str, dtype: str, times: int) -> None:
    """They take more in memory, unless kernels read them as they are. Of an unknown type nobody can say."""
    manager = worker(make, 0, kernels=kernels)
    assert manager._packed_bytes({"size_bytes": 1000, "dtype": dtype}) == times * 1000


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_pickle_is_read_for_nan(make: Make, files: Files, value: float) -> None:
    """Validation reads no pickle that is allowed: one NaN in it is a refusal that names the layer."""
    weights = Path(files.path) / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = value
    torch.save(tensors, weights.with_name("adapter_model.bin"))
    weights.unlink()
    manager = worker(make, 2 * files.size_bytes)
    answer = load(manager, files, dtype="unknown")
    assert answer["state"] == ("ready" if value == 1 else "failed")
    assert ("holds NaN or Inf" in answer["reason"]) is (value != 1)
    assert value != 1 or manager.add_adapter(LoRARequest("another", ID + 1, files.path))


def test_an_adapter_without_weights(make: Make, files: Files) -> None:
    """As one of vLLM's own calls may name."""
    save_file({}, Path(files.path) / "adapter_model.safetensors")
    assert load(worker(make, 1000), files, size_bytes=1)["reason"] == f"{files.path} holds no LoRA weights"


def test_patterns_that_this_vllm_does_not_read(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load refuses them, also one that nobody validated."""
    monkeypatch.setattr(fits, "reads_patterns", lambda: False)
    config = Path(files.path) / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rank_pattern": {"q_proj": 8}}))
    assert "ignores rank_pattern" in load(worker(make, 2 * files.size_bytes), files)["reason"]


def test_what_was_given_up_leaves_its_room_to_the_next(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a rank of several, where no end of that load gives it back."""
    manager, go = worker(make, 3 * files.size_bytes // 2), threading.Event()
    manager._alone = False
    monkeypatch.setattr(manager, "_prepare", lambda request, **how: go.wait(20))
    assert load(manager, files, wait_s=0)["state"] == "loading"
    assert load(manager, files, wait_s=0, id=ID + 1)["state"] == "full"
    rpc.drop(manager, {"id": ID, "user": "api"})
    assert load(manager, files, wait_s=0, id=ID + 1)["state"] == "loading"
    assert [*manager.under_way] == [ID + 1]
    go.set()


@pytest.mark.parametrize("dtype", ["float32", "mixed", "no_grad"])
def test_what_never_fits_is_told_so(make: Make, files: Files, dtype: str) -> None:
    """At once, and not as if others were in its way."""
    manager = worker(make, 1000)
    answer = load(manager, files, dtype=dtype)
    assert answer["state"] == "failed"
    assert answer["reason"] == f"it takes {files.size_bytes} bytes, and LORA_FS_HOST_BYTES is 1000"
    assert (manager.tiers.free_bytes, [*manager.under_way]) == (1000, [])


def test_what_turns_out_to_be_too_large(make: Make, files: Files) -> None:
    """It is loaded to know it, once."""
    manager = worker(make, 1000)
    for _ in range(2):
        answer = load(manager, files, size_bytes=10)
    assert answer["state"] == "failed"
    assert "LORA_FS_HOST_BYTES is 1000" in answer["reason"]
    assert manager.tiers.free_bytes == 1000


def test_a_load_that_cannot_be_begun(make: Make, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left: its room is given back, and the next call tries again."""
    manager, usual = worker(make, files.size_bytes), sys.getswitchinterval()
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread"))
        )
        assert "no thread" in load(manager, files)["error"]
    assert (manager.tiers.free_bytes, [*manager.under_way]) == (files.size_bytes, [])
    assert sys.getswitchinterval() == usual
    assert load(manager, files)["state"] == "ready"


def test_the_seconds_of_loads_are_of_those_that_are_counted(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each from its start to its end, whenever somebody asks; of none that failed."""
    manager, now = worker(make, 2 * files.size_bytes), [100.0]
    monkeypatch.setattr(loader, "monotonic", lambda: now[0])
    prepare = manager._prepare

    def takes_5_s(request: LoRARequest, **how: bool) -> Resident:
        now[0] += 5
        return prepare(request, **how)

    monkeypatch.setattr(manager, "_prepare", takes_5_s)
    (broken := Files(Path(files.path).with_name("broken"))).break_it()
    assert load(manager, broken, id=ID + 1)["state"] == "failed"
    load(manager, files, wait_s=0)
    manager._loader.wait(ID, 60)
    now[0] += 60
    assert load(manager, files)["state"] == "ready"
    assert (manager.counters["host_loads"], manager.counters["host_load_seconds"]) == (1, 5)


def test_vllms_own_call_is_no_request(make: Make, files: Files) -> None:
    """It counts neither as one that found its adapter, nor as one that did not."""
    manager = worker(make, 2 * files.size_bytes)
    manager.add_adapter(files.request)
    counters = manager.tiers.counters
    assert (counters["cpu_hits"], counters["cpu_misses"]) == (0, 0)
    assert manager.tiers.entries[ID].holders.keys() == {STOCK}


def test_vllms_own_call_beside_a_load(make: Make, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds it goes on holding when the load ends."""
    manager, go = worker(make, 2 * files.size_bytes), threading.Event()
    prepare = manager._prepare
    with monkeypatch.context() as patch:
        patch.setattr(
            manager, "_prepare", lambda request, **how: prepare(request, **how) if go.wait(20) else None
        )
        assert load(manager, files, wait_s=0)["state"] == "loading"
    manager.add_adapter(files.request)
    go.set()
    manager.wait(ID, 20, "api")
    entry = manager.tiers.entries[ID]
    assert entry.holders.keys() == {STOCK}
    assert entry.users == {STOCK, "api"}
    assert manager.tiers.slots.count(ID) == 1
    assert manager.tiers.free_bytes == 2 * files.size_bytes - entry.size_bytes


@pytest.mark.parametrize("call", ["hold", "sync"])
def test_any_call_takes_in_a_load_that_ended(make: Make, files: Files, call: str) -> None:
    manager = worker(make, 2 * files.size_bytes)
    assert load(manager, files, wait_s=0)["state"] == "loading"
    assert manager._loader.wait(ID, 60)
    ask = {"id": ID, "user": "api", "sequence": 2, "holds": [ID], "policies": {}}
    answer = rpc.CALLS[call](manager, ask)
    assert answer.get("held") or [*answer["resident"]] == [str(ID)]


def test_a_load_that_a_call_waits_for_notifies_the_other_servers_alone(
    make: Make, files: Files, tmp_path: Path
) -> None:
    """The call's answer says it to its own server. A notice would wake that server's loop once more."""
    manager = worker(make, 2 * files.size_bytes)
    heard = {user: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for user in ("api", "other")}
    with heard["api"] as own, heard["other"] as others:
        for user, server in heard.items():
            server.bind(str(tmp_path / user))
            manager.notices.reach(user, str(tmp_path / user))
        others.settimeout(20)
        assert load(manager, files, notices=str(tmp_path / "api"))["state"] == "ready"
        assert json.loads(others.recv(1000))["ended"] == ID
        rpc.drop(manager, {"id": ID, "user": "api"})
        assert load(manager, files, wait_s=0, sequence=2, notices=str(tmp_path / "api"))["load"] == "api 2"
        assert json.loads(others.recv(1000))["load"] == "api 2"
        own.settimeout(20)
        assert json.loads(own.recv(1000))["load"] == "api 2", "the first one was not for it"


def test_a_load_that_outlasts_its_call_notifies_that_server_too(
    make: Make, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call's answer was that the load goes on."""
    manager, go = worker(make, 2 * files.size_bytes), threading.Event()
    prepare = manager._prepare
    monkeypatch.setattr(
        manager, "_prepare", lambda request, **how: prepare(request, **how) if go.wait(20) else None
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(tmp_path / "api"))
        own.settimeout(20)
        assert load(manager, files, wait_s=0.001, notices=str(tmp_path / "api"))["state"] == "loading"
        go.set()
        assert json.loads(own.recv(1000))["load"] == "api 1"


def test_memory_for_the_next_load(make: Make, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready before anybody asks for it, and goes back to the system when an adapter leaves."""
    manager, done = worker(make, 3 * files.size_bytes), SimpleQueue[object]()
    layers = manager._adapter_manager.layers
    monkeypatch.setattr(layers, "prepare", lambda *sizes: done.put(sizes))
    monkeypatch.setattr(layers, "give_back", lambda: done.put("given back"))
    load(manager, files)
    packed = manager._adapter_manager.get_adapter(ID).slab.data.nbytes
    assert done.get(timeout=60) == (packed, manager.tiers.free_bytes)
    manager.remove(ID)
    assert done.get(timeout=60) == "given back"


@pytest.mark.parametrize("pinned", [False, True])
def test_how_a_load_is_to_be_kept(make: Make, files: Files, pinned: bool) -> None:
    """Its priority, and whether it is pinned, are those it was asked for with."""
    manager = worker(make, 2 * files.size_bytes)
    assert load(manager, files, priority=3, pinned=pinned)["state"] == "ready"
    entry = manager.tiers.entries[ID]
    assert (entry.priority, entry.pinned) == (3, pinned)


def test_a_step_that_cannot_wait_for_a_load(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs blank, as only what bypasses the gate can; who waits for the load gets the adapter."""
    manager, go = worker(make, 2 * files.size_bytes), threading.Event()
    prepare = manager._prepare
    with monkeypatch.context() as patch:
        patch.setattr(
            manager, "_prepare", lambda request, **how: prepare(request, **how) if go.wait(20) else None
        )
        assert load(manager, files, wait_s=0)["state"] == "loading"
    manager.set_active_adapters({LoRARequest("support", ID, files.path + "-gone")}, None)
    assert manager.blank.keys() == {ID}
    go.set()
    manager.wait(ID, 20, "api")
    assert (manager.blank, manager.failures) == ({}, {})
    assert load(manager, files, again=False)["state"] == "ready"
    assert manager.tiers.entries[ID].size_bytes > 0


def test_a_step_that_finds_no_room_leaves_a_load_its_own(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next load would be begun in that room, and both would take it."""
    manager, go = worker(make, 2 * files.size_bytes), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_prepare", lambda request, **how: go.wait(20))
        assert load(manager, files, wait_s=0)["state"] == "loading"
    manager.tiers.admit(1, files.size_bytes * 3 // 2)
    manager.tiers.hold(1, "api", 1)
    manager.set_active_adapters({files.request}, None)
    assert manager.blank.keys() == {ID}
    assert load(manager, files, wait_s=0, id=ID + 1, size_bytes=1)["state"] == "full"
    go.set()


@pytest.mark.parametrize("said", [1.0, 0.1])
def test_nobody_goes_for_what_nobody_asked_for(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch, said: float
) -> None:
    """It is not read; or once, where that it is too large is known then alone."""
    manager = worker(make, 2 * files.size_bytes)
    reads: list[LoRARequest] = []
    prepare = manager._prepare

    def reading(request: LoRARequest, **how: bool) -> Resident:
        reads.append(request)
        return prepare(request, **how)

    monkeypatch.setattr(manager, "_prepare", reading)
    manager.tiers.admit(1, int(1.5 * files.size_bytes))
    manager.named[1] = "other"
    size_bytes = int(said * files.size_bytes)
    for _ in range(3):
        assert load(manager, files, spare=True, size_bytes=size_bytes)["state"] in ("full", "loading")
    assert load(manager, files, spare=True, size_bytes=size_bytes)["state"] == "full"
    assert len(reads) == (said < 1)
    assert manager.tiers.entries.keys() == {1}
    assert load(manager, files, size_bytes=size_bytes)["state"] == "ready"
    assert manager.tiers.entries.keys() == {ID}
    manager.remove(ID)
    assert load(manager, files)["state"] == "ready"
    assert manager.named == {ID: "support"}, "what was evicted leaves no name"


def test_who_is_held_is_on_its_way_to_the_device(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the load on, before any step, and by one copy; and what goes leaves nothing there."""
    manager = worker(make, files.size_bytes)
    layers, went = manager._adapter_manager.layers, []
    monkeypatch.setattr(layers, "lands", True)
    monkeypatch.setattr(layers, "bring", lambda slab: went.append(("bring", slab)))
    monkeypatch.setattr(layers, "drop", lambda slab: went.append(("drop", slab)))
    assert load(manager, files)["state"] == "ready"
    slab = manager._adapter_manager.get_adapter(ID).slab
    assert went == [("bring", slab)]
    assert rpc.hold(manager, {"id": ID, "user": "api", "sequence": 2}) == {"held": True}
    assert rpc.hold(manager, {"id": ID + 1, "user": "api", "sequence": 3}) == {"held": False}
    assert went == [("bring", slab)]
    manager.tiers.leaving(needed=True)
    assert rpc.hold(manager, {"id": ID, "user": "api", "sequence": 4}) == {"held": True}
    assert went == 2 * [("bring", slab)]
    manager.remove(ID)
    assert went[2:] == [("drop", slab)]


def test_a_device_that_takes_nothing_fails_no_call(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that needs the adapter copies it, or says why not."""
    manager = worker(make, files.size_bytes)

    def full(slab: Slab) -> None:
        raise StorageFullError(1, 0, 0)

    monkeypatch.setattr(manager._adapter_manager.layers, "lands", True)
    monkeypatch.setattr(manager._adapter_manager.layers, "bring", full)
    assert load(manager, files) == {"state": "ready", "reason": ""}
