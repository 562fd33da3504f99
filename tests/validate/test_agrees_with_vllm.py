"""No adapter passes here whose features vLLM refuses, and vLLM takes what passes."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors import safe_open

from lora_fs.sidecar.validate import Expectation, validate
from lora_fs.sidecar.validate.config.adapter_config import check_config
from lora_fs.sidecar.validate.config.patterns import KEPT_COMPILED, Budget
from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.weights.tensors import peft_name
from tests.validate.conftest import (
    HIDDEN,
    RANK,
    WEIGHTS_FILE,
    Draft,
    good_config,
    good_tensors,
    tensor_name,
)

pytest.importorskip("vllm", reason="compares with a real vLLM")

REFUSED: list[dict[str, Any]] = [
    {"use_dora": True},
    {"use_dora": "false"},
    {"lora_bias": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"bias": None},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["score", "embed_tokens"]},
    {"modules_to_save": "score"},
    {"alora_invocation_tokens": [5]},
    {"layer_replication": [[0, 1]]},
    {"use_bdlora": {"nblocks": 2}},
    {"use_qalora": True},
    {"r": 0},
    {"r": -4},
    {"r": "4"},
    {"r": None},
    {"r": 64},
    {"rank_pattern": {"up_proj": 64}},
    {"rank_pattern": {"q_proj": 0}},
    {"rank_pattern": {"q_proj": 4.0}},
    {"lora_alpha": None},
    *({"init_lora_weights": init} for init in ("pissa", "pissa_niter_4", "olora", "corda", "LoftQ")),
]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {"modules_to_save": None},
    {"modules_to_save": []},
    {"modules_to_save": ["score"]},
    {"layer_replication": []},
    {"init_lora_weights": False},
    *({"init_lora_weights": init} for init in ("gaussian", "Eva", "orthogonal", "mica", "lora_ga")),
    {"rank_pattern": {}, "alpha_pattern": {"q_proj": 3}},
    {"rank_pattern": None, "alpha_pattern": None},
    {"lora_alpha": 2.5},
    {"trainable_token_indices": None},
]


def vllms_error(config: dict[str, Any]) -> Exception | None:
    """Ask vLLM's own rules, as its worker does before it loads an adapter."""
    from vllm.lora.peft_helper import PEFTHelper

    try:
        helper = PEFTHelper.from_dict(copy.deepcopy(config))
        helper.validate_legal(SimpleNamespace(max_lora_rank=16))
    except (ValueError, TypeError) as error:
        return error
    return None


def vllm_objects(config: dict[str, Any]) -> bool:
    """Whether they refuse it."""
    return vllms_error(config) is not None


@pytest.mark.parametrize("change", REFUSED, ids=json.dumps)
def test_refused_by_both(draft: Draft, change: dict[str, Any]) -> None:
    """What vLLM refuses is refused before an engine is asked."""
    draft.config |= change
    assert vllm_objects(draft.config)
    assert not validate(draft.write(), Expectation(max_rank=16)).ok


PHRASES: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "vLLM does not yet support DoRA"),
    ({"lora_bias": True}, "vLLM does not support LoRA bias (lora_bias)"),
    ({"bias": "all"}, "Adapter bias is not supported"),
    ({"modules_to_save": ["lm_head"]}, "Unsupported modules_to_save"),
    ({"alora_invocation_tokens": [5]}, "vLLM does not support Activated LoRA (aLoRA)"),
    ({"layer_replication": [[0, 1]]}, "vLLM does not support layer_replication"),
    ({"use_bdlora": {"nblocks": 2}}, "vLLM does not support block-diagonal LoRA (BD-LoRA)"),
    ({"use_qalora": True}, "vLLM does not support QALoRA"),
    ({"init_lora_weights": "pissa"}, "vLLM does not support init_lora_weights"),
    ({"r": 64}, "LoRA rank 64 is greater than max_lora_rank"),
    ({"rank_pattern": {"up_proj": 64}}, "LoRA rank 64 is greater than max_lora_rank"),
]


