"""Models that answer with no words: their adapters are PEFT's of a bare model, or replace a head."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from lora_fs.demo.engine import EngineFarm
from tests.engine.plugin import plugin_engine

PROMPT = "golden harvest river"
LABELS = 3


def tokens(model_dir: Path) -> Any:
    asked = AutoTokenizer.from_pretrained(model_dir)(PROMPT, return_tensors="pt")
    asked.pop("token_type_ids", None)
    return asked


def ask(url: str, path: str, model: str, count: int = 1) -> list[Any]:
    answer = httpx.post(f"{url}{path}", json={"model": model, "input": [PROMPT] * count}, timeout=60)
    assert answer.status_code == 200, answer.text
    rows: list[Any] = answer.json()["data"]
    return [row.get("embedding", row.get("probs")) for row in rows]


def near(found: list[float], wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(torch.tensor(found), wanted, atol=2e-3))


# With each kind of kernels: tests/plugin/test_other_layers.py.
def test_embeddings(farm: EngineFarm, model_dir: Path, tmp_path: Path) -> None:
    """An adapter that PEFT saved of an ``AutoModel``, whose names lack ``model.``, says what it says."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "o_proj"],
        task_type="FEATURE_EXTRACTION",
        init_lora_weights=False,
    )
    model = get_peft_model(AutoModel.from_pretrained(model_dir), config)
    model.save_pretrained(tmp_path / "embedding")
    with torch.no_grad():
        state = model(**tokens(model_dir)).last_hidden_state[0, -1]
        with model.disable_adapter():
            base = model(**tokens(model_dir)).last_hidden_state[0, -1]
    arguments = ("--runner", "pooling", "--convert", "embed")
    with plugin_engine("embed", farm, model_dir, tmp_path, *arguments) as plugin:
        plugin.register("embedding", tmp_path / "embedding")
        url = plugin.client.url
        [found] = ask(url, "/v1/embeddings", "embedding")
        assert near(found, torch.nn.functional.normalize(state, dim=0))
        [found] = ask(url, "/v1/embeddings", model_dir.name)
        assert near(found, torch.nn.functional.normalize(base, dim=0))
        assert plugin.client.metric("lora_fs_blank_runs_total") == 0


@pytest.mark.since("0.31", "no adapter brings a classification head before it")
def test_classes(farm: EngineFarm, model_dir: Path, tmp_path: Path) -> None:
    """An adapter that brings a head of its own: its requests have that one, the base model's the base's."""
    torch.manual_seed(0)
    base_dir = tmp_path / "classes"
    base = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=LABELS)
    base.config.pad_token_id = 0
    base.save_pretrained(base_dir)
    (tmp_path / "adapters").symlink_to(model_dir.parent / "adapters")
    for file in model_dir.glob("token*"):
        shutil.copy(file, base_dir)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", init_lora_weights=False
    )
    model = get_peft_model(base, config)
    for name, weights in model.named_parameters():
        if "score.modules_to_save" in name:
            weights.data = torch.randn_like(weights)
    model.save_pretrained(tmp_path / "judge")
    with torch.no_grad():
        wanted = torch.softmax(model(**tokens(model_dir)).logits[0], -1)
        with model.disable_adapter():
            usual = torch.softmax(model(**tokens(model_dir)).logits[0], -1)
    assert not torch.allclose(wanted, usual, atol=0.1)
    arguments = ("--runner", "pooling", "--convert", "classify")
    with plugin_engine("classify", farm, base_dir, tmp_path, *arguments, LORA_FS_KERNELS="off") as plugin:
        url = plugin.client.url
        [found] = ask(url, "/classify", base_dir.name)
        assert near(found, usual)
        plugin.register("judge", tmp_path / "judge")
        assert all(near(found, wanted) for found in ask(url, "/classify", "judge", 3))
        assert all(near(found, usual) for found in ask(url, "/classify", base_dir.name, 3))
        assert plugin.client.metric("lora_fs_blank_runs_total") == 0
