"""Steps that load adapters themselves, as for requests that pass no gate: offline, or by vLLM's calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.worker.load.alike import Kind
from lora_fs.worker_patch.worker.load.in_place import InPlace
from lora_fs.worker_patch.worker.load.resident import Resident, size_bytes
from lora_fs.worker_patch.worker.managers import STOCK, TieredWorkerManager
from lora_fs.worker_patch.worker.slots import steps
from tests.plugin.block import SLOTS, Make, adapter, packed
from tests.plugin.test_models import slot_has
from tests.plugin.test_room import ID, Files, worker

KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton", "off"])
ROOM = 1 << 26


def mapping(*ids: int) -> LoRAMapping:
    return LoRAMapping(ids, ids, is_prefill=True)


def crowded(make: Make, kernels: str) -> TieredWorkerManager:
    """A worker with an adapter in every slot, all but one of them pinned."""
    manager = worker(make, ROOM, kernels=kernels)
    models, others = manager._adapter_manager, range(30, 30 + SLOTS)
    for number in others:
        resident = packed(models, adapter(number))
        models.admit(resident, size_bytes(resident))
    manager.set_active_adapters({LoRARequest(f"n{number}", number, "/x") for number in others}, None)
    for number in others[:-1]:
        models.pin_adapter(number)
    manager.set_active_adapters(set(), None)
    return manager


def resident(manager: TieredWorkerManager, number: int) -> Resident:
    found: Any = manager._adapter_manager.get_adapter(number)
    return found  # type: ignore[no-any-return]


def slots_of_rows(manager: TieredWorkerManager) -> list[int]:
    """The slot that the kernels read for each row."""
    wrapper: Any = manager._adapter_manager.punica_wrapper_mapping["language_model"]
    if not hasattr(wrapper, "tokens"):
        return wrapper.token_lora_indices.tolist()  # type: ignore[no-any-return]
    slots = [-1] * wrapper.tokens.rows
    for slot, start, count in wrapper.tokens.segments:
        for row in wrapper.tokens.order[start : start + count]:
            slots[row] = slot
    return slots


@KERNELS
def test_a_step_loads_several(make: Make, tmp_path: Path, kernels: str) -> None:
    """Each has a slot with its own weights, whoever else of the step is loaded after it."""
    manager, numbers = crowded(make, kernels), (8, 15, 22)
    requests = {LoRARequest(f"a{number}", number, Files(tmp_path / f"a{number}").path) for number in numbers}
    manager.set_active_adapters(requests, mapping(*numbers, 0))
    assert manager.counters["blank_runs"] == 0
    slots = [manager.tiers.slots.index(number) for number in numbers]
    assert slots_of_rows(manager) == [*slots, -1]
    assert all(slot_has(manager._adapter_manager, resident(manager, number)) for number in numbers)


def test_one_of_a_step_that_lost_its_slot(make: Make, tmp_path: Path) -> None:
    """The next step gives it one, though nothing else of it begins."""
    manager, numbers = worker(make, ROOM), (8, 15)
    requests = {LoRARequest(f"a{number}", number, Files(tmp_path / f"a{number}").path) for number in numbers}
    manager.set_active_adapters(requests, mapping(*numbers))
    manager._adapter_manager.deactivate_adapter(15)
    manager.set_active_adapters(requests, mapping(*numbers))
    assert slots_of_rows(manager) == [manager.tiers.slots.index(number) for number in numbers]


@KERNELS
def test_a_lost_adapter_beside_others(make: Make, tmp_path: Path, kernels: str) -> None:
    """Its rows are the base model's, the others have their adapter, and no step ends."""
    manager, files = crowded(make, kernels), Files(tmp_path / "fine")
    requests = {LoRARequest("lost", 8, "/gone"), LoRARequest("fine", 15, files.path)}
    for _ in range(2):
        manager.set_active_adapters(requests, mapping(8, 15, 8))
    assert manager.counters["blank_runs"] == 1
    assert slots_of_rows(manager) == [-1, manager.tiers.slots.index(15), -1]
    assert slot_has(manager._adapter_manager, resident(manager, 15))


