"""The table of what an adapter may be, executed: what is served is PEFT's, and the rest is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from vllm.lora.request import LoRARequest

from lora_fs.kernels.weights.layout import Packed
from lora_fs.sidecar.validate import validate
from lora_fs.worker_patch.worker.load.resident import size_bytes
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from tests.plugin.block import HIDDEN, WHOLE, WORDS, Make
from tests.plugin.test_room import worker

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "validation.md"
ID = 7
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",),
    "embed_tokens": ("embed_tokens",),
}

# By the table's first column, what PEFT is told, of a model of the layers in ``WHOLE``.
SERVED: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {},
    "rsLoRA (`use_rslora`)": {"use_rslora": True},
    "some layers, or all": {"target_modules": ["v_proj", "gate_proj"]},
    "`rank_pattern`, `alpha_pattern`": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    "embeddings (`embed_tokens`)": {"target_modules": ["q_proj", "embed_tokens"]},
    "initialised by `gaussian`, `eva`, `orthogonal`": {"init_lora_weights": "gaussian"},
}
# What PEFT is told, or what stands in ``adapter_config.json``, and of the finding its code.
REFUSED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "DoRA (`use_dora`)": ({"use_dora": True}, {}, "dora"),
    "biases of LoRA layers (`lora_bias`)": ({"lora_bias": True}, {}, "lora-bias"),
    "biases of the base model (`bias`)": ({"bias": "all"}, {}, "bias"),
    "PiSSA, OLoRA, CorDA, LoftQ": ({"init_lora_weights": "olora"}, {}, "init"),
    "whole modules (`modules_to_save`)": ({"modules_to_save": ["o_proj"]}, {}, "modules-to-save"),
    "added or trained tokens (`trainable_token_indices`)": (
        {"trainable_token_indices": {"embed_tokens": [1, 2]}},
        {},
        "added-tokens",
    ),
    "LongLoRA (`context_length`)": ({}, {"context_length": 16384}, "lora-variant"),
    "aLoRA": ({}, {"alora_invocation_tokens": [1]}, "alora"),
    "BD-LoRA": ({}, {"use_bdlora": {"nblocks": 2}}, "bdlora"),
    "QALoRA": ({}, {"use_qalora": True}, "qalora"),
    "replicated layers (`layer_replication`)": ({}, {"layer_replication": [[0, 1]]}, "layer-replication"),
    "KaSA, MonteCLoRA, Arrow": ({}, {"kasa_config": {"beta": 1}}, "lora-variant"),
    "not a LoRA (`peft_type`)": ({}, {"peft_type": "LOHA"}, "peft-type"),
}
ELSEWHERE = {  # its test
    "experts, a tensor each or all in one": "tests/plugin/test_experts.py",
    "the output layer (`lm_head`)": "tests/engine/test_tied_embeddings.py",
    "a classification head (`score`, `classifier`)": "tests/engine/test_pooling.py",
}


class Tree(nn.Module):  # type: ignore[misc]
    """The layers of ``block.Model``, as transformers would name them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        for name, (inputs, outputs) in WHOLE.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=True))


def made(folder: Path, options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Any:
    """Save an adapter by PEFT, and change its configuration; returns PEFT's model."""
    torch.manual_seed(5)
    told: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": list(WHOLE)}
    told |= {"init_lora_weights": False, **options}
    model: Any = get_peft_model(Tree(), LoraConfig(**told))
    for name, weights in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            torch.nn.init.normal_(weights)
    model.save_pretrained(folder, save_embedding_layers=False)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(config or {})))
    return model


def table() -> dict[str, list[str]]:
    """Its rows, by their first column."""
    section = PAGE.read_text().split("## What an adapter may be\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.findall(r"[^|]+", line) for line in section.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows[1:]}


def deltas(manager: TieredWorkerManager) -> dict[str, torch.Tensor]:
    """What a slot adds to each layer of the base model."""
    slot, found = manager.tiers.slots.index(ID), {}
    for name, target in manager._adapter_manager.layers.targets.items():
        packed: Packed | None = target.layer.packed[slot]
        if packed is None:
            continue
        for part, (low, high), b in zip(PARTS[name], packed.columns(), packed.b, strict=True):
            if b is not None:
                product = packed.a @ b if target.shape.lookup else b.T @ packed.a[low:high]
                found[part] = packed.scale * product
    return found


def test_every_row_is_executed() -> None:
    """Served or refused, with the finding that is named."""
    rows = table()
    assert rows.keys() == SERVED.keys() | REFUSED.keys() | ELSEWHERE.keys()
    for name, (outcome, *_) in rows.items():
        expected = f"refused: `{REFUSED[name][2]}`" if name in REFUSED else "served"
        assert outcome == expected, name
    root = PAGE.parents[2]
    assert all((root / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
@pytest.mark.since("0.32", "rank_pattern and alpha_pattern are ignored before it, and refused")
@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_is_pefts(make: Make, tmp_path: Path, name: str) -> None:
    """Nothing is found in it, and each layer gets the product that PEFT computes."""
    model = made(tmp_path, SERVED[name])
    assert validate(tmp_path).errors == ()
    wanted = {
        path.rsplit(".", 1)[-1]: module.get_delta_weight("default").detach()
        for path, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert wanted
    manager = worker(make, 1 << 22)
    resident = manager._prepare(LoRARequest("any", ID, str(tmp_path)))
    manager._adapter_manager.admit(resident, size_bytes(resident))
    manager._adapter_manager.activate_adapter(ID)
    found = deltas(manager)
    assert found.keys() == wanted.keys()
    for part, delta in wanted.items():
        assert delta.abs().max() > 0
        torch.testing.assert_close(found[part], delta, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own about what these cannot do
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_do(tmp_path: Path, name: str) -> None:
    """By the finding that the table names, with a hint."""
    options, config, code = REFUSED[name]
    made(tmp_path, options, config)
    hints = [finding.hint for finding in validate(tmp_path).errors if finding.code == code]
    assert any(hints), hints
