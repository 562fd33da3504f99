"""Adapters of a kind are packed alike, byte for byte as vLLM's reader has them, and others never are."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from lora_fs.kernels.weights.layout import Layer, Shape
from lora_fs.worker_patch.worker.load import alike
from lora_fs.worker_patch.worker.load.alike import Alike, Kind
from lora_fs.worker_patch.worker.load.resident import AsOnDisk, Resident
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.models import TieredModelManager
from lora_fs.worker_patch.worker.slots.layers import ModelLayers, Target

WIDTHS = {"q_proj": 24, "k_proj": 8, "v_proj": 8, "o_proj": 16}
INPUTS = 16
PARTS = ["q_proj", "k_proj", "v_proj"]
SHAPES = {"m.qkv_proj": Shape(INPUTS, (24, 8, 8)), "m.o_proj": Shape(INPUTS, (16,))}

PATTERNS = pytest.mark.since("0.32", "rank_pattern and alpha_pattern are ignored before it, and refused")


class Linear(BaseLinearLayerWithLoRA):  # type: ignore[misc]
    """One of vLLM's, without a model."""

    def __init__(self, slices: int) -> None:
        torch.nn.Module.__init__(self)
        self.n_slices = slices


def target(shape: Shape) -> Target:
    return Target(Linear(len(shape.outputs)), shape, False, Layer.empty(shape, 2))


class Manager(TieredWorkerManager):
    """With vLLM's reader and its merging, and no model; ``read`` counts what the reader read."""

    def __init__(self) -> None:
        inner: Any = TieredModelManager.__new__(TieredModelManager)
        inner.layers = ModelLayers(2, 64, torch.float32, read=(torch.bfloat16,))
        inner.layers.targets = {name: target(shape) for name, shape in SHAPES.items()}
        inner.packed_modules = {"m.qkv_proj": [f"m.{part}" for part in PARTS]}
        inner.lora_config = SimpleNamespace(lora_dtype=torch.float32)
        inner.modules, inner.is_pooling_model, inner._whole_model, inner._no_heads = {}, False, False, False
        self._adapter_manager, self._alike = inner, Alike()
        self._loader: Any = self
        self.read = 0

    def _load_adapter(self, request: LoRARequest) -> Any:
        self.read += 1
        helper = PEFTHelper.from_local_dir(request.lora_path, 256)
        return AsOnDisk.from_local_checkpoint(
            request.lora_path,
            set(WIDTHS),
            peft_helper=helper,
            lora_model_id=request.lora_int_id,
            device="cpu",
            dtype=torch.float32,
        )

    def later(self, work: Callable[[], object]) -> None:
        """As the loader, without waiting."""
        work()

    def prepare(self, folder: Path, adapter: int = 1) -> Resident:
        return self._prepare(LoRARequest(folder.name, adapter, str(folder)))


def write(
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    layers: tuple[str, ...] = tuple(WIDTHS),
    dtype: torch.dtype = torch.float32,
    zeros: bool = False,
    **config: Any,
) -> Path:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in layers:
        for letter, shape in (("A", (rank, INPUTS)), ("B", (WIDTHS[name], rank))):
            values = torch.randn(shape, generator=generator).to(dtype)
            values *= not (zeros and letter == "B")
            tensors[f"base_model.model.m.{name}.lora_{letter}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {"r": rank, "lora_alpha": 8, "target_modules": list(layers), "peft_type": "LORA", **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def test_a_kind_is_known_without_its_header(tmp_path: Path) -> None:
    """Whoever makes adapters may fill a header with 100 MB of metadata: 16 of these stayed in memory."""
    manager, seen = Manager(), set[bytes]()
    for at in range(3):
        folder = write(tmp_path / str(at), at)
        file = folder / "adapter_model.safetensors"
        save_file(load_file(file), file, metadata={"filling": str(at) * 4_000_000})
        manager.prepare(folder)
        seen.add(Kind.of(str(folder)).digest)  # type: ignore[union-attr]
    assert manager._alike._recipes.keys() == seen
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, Kind)]
    assert manager.prepare(folder).alike
    assert manager.read == 3