@pytest.mark.since("0.31", "no adapter brings a classification head before it")
@KERNELS
def test_a_classification_head_without_the_adapter(make: Make, kernels: str) -> None:
    """vLLM looks each row's slot up for it, and fails where there is none."""
    manager, rows = worker(make, ROOM, kernels=kernels), list[tuple[int, ...]]()
    models: Any = manager._adapter_manager
    wrapper = models.punica_wrapper_mapping["language_model"]
    models._classification_head = (
        "score",
        SimpleNamespace(punica_wrapper=wrapper, set_output_mapping=rows.append),
    )
    manager.set_active_adapters({LoRARequest("lost", 8, "/gone")}, mapping(8, 0))
    assert rows == [(-1, -1)]


@KERNELS
def test_a_static_adapter_comes_back(
    make: Make, tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error while its slot is filled costs it a second, not its weights and not vLLM's hold."""
    manager, now = worker(make, ROOM, kernels=kernels), [100.0]
    monkeypatch.setattr(steps, "monotonic", lambda: now[0])
    request, layers = (
        LoRARequest("static", 1, Files(tmp_path / "static").path),
        manager._adapter_manager.layers,
    )
    manager.add_adapter(request)
    manager._adapter_manager.deactivate_adapter(1)  # another batch took its slot
    with monkeypatch.context() as patch:
        patch.setattr(layers, "fill", lambda *args: (_ for _ in ()).throw(MemoryError("once")))
        manager.set_active_adapters({request}, mapping(1))
    assert slots_of_rows(manager) == [-1]
    manager.set_active_adapters({request}, mapping(1))
    assert slots_of_rows(manager) == [-1]
    now[0] += steps.RETRY_S
    manager.set_active_adapters({request}, mapping(1))
    assert slot_has(manager._adapter_manager, resident(manager, 1))
    assert manager.tiers.entries[1].holders.keys() == {STOCK}


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_each_step_has_its_sampled_rows_first(make: Make, tmp_path: Path, kernels: str) -> None:
    """Then its prompts' rows; also a step that has the same adapters and rows as the one before."""
    manager, request = worker(make, ROOM, kernels=kernels), LoRARequest("a", 8, Files(tmp_path / "a").path)
    wrapper: Any = manager._adapter_manager.punica_wrapper_mapping["language_model"]
    for _ in range(2):
        manager.set_active_adapters({request}, mapping(8, 0))
        assert wrapper.plan_of_logits(2) is wrapper.sampled
        assert wrapper.plan_of_logits(2) is not wrapper.sampled


def serves(manager: TieredWorkerManager, files: Files) -> bool:
    """Whether a step reads the weights of these files."""
    there = load_file(files.path + "/adapter_model.safetensors")["base_model.model.o_proj.lora_A.weight"]
    found = resident(manager, ID)
    return torch.equal(found.slab.views["o_proj"].a, there) and slot_has(manager._adapter_manager, found)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The folders that are read."""
    found, prepare = list[str](), TieredWorkerManager._prepare

    def counted(self: Any, request: LoRARequest, **how: bool) -> Resident:
        found.append(request.lora_path)
        return prepare(self, request, **how)

    monkeypatch.setattr(TieredWorkerManager, "_prepare", counted)
    return found  # type: ignore[return-value]


def in_place(files: Files) -> LoRARequest:
    return LoRARequest("policy", ID, files.path, load_inplace=True)


@KERNELS
def test_a_request_in_place_has_the_new_weights(
    make: Make, tmp_path: Path, reads: list[str], kernels: str
) -> None:
    """As in reinforcement learning: read once for each request, or once for several with the same files."""
    one, two = Files(tmp_path / "one"), Files(tmp_path / "two")
    manager = worker(make, ROOM, kernels=kernels)
    manager.add_adapter(LoRARequest("policy", ID, one.path))
    manager.tiers.pin(ID)
    request = in_place(two)
    for _ in range(3):
        manager.set_active_adapters({request}, mapping(ID))
        assert serves(manager, two)
    manager.set_active_adapters({in_place(two)}, mapping(ID))
    assert reads == [one.path, two.path]
    entry = manager.tiers.entries[ID]
    assert ({*entry.holders}, entry.pinned) == ({STOCK}, True)
    os.rename(two.path, tmp_path / "old")
    again = Files(tmp_path / "two")
    manager.set_active_adapters({in_place(again)}, mapping(ID))
    assert serves(manager, again)
    assert reads == [one.path, two.path, two.path]


def test_a_request_in_place_beside_another(make: Make, tmp_path: Path) -> None:
    """It has the new weights, though the step has the adapters of the last one."""
    one, two, manager = Files(tmp_path / "one"), Files(tmp_path / "two"), worker(make, ROOM)
    other = LoRARequest("other", ID + 1, one.path)
    for files in (one, two):
        manager.set_active_adapters({in_place(files), other}, mapping(ID, ID + 1))
        assert serves(manager, files)


def test_add_lora_reads_an_adapter_once(make: Make, tmp_path: Path, reads: list[str]) -> None:
    files, manager = Files(tmp_path / "one"), worker(make, ROOM)
    for _ in range(2):
        assert manager.add_adapter(LoRARequest("policy", ID, files.path))
    assert reads == [files.path]


def test_what_add_lora_read_in_place_no_step_reads_again(
    make: Make, tmp_path: Path, reads: list[str]
) -> None:
    """Before 0.33 vLLM's server hands its requests the flag of that call."""
    files, manager = Files(tmp_path / "one"), worker(make, ROOM)
    for _ in range(2):
        manager.add_adapter(in_place(files))
    manager.set_active_adapters({in_place(files)}, mapping(ID))
    assert reads == 2 * [files.path], "each call reads"


def test_what_add_lora_read_nobody_reads_later(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may cut the files short for its next weights: who reads their map then ends the engine."""
    files, manager, later = Files(tmp_path / "one"), worker(make, ROOM), list[object]()
    monkeypatch.setattr(manager._loader, "later", later.append)
    manager.add_adapter(in_place(files))
    assert later == []
    assert manager._alike.recipe(Kind.of(files.path)) is not None


def test_new_weights_that_cannot_be_read(make: Make, tmp_path: Path) -> None:
    """The step runs blank, since the old ones are not what the request asked for. They stay for others."""
    files, manager = Files(tmp_path / "one"), worker(make, ROOM)
    plain = LoRARequest("policy", ID, files.path)
    manager.set_active_adapters({plain}, mapping(ID))
    gone = LoRARequest("policy", ID, str(tmp_path / "gone"), load_inplace=True)
    for _ in range(2):
        manager.set_active_adapters({gone}, mapping(ID))
    assert slots_of_rows(manager) == [-1]
    assert manager.counters["blank_runs"] == 1
    manager.forget_blank(ID + 1)
    manager.blank.clear()  # some time later
    manager.set_active_adapters({plain}, mapping(ID))
    assert serves(manager, files)


def test_files_that_are_not_in_a_folder_are_read_for_each_request() -> None:
    """As those of a repository's name: whether they changed is not known."""
    reader, made = InPlace(), [LoRARequest("hub", 1, "org/adapter", load_inplace=True) for _ in range(2)]
    for request in made:
        assert reader.asks(request)
        reader.read(request, reader.reading(request))
        assert not reader.asks(request)
    reader.read(LoRARequest("hub", 1, "org/adapter"), None)
    assert reader.asks(made[-1]), "another call's weights are there now"
