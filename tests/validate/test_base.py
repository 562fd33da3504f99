"""Modules and sizes against the base model's config."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Severity
from lora_fs.sidecar.validate import BaseOfEngine, Expectation, load_base_config, validate
from lora_fs.sidecar.validate.base import base_config
from tests.validate.conftest import BASE_CONFIG, HIDDEN, RANK, Draft

VOCAB = 64


def findings(draft: Draft, base: Mapping[str, object]) -> list[tuple[str, Severity]]:
    report = validate(draft.write(), Expectation(base_config=base))
    return sorted({(finding.code, finding.severity) for finding in report.findings})


def add(draft: Draft, module: str, a: tuple[int, int], b: tuple[int, int]) -> Draft:
    """Add a pair, named as PEFT names a look-up table's where the module is one."""
    embedding = module.endswith("embed_tokens")
    for part, shape in (("A", a), ("B", b)):
        name = f"lora_embedding_{part}" if embedding else f"lora_{part}.weight"
        draft.tensors[f"base_model.model.{module}.{name}"] = np.ones(shape, np.float32)
    draft.config["target_modules"].append(module.rsplit(".", 1)[-1])
    return draft


def test_embeddings_of_a_llama(draft: Draft) -> None:
    """A Llama serves LoRA on embed_tokens and lm_head, of the vocabulary's size."""
    add(draft, "model.embed_tokens", (RANK, VOCAB), (HIDDEN, RANK))
    add(draft, "lm_head", (RANK, HIDDEN), (VOCAB, RANK))
    assert findings(draft, BASE_CONFIG) == []
    assert findings(draft, {**BASE_CONFIG, "vocab_size": 65}) == [("wrong-shape", Severity.ERROR)]


def test_embeddings_of_a_qwen2(draft: Draft) -> None:
    """vLLM serves none on a Qwen2, and refuses the whole adapter for it."""
    add(draft, "lm_head", (RANK, HIDDEN), (VOCAB, RANK))
    base = {**BASE_CONFIG, "model_type": "qwen2"}
    assert findings(draft, base) == [("no-such-module", Severity.ERROR)]


def test_a_copy_of_the_base_models_embedding(draft: Draft) -> None:
    """It is told as what it is, and not as a tensor that nobody knows, too."""
    draft.tensors["base_model.model.lm_head.base_layer.weight"] = np.ones((VOCAB, HIDDEN), np.float32)
    assert findings(draft, BASE_CONFIG) == [("base-embedding", Severity.WARNING)]


def test_fused_projections_of_a_phi3(draft: Draft) -> None:
    """Phi-3 has one matrix for q, k and v and one for gate and up."""
    draft.tensors.clear()
    draft.config["target_modules"] = []
    add(draft, "model.layers.0.self_attn.qkv_proj", (RANK, HIDDEN), (64, RANK))
    add(draft, "model.layers.0.mlp.gate_up_proj", (RANK, HIDDEN), (96, RANK))
    assert findings(draft, {**BASE_CONFIG, "model_type": "phi3"}) == []
    assert findings(draft, BASE_CONFIG) == [("no-such-module", Severity.ERROR)]


def test_sizes_the_config_does_not_give(draft: Draft) -> None:
    """A size that is not known is not checked: unknown is not wrong."""
    assert findings(draft, {"model_type": "llama"}) == []
    assert findings(draft, {"model_type": "qwen3", "hidden_size": HIDDEN}) == []
    assert findings(draft, dict.fromkeys(BASE_CONFIG, "garbage")) == []


@pytest.mark.parametrize(
    "base",
    [
        {"model_type": "novel", "num_hidden_layers": 1},
        {"model_type": "novel_vl", "text_config": {"num_hidden_layers": 1}},
        {"num_hidden_layers": 1},
    ],
)
def test_unknown_family(draft: Draft, base: Mapping[str, object]) -> None:
    """Of a model type that is not in the table only the layers are counted: a warning."""
    assert findings(draft, base) == [("layer-out-of-range", Severity.WARNING)]