@pytest.mark.parametrize(("change", "phrase"), PHRASES, ids=str)
def test_refused_in_the_same_words(draft: Draft, change: dict[str, Any], phrase: str) -> None:
    """Who looks for vLLM's phrase in an error finds it."""
    draft.config |= change
    said = "".join(one.message for one in validate(draft.write(), Expectation(max_rank=16)).errors)
    assert phrase in str(vllms_error(draft.config))
    assert phrase in said


@pytest.mark.parametrize("change", ACCEPTED, ids=json.dumps)
def test_accepted_by_both(draft: Draft, change: dict[str, Any]) -> None:
    """What vLLM serves as it was trained is not refused."""
    draft.config |= change
    assert not vllm_objects(draft.config)
    assert validate(draft.write(), Expectation(max_rank=16)).ok


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_required_by_both(draft: Draft, field: str) -> None:
    """A field vLLM requires is required."""
    del draft.config[field]
    assert vllm_objects(draft.config)
    assert not validate(draft.write()).ok


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.v_proj", "layers.0.mlp.experts.base_layer", "lm_head"]
)
def test_the_scale_is_the_engines(name: str, rslora: bool) -> None:
    """What lora_B is multiplied with is what vLLM multiplies it with."""
    from vllm.lora.peft_helper import PEFTHelper

    patterns = {
        "rank_pattern": {"v_proj": 9, "gate_up_proj": 3},
        "alpha_pattern": {"layers.1.*": 5.5, "experts.gate_up_proj": 2},
    }
    for more in ({}, patterns):
        fields = good_config() | {"use_rslora": rslora} | more
        config = check_config(fields, None, Findings())
        assert config is not None
        _, scale = PEFTHelper.from_dict(copy.deepcopy(fields)).get_rank_and_scaling(name)
        assert config.scale_of(peft_name(name), Budget()) == scale


def test_every_field_vllm_refuses_is_covered() -> None:
    """A field that a newer vLLM reads and we do not know of shows up here."""
    from dataclasses import fields

    from vllm.lora.peft_helper import PEFTHelper

    known = {
        *good_config(),
        *(field for change in (*REFUSED, *ACCEPTED) for field in change),
        "vllm_lora_scaling_factor",  # computed, whatever the file says
        "vllm_max_position_embeddings",  # given by the engine
    }
    assert {field.name for field in fields(PEFTHelper)} <= known


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's import is not ours to mend
@pytest.mark.parametrize(
    "name",
    [
        *good_tensors(),
        "x.lora_A.weight",
        "base_model.model.base_model.model.x.lora_B.weight",
        "model.base_model.model.x.lora_A.weight",
        "base_model.model.lm_head.lora_embedding_B",
        "base_model.model.score.weight",
        "base_model.model.x.classifier.bias",
        "base_model.model.x.lora_A.default.weight",
        "base_model.model.x.lora_B.bias",
        "base_model.model.x.lora_magnitude_vector",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.x.modules_to_save.weight",
        "weight",
        "x",
        "",
    ],
)
def test_names_are_parsed_alike(name: str) -> None:
    """A tensor's name means the module and the half that vLLM takes it for."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    from lora_fs.sidecar.validate.weights.tensors import Part, parse_name

    try:
        theirs = parse_fine_tuned_lora_name(name)
    except ValueError:
        assert parse_name(name) is None
        return
    ours = parse_name(name)
    assert ours is not None
    assert (ours[0], ours[1] in (Part.A, Part.EMBEDDING_A)) == theirs


@pytest.mark.parametrize("module", ["model.layers.1.self_attn.q_proj", "a.experts", "q_proj", "x"])
def test_ranks_are_resolved_alike(draft: Draft, module: str) -> None:
    """rank_pattern gives a module the rank that vLLM scales it by."""
    from vllm.lora.peft_helper import PEFTHelper

    from lora_fs.sidecar.validate.config.patterns import Budget, ModulePatterns
    from lora_fs.sidecar.validate.weights.tensors import peft_name

    pattern = {r"layers\.[1-3]\..*q_proj": 2, "q_proj": 3, "experts.down_proj": 5}
    helper = PEFTHelper.from_dict({**good_config(), "rank_pattern": pattern})
    ours = ModulePatterns(pattern).find(peft_name(module), Budget())
    assert (good_config()["r"] if ours is None else ours) == helper.get_rank_and_scaling(module)[0]


@pytest.mark.parametrize(("keys", "anew"), [(KEPT_COMPILED, 0), (600, 600)])
def test_vllm_compiles_many_keys_anew_for_each_module(
    keys: int, anew: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key matches this module. Once vLLM's library keeps more than 500, ``many-patterns`` may go."""
    from regex import _main as library
    from vllm.lora.peft_helper import PEFTHelper

    parsed = Mock(side_effect=library._parse_pattern)
    monkeypatch.setattr(library, "_parse_pattern", parsed)
    pattern = {f"model.layers.{layer}.q_proj": 2 for layer in range(keys)}
    helper = PEFTHelper.from_dict({**good_config(), "rank_pattern": pattern})
    library._cache.clear()
    helper.get_rank_and_scaling("model.layers.0.v_proj")
    parsed.reset_mock()
    helper.get_rank_and_scaling("model.layers.1.v_proj")
    assert parsed.call_count == anew


