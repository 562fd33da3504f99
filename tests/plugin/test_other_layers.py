"""Layers beside a decoder's own: heads, words, experts, towers, and names as other classes save them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora import model_manager
from vllm.lora.layers import FusedMoE3DWithLoRA, LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lora_fs.kernels import gpu
from lora_fs.worker_patch.worker.load.fits import DoesNotFit, drop_merged
from tests.plugin.block import (
    HEAD,
    HEADS,
    HIDDEN,
    RANK,
    WHOLE,
    WORDS,
    Make,
    Model,
    adapter,
    packed,
    serve,
    vllm_config,
)

KERNELS = pytest.mark.parametrize("kernels", ["off", "torch", "triton"])


class Speaking(Model):
    """With a head over its words."""

    embedding_modules: ClassVar = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = ParallelLMHead(WORDS, HIDDEN)
        self.logits_processor = LogitsProcessor(WORDS)


@pytest.fixture
def settings() -> Iterator[None]:
    """Those of a vLLM, which ``LogitsProcessor`` wants; making them changes the environment, on a CPU."""
    before = dict(os.environ)
    with set_current_vllm_config(VllmConfig()):
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "says"),
    [
        ("lm_head", HIDDEN // 4, WORDS, f"lm_head: the adapter's hidden size is 16, the model's is {HIDDEN}"),
        ("lm_head", HIDDEN, WORDS + 50, "lm_head: the adapter has 150 words, the model has 100"),
        ("lm_head", HIDDEN, WORDS - 50, None),
        (
            "embed_tokens",
            WORDS,
            HIDDEN // 2,
            "embed_tokens: the adapter's hidden size is 32, the model's",
        ),
        ("embed_tokens", WORDS + 1, HIDDEN, "embed_tokens: the adapter has 101 words, the model has 100"),
        ("embed_tokens", WORDS - 50, HIDDEN, None),
    ],
)
@KERNELS
def test_words(make: Make, kernels: str, name: str, inputs: int, outputs: int, says: str | None) -> None:
    """An adapter may know fewer words than the model, and has its hidden size."""
    manager = make(kernels, model=Speaking)
    lora = adapter(101, {name: (inputs, outputs)})
    if says is None:
        serve(manager, lora)
        return
    with pytest.raises(DoesNotFit, match=says):
        packed(manager, lora)


@pytest.mark.usefixtures("settings")
@KERNELS
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_words_rank(make: Make, kernels: str, name: str) -> None:
    manager = make(kernels, model=Speaking)
    inputs, outputs = (HIDDEN, WORDS) if name == "lm_head" else (WORDS, HIDDEN)
    large = LoRALayerWeights(name, 32, 32, torch.zeros(32, inputs), torch.zeros(outputs, 32))
    with pytest.raises(DoesNotFit, match=f"{name}: LoRA rank 32 is greater than max_lora_rank 16"):
        packed(manager, LoRAModel(101, 32, {name: large}))
    torn = LoRALayerWeights(name, 4, 4, torch.zeros(4, inputs), torch.zeros(outputs, 8))
    with pytest.raises(DoesNotFit, match=f"{name}: A has rank 4, B has rank 8"):
        packed(manager, LoRAModel(101, 4, {name: torn}))


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("v2", "drafts", "says"), [(True, {}, "VLLM_USE_V2_MODEL_RUNNER=0"), (True, None, ""), (False, {}, "")]
)
def test_a_head_beside_drafts(make: Make, v2: bool, drafts: Any, says: str) -> None:
    """Where vLLM names an adapter a request and asks for a row a draft, an adapter of the head is refused."""
    config = vllm_config()
    config.use_v2_model_runner, config.speculative_config = v2, drafts
    manager = make("torch", model=Speaking, config=config)
    packed(manager, adapter(101))
    head = adapter(102, {"lm_head": (HIDDEN, WORDS), "o_proj": WHOLE["o_proj"]})
    if not says:
        packed(manager, head)
        return
    with pytest.raises(DoesNotFit, match=says):
        packed(manager, head)


class Pooling(torch.nn.Module):  # type: ignore[misc]
    """A model that answers with no words, with its layers below ``model``, as vLLM's have them."""

    packed_modules_mapping = Model.packed_modules_mapping
    embedding_modules = Model.embedding_modules
    is_pooling_model, config = True, None
    pooler = SimpleNamespace(get_supported_tasks=lambda: ["classify"], replace_classifier=lambda new: None)

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.score = ReplicatedLinear(HIDDEN, 3, bias=False, prefix="score")