def assert_same(one: Resident, other: Resident) -> None:
    assert (one.id, one.rank, one.loras, one.modules_to_save) == (other.id, other.rank, {}, {})
    assert torch.equal(one.slab.row, other.slab.row)
    assert one.slab.places == other.slab.places
    assert one.slab.views.keys() == other.slab.views.keys()
    for name, packed in one.slab.views.items():
        found = other.slab.views[name]
        assert (packed.ranks, packed.scale) == (found.ranks, found.scale)
        assert torch.equal(packed.a, found.a)
        for b, b_found in zip(packed.b, found.b, strict=True):
            assert b is b_found is None or torch.equal(b, b_found)


@settings(max_examples=40)
@given(
    layers=st.lists(st.sampled_from(sorted(WIDTHS)), min_size=1, unique=True),
    rank=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rslora=st.booleans(),
)
def test_the_second_of_a_kind_is_what_the_reader_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory,
    layers: list[str],
    rank: int,
    dtype: torch.dtype,
    rslora: bool,
) -> None:
    """Whatever it targets, and without the reader."""
    folder = tmp_path_factory.mktemp("kinds")
    shaped: dict[str, Any] = {
        "rank": rank,
        "layers": tuple(layers),
        "dtype": dtype,
        "use_rslora": rslora,
    }
    first, second = write(folder / "1", 1, **shaped), write(folder / "2", 2, **shaped)
    manager = Manager()
    manager.prepare(first)
    assert manager.read == 1
    assert_same(manager.prepare(second, 2), Manager().prepare(second, 2))
    assert manager.read == 1


@pytest.mark.parametrize(
    "other",
    [
        {"lora_alpha": 16},
        {"use_rslora": True},
        {"rank": 8},
        {"dtype": torch.bfloat16},
        {"layers": ("q_proj", "o_proj")},
        pytest.param(
            {"rank_pattern": {"o_proj": 4}},
            marks=PATTERNS,
        ),
    ],
    ids=str,
)
def test_another_kind_is_read(tmp_path: Path, other: dict[str, Any]) -> None:
    """By vLLM, which may refuse it."""
    manager = Manager()
    manager.prepare(write(tmp_path / "1", 1))
    second = write(tmp_path / "2", 2, **other)
    assert_same(manager.prepare(second), Manager().prepare(second))
    assert manager.read == 2


def test_base_and_order_of_targets_make_no_other_kind(tmp_path: Path) -> None:
    """PEFT writes targets in any order, and trainers the base's name as they had it."""
    manager = Manager()
    manager.prepare(write(tmp_path / "1", 1, base_model_name_or_path="/here"))
    turned = list(reversed(WIDTHS))
    manager.prepare(write(tmp_path / "2", 2, base_model_name_or_path="there", target_modules=turned))
    assert manager.read == 1


@PATTERNS
@pytest.mark.parametrize("zeros", [False, True])
def test_what_was_computed_on_the_way_is_read_again(tmp_path: Path, zeros: bool) -> None:
    """Scales that differ within a layer are multiplied into B, and one of zeros does not show it."""
    pattern: dict[str, Any] = {"alpha_pattern": {"q_proj": 2}}
    manager = Manager()
    manager.prepare(write(tmp_path / "1", 1, zeros=zeros, **pattern))
    second = write(tmp_path / "2", 2, **pattern)
    assert_same(manager.prepare(second), Manager().prepare(second))
    assert manager.read == 2


