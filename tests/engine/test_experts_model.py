"""Models of experts: what vLLM answers with an adapter of either layout is what PEFT computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from tests.engine.scripts import run_script

pytestmark = pytest.mark.since("0.32", "the layers of experts are made otherwise")

SCRIPT = "experts_model.py"
PROMPTS = [[1, 300, 310, 320, 330, 340, 350], [1, *range(300, 312)]]
EXPERTS, HIDDEN, INNER, LAYERS, RANK = 4, 64, 96, 2, 4
NEAR = 1e-4
SHAPE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def mixtral(words: int) -> Any:
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=words, intermediate_size=INNER, num_local_experts=EXPERTS, **SHAPE)
    )


def qwen(words: int) -> Any:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=words,
            intermediate_size=INNER,
            moe_intermediate_size=INNER,
            num_experts=EXPERTS,
            norm_topk_prob=True,
            **SHAPE,
        )
    )


# A model, the name of its experts' block in its checkpoint, and theirs of gate, up and down.
MODELS: dict[str, tuple[Callable[[int], Any], str, tuple[str, str, str]]] = {
    "mixtral": (mixtral, "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen": (qwen, "mlp", ("gate_proj", "up_proj", "down_proj")),
}


class Trained:
    """A model of experts, and its adapters by PEFT.

    Attributes:
        base: the model's folder.
        adapters: the adapters' folders by the name of their layout.
        by_peft: transformers' model with no adapter, as ``base``, and with each of them.
    """

    def __init__(self, kind: str, folder: Path, tokenizer: Path) -> None:
        make, self._block, self._parts = MODELS[kind]
        self._folder, self.base = folder, folder / kind
        torch.manual_seed(1)
        make(len(json.loads((tokenizer / "tokenizer.json").read_bytes())["model"]["vocab"])).save_pretrained(
            self.base
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (self.base / name).write_bytes((tokenizer / name).read_bytes())
        self.by_peft = {"base": self._read()}
        self.adapters = {"listed": self._listed(), "fused": self._fused()}

    def logprobs(self, which: str, tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits = self.by_peft[which](torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]

    def _read(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()

    def _listed(self) -> Path:
        """An adapter of a tensor an expert, by the names that experts have in the checkpoint.

        transformers 5 has no layer an expert: PEFT trains a tree of such layers, and what it computes for
        each is added to the model's tensor of all experts.
        """
        torch.manual_seed(2)
        config = LoraConfig(r=RANK, lora_alpha=3, target_modules=list(self._parts), init_lora_weights=False)
        trained = get_peft_model(self._tree(), config)
        trained.save_pretrained(self._folder / "listed")
        model = self._read()
        with torch.no_grad():
            for at, layer in enumerate(model.model.layers):
                block = getattr(trained.base_model.model.model.layers[at], self._block)
                for number, expert in enumerate(block.experts):
                    deltas = [getattr(expert, part).get_delta_weight("default") for part in self._parts]
                    gate, up, down = deltas
                    layer.mlp.experts.gate_up_proj[number] += torch.cat([gate, up])
                    layer.mlp.experts.down_proj[number] += down
        self.by_peft["listed"] = model
        return self._folder / "listed"

    def _tree(self) -> nn.Module:
        tree = nn.Module()
        tree.model = nn.Module()
        tree.model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in tree.model.layers:
            block = nn.Module()
            block.experts = nn.ModuleList(nn.Module() for _ in range(EXPERTS))
            for expert in block.experts:
                gate, up, down = self._parts
                setattr(expert, gate, nn.Linear(HIDDEN, INNER, bias=False))
                setattr(expert, up, nn.Linear(HIDDEN, INNER, bias=False))
                setattr(expert, down, nn.Linear(INNER, HIDDEN, bias=False))
            setattr(layer, self._block, block)
        return tree

    def _fused(self) -> Path:
        """An adapter of one tensor for all experts of a layer, and of the attention."""
        torch.manual_seed(3)
        config = LoraConfig(
            r=RANK,
            lora_alpha=3,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
        trained = get_peft_model(self._read(), config).eval()
        trained.save_pretrained(self._folder / "fused")
        self.by_peft["fused"] = trained
        return self._folder / "fused"


@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_pefts(farm: EngineFarm, model_dir: Path, tmp_path: Path, kind: str) -> None:
    """Of prompts and of what follows, in batches of both layouts and of no adapter."""
    trained = Trained(kind, tmp_path, model_dir)
    options = json.dumps({"enable_mixed_moe_lora_format": True})
    arguments = [json.dumps(PROMPTS), options, *map(str, trained.adapters.values())]
    told = run_script(farm, f"experts-{kind}", SCRIPT, trained.base, *arguments, env=PLUGIN_ENV)
    asked = ["base", *trained.adapters] * len(PROMPTS)
    for which, answer in zip(asked, told, strict=True):
        wanted = trained.logprobs(which, answer["tokens"])
        assert answer["logprobs"] == pytest.approx(wanted, abs=NEAR), which
        if which != "base":  # the adapter matters
            assert wanted != pytest.approx(trained.logprobs("base", answer["tokens"]), abs=0.1)