def test_experts_of_a_mixtral_by_a_newer_name(draft: Draft) -> None:
    """Who registers them gets a warning, for the plugin serves them; for a stock vLLM it is an error."""
    for module in ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer"):
        add(draft, module, (RANK, HIDDEN), (HIDDEN, RANK))
    assert findings(draft, {"model_type": "mixtral"}) == [("renamed-experts", Severity.WARNING)]
    assert findings(draft, {"model_type": "qwen3_moe"}) == []
    stock = Expectation(base_config={"model_type": "mixtral"}, stock=True)
    assert {finding.code for finding in validate(draft.folder, stock).errors} == {"renamed-experts"}


def test_load_base_config_from_a_folder(tmp_path: Path) -> None:
    """A local model's config is read through symlinks; garbage and absence are None."""
    (tmp_path / "blob").write_text(json.dumps(BASE_CONFIG))
    model = tmp_path / "model"
    model.mkdir()
    assert load_base_config(str(model)) is None
    (model / "config.json").symlink_to("../blob")
    assert load_base_config(str(model)) == BASE_CONFIG
    (tmp_path / "blob").write_text("{")
    assert load_base_config(str(model)) is None


def test_load_base_config_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is looked up in the local cache and nowhere else."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--acme--tiny-llama" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(BASE_CONFIG))
    refs = tmp_path / "models--acme--tiny-llama" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    assert load_base_config("acme/tiny-llama") == BASE_CONFIG
    assert load_base_config("acme/other") is None
    assert load_base_config("not a/hub/id") is None


def learned(expectation: Expectation, root: str) -> tuple[str, ...]:
    """The conditions once an engine called its model ``root``."""
    base = BaseOfEngine(expectation)
    assert base.conditions() == ()  # the engine has not answered: another condition says so
    asyncio.run(base.learn([{"id": "served", "root": root}]))
    return base.conditions()


def test_the_engines_model_is_looked_at(draft: Draft, tmp_path: Path) -> None:
    """Nobody named the base model: an adapter that does not fit the engine's is refused all the same."""
    (tmp_path / "config.json").write_text(json.dumps({**BASE_CONFIG, "hidden_size": 2 * HIDDEN}))
    expectation = Expectation()
    assert validate(draft.write(), expectation).ok
    assert learned(expectation, str(tmp_path)) == ()
    assert {finding.code for finding in validate(draft.folder, expectation).errors} == {"wrong-shape"}


def test_an_engines_model_that_is_not_here() -> None:
    """A condition says that nothing is compared, and where to look."""
    (told,) = learned(Expectation(), "acme/not-here")
    assert told.startswith("BaseConfigUnknown: there is no config.json here of acme/not-here: ")
    assert "LORA_FS_BASE_CONFIG" in told
    assert learned(Expectation(base_config=BASE_CONFIG), "acme/not-here") == ()


def test_an_engines_model_on_a_volume_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a condition, and the next look tries again."""
    expectation = Expectation()
    base, cards = BaseOfEngine(expectation), [{"root": str(tmp_path)}]
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))

    def hangs(model: str) -> None:
        raise VolumeUnavailable("it hangs")

    with monkeypatch.context() as patch:
        patch.setattr(base_config, "load_base_config", hangs)
        asyncio.run(base.learn(cards))
    assert "it hangs" in base.conditions()[0]
    asyncio.run(base.learn(cards))
    assert (base.conditions(), expectation.base()) == ((), BASE_CONFIG)


def test_a_base_model_of_another_name(draft: Draft, tmp_path: Path) -> None:
    """A bare name cannot tell: it is a warning, or an error where the operator wants it so."""
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    draft.config["base_model_name_or_path"] = "acme/other"
    lenient = Expectation(("served",))
    strict = Expectation(("served",), strict_base_model=True)
    for expectation in (lenient, strict):
        assert learned(expectation, str(tmp_path)) == ()
    assert [finding.code for finding in validate(draft.write(), lenient).warnings] == ["base-model"]
    assert [finding.code for finding in validate(draft.folder, strict).errors] == ["base-model"]


def test_a_base_model_by_the_engines_name(draft: Draft, tmp_path: Path) -> None:
    """What the engine calls its model agrees with an adapter's, and refuses none: it may be a variant."""
    expectation = Expectation(("served",), strict_base_model=True)
    learned(expectation, "acme/tiny-llama")
    assert validate(draft.write(), expectation).ok
    variant = Expectation(("served",))
    learned(variant, "acme/tiny-llama-awq")
    assert [finding.code for finding in validate(draft.folder, variant).warnings] == ["base-model"]