def test_what_vllm_keeps_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is not ours, of which vLLM wants its own tensors.

    Its header is not parsed for nothing: with 36,864 experts' tensors that took 55 ms, in which no step ran.
    """
    monkeypatch.setattr(alike, "_spans", lambda *_: pytest.fail("the header was parsed"))
    manager = Manager()
    del manager._adapter_manager.layers.targets["m.o_proj"]
    for seed in (1, 2):
        kept = manager.prepare(write(tmp_path / str(seed), seed)).loras["m.o_proj"]
        assert isinstance(kept, LoRALayerWeights)
    assert manager.read == 2


def _cut(weights: Path) -> None:
    os.truncate(weights, weights.stat().st_size - 1)


def _lies(weights: Path) -> None:
    weights.write_bytes((1 << 60).to_bytes(8, "little") + weights.read_bytes()[8:])


def _gone(weights: Path) -> None:
    weights.unlink()


def _pipe(weights: Path) -> None:
    weights.unlink()
    os.mkfifo(weights)


def _no_json(weights: Path) -> None:
    weights.with_name("adapter_config.json").write_text("{")


def _a_list(weights: Path) -> None:
    weights.with_name("adapter_config.json").write_text("[]")


@pytest.mark.parametrize("damage", [_cut, _lies, _gone, _pipe, _no_json, _a_list])
def test_a_damaged_one_is_the_readers_to_refuse(tmp_path: Path, damage: Any) -> None:
    """With its reason, and never by what was learned of a whole one."""
    manager = Manager()
    manager.prepare(write(tmp_path / "1", 1))
    second = write(tmp_path / "2", 2)
    damage(second / "adapter_model.safetensors")
    with pytest.raises(Exception) as refused:  # noqa: PT011 vLLM's, of any kind
        manager.prepare(second)
    with pytest.raises(type(refused.value)):
        Manager().prepare(second)
    assert manager.read == 2


def test_tensors_of_their_own_are_not_learned(tmp_path: Path) -> None:
    """Another reader's copies are not where the file has them."""
    folder = write(tmp_path / "1", 1)
    manager = Manager()
    request = LoRARequest("1", 1, str(folder))
    lora = manager._load_adapter(request)
    copies = {name: tensor.clone() for name, tensor in lora.tensors.items()}
    kind = Kind.of(str(folder))
    assert kind is not None
    draft = manager._adapter_manager.draft(lora)
    resident = manager._adapter_manager.pack(lora, draft)
    found = Alike()
    found.learn(str(folder), kind, resident, copies, draft)
    assert found.recipe(kind) is None
    found.learn(str(folder), kind, resident, lora.tensors, draft)
    assert found.recipe(kind) is not None


@pytest.mark.parametrize("change", ["nothing", "a head", "a weight"])
def test_what_a_recipe_would_not_bring_is_not_learned(tmp_path: Path, change: str) -> None:
    """A classification head, which no slab has; or other weights than the file has now."""
    folder = str(write(tmp_path / "1", 1))
    manager, kind, found = Manager(), Kind.of(folder), Alike()
    assert kind is not None
    lora = manager._load_adapter(LoRARequest("1", 1, folder))
    draft = manager._adapter_manager.draft(lora)
    resident = manager._adapter_manager.pack(lora, draft)
    if change == "a head":
        resident.modules_to_save = {"score": object()}
    elif change == "a weight":
        resident.slab.data[0] += 1
    found.learn(folder, kind, resident, lora.tensors, draft)
    assert (found.recipe(kind) is not None) is (change == "nothing")


def test_a_header_and_a_configuration_are_told_apart() -> None:
    """Their sum may be the same."""
    assert Kind(b"{}1", 8, "{}").digest != Kind(b"{}", 8, "1{}").digest


def test_a_load_within_a_step_teaches_nothing(tmp_path: Path) -> None:
    """vLLM's own calls come in inference mode, where torch does not tell who wrote to a tensor."""
    manager = Manager()
    with torch.inference_mode():
        manager.prepare(write(tmp_path / "1", 1))
    second = write(tmp_path / "2", 2)
    manager.prepare(second)
    assert manager.read == 2
    with torch.inference_mode():
        again = manager.prepare(second)
    assert manager.read == 2
    assert_same(again, Manager().prepare(second))


def test_few_kinds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest; the memory of a stream of kinds is bounded."""
    monkeypatch.setattr(alike, "KINDS_KEPT", 2)
    manager = Manager()
    for rank in (1, 2, 3):
        manager.prepare(write(tmp_path / str(rank), rank, rank=rank))
    kept = [manager._alike.recipe(Kind.of(str(tmp_path / str(rank)))) for rank in (1, 2, 3)]
    assert [recipe and recipe.rank for recipe in kept] == [None, 2, 3]
