"""Adapters as PEFT itself writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.validate import Expectation, looks_preallocated, validate

pytest.importorskip("peft", reason="makes adapters with PEFT")

BASE: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Save an adapter on a random tiny Llama; keywords go to LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(dtype: str = "float32", tied: bool = False, **options: Any) -> Path:
        torch.manual_seed(0)
        config = LlamaConfig(**BASE, tie_word_embeddings=tied)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False} | options
        folder = tmp_path_factory.mktemp("peft")
        wrapped = get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=False)
        wrapped.save_pretrained(folder, save_embedding_layers=False)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"base_model_name_or_path": "acme/tiny"}))
        return folder

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.0\.(self_attn|mlp)\..*_proj"},
        {"target_modules": ["q_proj"], "dtype": "bfloat16"},
        {"target_modules": ["q_proj"], "dtype": "float16", "use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 2}},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "dtype": "float64"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.q_proj"},
        {"target_modules": ["layers.0.self_attn.q_proj", "v_proj"], "exclude_modules": ["q_proj"]},
        {
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": [f"{n}.self_attn.q_proj" for n in (0, 1)],
        },
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True, "tied": True},
        {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True, "tied": True},
    ],
    ids=str,
)
def test_plain_lora(make: Make, options: dict[str, Any]) -> None:
    """Nothing is found in what PEFT saves of a plain LoRA, whatever it targets."""
    folder = make(**options)
    expectation = Expectation(
        model_ids=("acme/tiny",), base_config={"model_type": "llama", **BASE}, max_rank=8
    )
    report = validate(folder, expectation)
    assert report.findings == ()
    assert report.shape is not None
    assert report.shape.dtype == options.get("dtype", "float32")
    assert not looks_preallocated(folder)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Its rank is an expert's, as the engine's limit is, and not that of the tensor of all experts."""
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    get_peft_model(MixtralForCausalLM(config), lora).save_pretrained(tmp_path)
    report = validate(tmp_path, Expectation(max_rank=2))
    assert report.ok
    assert report.shape is not None
    assert report.shape.rank == 2
    assert report.shape.target_modules == ("base_layer", "experts", "q_proj")


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own about what these cannot do
@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("dora", {"use_dora": True}),
        ("lora-bias", {"lora_bias": True}),
        ("bias", {"bias": "all"}),
        ("modules-to-save", {"modules_to_save": ["lm_head"]}),
        ("added-tokens", {"trainable_token_indices": [1, 2]}),
        ("init", {"init_lora_weights": "olora"}),
    ],
)
def test_more_than_lora(make: Make, code: str, options: dict[str, Any]) -> None:
    """What PEFT can train beyond LoRA is refused by its own code, and only told when allowed."""
    folder = make(target_modules=["q_proj"], **options)
    assert code in {finding.code for finding in validate(folder).errors}
    allowed = validate(folder, Expectation(allow=frozenset({code})))
    assert code in {finding.code for finding in allowed.warnings}
    assert code not in {finding.code for finding in allowed.errors}


def test_a_head_that_is_not_tied(make: Make) -> None:
    """Without ``ensure_weight_tying`` PEFT would not load it, and vLLM would."""
    folder = make(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True, tied=True)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ensure_weight_tying": False}))
    assert [(one.code, one.field) for one in validate(folder).errors] == [("target-modules", "lm_head")]