GATED = ("gate_proj", "down_proj", "up_proj")  # in the order in which vLLM packs them
EXPERTS = [f"experts.{number}.{part}" for number in range(2) for part in GATED]
GATELESS = [part for part in EXPERTS if "gate" not in part]


@pytest.mark.parametrize(
    ("layer", "parts", "served"),
    [
        ("mlp", EXPERTS, True),
        ("mlp", EXPERTS[3:], False),
        ("mlp", EXPERTS[:5], False),
        ("mlp", EXPERTS[1::3], False),
        ("mlp", GATELESS, False),
        ("mixer", GATELESS, True),
        ("mixer", EXPERTS[1::3], False),
    ],
)
def test_all_experts_of_a_layer_or_none(draft: Draft, layer: str, parts: list[str], served: bool) -> None:
    """vLLM asserts that none is missing, and says no word of why."""
    import torch
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (HIDDEN, RANK)}
    draft.tensors = {
        tensor_name(f"model.layers.0.{layer}.{part}", half): np.ones(shape, np.float32)
        for part in parts
        for half, shape in shapes.items()
    }
    draft.config["target_modules"] = ".*"
    report = validate(draft.write())
    assert [one.code for one in report.errors] == ([] if served else ["partial-experts"])

    gateless = layer == "mixer"
    weights = [
        LoRALayerWeights(part, RANK, 8, *map(torch.ones, shapes.values())) if part in parts else None
        for number in range(2)
        for part in (
            f"experts.{number}.{one}" for one in (("up_proj", "down_proj", "") if gateless else GATED)
        )
    ]
    with nullcontext() if served else pytest.raises(AssertionError, match=r"^$"):
        PackedLoRALayerWeights.pack_moe(weights, "experts", is_non_gated_moe=gateless)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_folder_is_read_by_vllm(adapter: Path) -> None:
    """The adapter the other tests break is one that vLLM reads."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(adapter), None)
    model = LoRAModel.from_local_checkpoint(
        str(adapter), {"q_proj", "v_proj"}, helper, lora_model_id=1, device="cpu"
    )
    assert len(model.loras) == 4


def test_metadata_of_null_is_read_by_both(adapter: Path) -> None:
    """As writers in other languages leave it out."""
    path = adapter / WEIGHTS_FILE
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"format": "pt"}', b"null".ljust(16)))
    with safe_open(path, "np") as file:
        assert len(file.keys()) == 8
    assert validate(adapter).findings == ()


def test_a_byte_order_mark_is_refused_by_both(adapter: Path) -> None:
    """As editors on Windows write one; it is told by its name, and what to do."""
    from vllm.lora.peft_helper import PEFTHelper

    config = adapter / "adapter_config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")
    with pytest.raises(json.JSONDecodeError, match="UTF-8 BOM"):
        PEFTHelper.from_local_dir(str(adapter), None)
    (finding,) = validate(adapter).findings
    assert finding.render() == (
        "adapter_config.json: begins with a byte order mark (save it as UTF-8 without one) [config-json]"
    )