@pytest.fixture
def make_pooling(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(model_manager, "is_pooling_model", lambda model: True)

    def manager(kernels: str) -> Any:
        config = vllm_config()
        told: Any = SimpleNamespace(
            dtype=torch.float32, get_pooling_task=lambda tasks: "classify", score_type="cross-encoder"
        )
        config.model_config = told
        return make(kernels, model=Pooling, config=config)

    return manager


@KERNELS
def test_an_adapter_of_a_bare_model(make_pooling: Make, kernels: str) -> None:
    """PEFT saves it without ``model.``: each of its layers is found, and none is kept twice."""
    manager = make_pooling(kernels)
    bare = serve(manager, adapter(101))
    named = adapter(101)
    named.loras = {f"model.{name}": weights for name, weights in named.loras.items()}
    whole = packed(manager, named)
    assert bare.loras == whole.loras == {}
    assert torch.equal(bare.slab.row, whole.slab.row)
    with pytest.raises(DoesNotFit, match="the model has no layer r_proj"):
        packed(manager, adapter(102, {"r_proj": (HIDDEN, HIDDEN)}))


@pytest.mark.since("0.31", "no adapter brings a classification head before it")
@KERNELS
def test_a_classification_head_that_the_adapter_replaces(make_pooling: Make, kernels: str) -> None:
    """For its own requests alone: the base model's have the base's, and so has the slot's next adapter."""
    from vllm.lora.lora_weights import LoRAFullModuleWeights

    manager = make_pooling(kernels)
    score = manager.modules["score"]
    score.base_layer.weight.data.fill_(0.5)
    score.base_layer.cpu_linear = torch.nn.functional.linear
    lora, head = adapter(101), torch.randn(3, HIDDEN)
    lora.modules_to_save["score"] = LoRAFullModuleWeights("score", head)
    serve(manager, lora)
    manager.set_adapter_mapping(LoRAMapping((0, 101, 0), (0, 101, 0), is_prefill=True))
    x = torch.randn(3, HIDDEN)
    base = x @ score.base_layer.weight.T

    def scores() -> torch.Tensor:
        found = score(x)
        return torch.stack(list(found[0] if isinstance(found, tuple) else found))

    assert torch.allclose(scores()[1], head @ x[1], atol=1e-4)
    assert torch.allclose(scores()[[0, 2]], base[[0, 2]], atol=1e-4)
    manager.remove_adapter(101)
    serve(manager, adapter(102))
    manager.set_adapter_mapping(LoRAMapping((0, 102, 0), (0, 102, 0), is_prefill=True))
    assert torch.allclose(scores(), base, atol=1e-4)


def test_what_was_merged_into_experts_is_let_go_of() -> None:
    """vLLM leaves one of the two parts of such a layer in the adapter, by a name that no layer has."""
    experts: Any = FusedMoE3DWithLoRA.__new__(FusedMoE3DWithLoRA)
    manager: Any = SimpleNamespace(modules={"m.experts": experts, "m.o_proj": torch.nn.Identity()})
    names = ("m.experts.base_layer", "m.experts", "m.o_proj.base_layer")
    weights = {name: LoRALayerWeights(name, 1, 1, torch.zeros(1, 1), torch.zeros(1, 1)) for name in names}
    lora = LoRAModel(7, 1, weights)
    drop_merged(manager, lora)
    assert list(lora.loras) == ["m.experts", "m.o_proj.base_layer"]


@KERNELS
@pytest.mark.parametrize("targets", [["qkv_proj"], ["q_proj"]])
def test_layers_that_the_operator_leaves_out(make: Make, kernels: str, targets: list[str]) -> None:
    """``--lora-target-modules``: an adapter that has more is served with these, as by vLLM."""
    manager = make(kernels, target_modules=targets)
    resident = serve(manager, adapter(101, {name: WHOLE[name] for name in ("q_proj", "v_proj", "o_proj")}))
    assert list(resident.slab.views) == ["qkv_proj"]
    with pytest.raises(DoesNotFit, match="no layer of the adapter is one of the model"):
        packed(manager, adapter(102, {"o_proj": (HEADS * HEAD, HIDDEN)}))


class Fused(torch.nn.Module):  # type: ignore[misc]
    """Four outputs in one layer, for which an adapter has two matrices, as Qwen3-Next's linear attention."""

    packed_modules_mapping: ClassVar = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
    embedding_modules: ClassVar[dict[str, str]] = {}
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_qkvz = MergedColumnParallelLinear(HIDDEN, [16, 16, 32, 32], bias=False)


@KERNELS
@pytest.mark.parametrize("both", [True, False])
def test_a_matrix_for_several_outputs(make: Make, kernels: str, both: bool) -> None:
    """Each output has its part of B, and the same A; one that the adapter leaves alone has none."""
    sizes = {"in_proj_qkv": (HIDDEN, 64), "in_proj_z": (HIDDEN, 32)}
    lora = adapter(101, sizes if both else {"in_proj_qkv": sizes["in_proj_qkv"]})
    a, b = lora.loras["in_proj_qkv"].lora_a.clone(), lora.loras["in_proj_qkv"].lora_b.clone()
    found = packed(make(kernels, model=Fused), lora).slab.views["in_proj_qkvz"]
    assert found.ranks == (RANK, RANK, RANK, RANK * both)
    assert torch.equal(found.a[: 3 * RANK], torch.cat([a, a, a]))
    parts = [part.T for part in found.b[:3] if part is not None]
    assert all(map(torch.equal, parts, b.split([16, 16, 32])))


def test_layers_of_a_tower(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM computes none of them with adapters unless it is told to: the adapter is served without."""
    manager = make("torch")
    default = manager._get_punica_wrapper
    monkeypatch.setattr(
        manager, "_get_punica_wrapper", lambda name: None if name.startswith("visual.") else default(name)
    )
    sizes = {"q_proj": WHOLE["q_proj"], "visual.blocks.0.attn.qkv": (HIDDEN, HIDDEN)}
    assert list(serve(manager, adapter(101, sizes)).slab.views) == ["qkv_proj"]


def test_a_draft_model_that_shares_the_words(make: Make) -> None:
    """It asks for fewer rows than the step was planned for, and gets them."""
    manager = make("torch")
    serve(manager, adapter(101, {"embed_tokens": (WORDS, HIDDEN)}))
    manager.set_adapter_mapping(LoRAMapping((101,) * 8, (101, 101), is_prefill=True))
    words: Any = manager.modules["embed_tokens"]
    assert words.lora_a_stacked_2d is None, "nothing keeps the padded stack"
    assert words(torch.arange(8)).shape == (8, HIDDEN)
    assert words(torch.arange(2)).shape == (2, HIDDEN)


def test_a_draft_model_that_shares_the_words_on_a_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are not asked: the plan is not of these rows, which stay as they are."""
    manager = make("triton")
    serve(manager, adapter(101, {"embed_tokens": (WORDS, HIDDEN)}))
    manager.set_adapter_mapping(LoRAMapping((101,) * 8, (101, 101), is_prefill=True))
    rows: list[int] = []
    monkeypatch.setattr(gpu, "embedding", lambda y, *args, **kwargs: rows.append(len(y)))
    words: Any = manager.modules["embed_tokens"]
    for count in (8, 2, 12):
        words(torch.arange(count))
    assert rows == [8, 12]


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        ("qkv_proj", True),
        ("wqkv", True),
        ("Wqkv", True),
        ("kv_b_proj", True),
        ("o_proj", False),
        ("up_proj", False),
    ],
)
def test_what_is_kept_in_the_cache(make: Make, name: str, cached: bool) -> None:
    """By the name's end, however a family spells it."""

    class One(torch.nn.Module):  # type: ignore[misc]
        packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
        embedding_modules: ClassVar[dict[str, str]] = {}
        config = None

        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, ReplicatedLinear(HIDDEN, RANK, bias=False))

    assert make("torch", model=One).layers.targets[name].writes_cache is cached
