"""Our kernels in a model that vLLM compiles: right answers, and hardly more to compile than without them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.tiny_llama import TARGET_MODULES
from tests.engine.scripts import run_script

SCRIPT = "compiled_model.py"
LAYERS = 3  # of which what is between two attentions is alike
PROMPTS = [[1, 300, 310, 320, 330, 340, 350], [1, *range(300, 312)]]
RANKS = (4, 16)
NEAR = 1e-4
OURS = {**PLUGIN_ENV, "LORA_FS_KERNELS": "triton"}


@pytest.fixture(scope="module")
def deep(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of more layers than the tiny one."""
    folder = tmp_path_factory.mktemp("deep")
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(model_dir, num_hidden_layers=LAYERS)
    LlamaForCausalLM(config).save_pretrained(folder / "deep")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "deep" / name).write_bytes((model_dir / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def peft(deep: Path) -> list[Any]:
    """PEFT's models: the base, and one for each adapter, which it saves."""
    models: list[Any] = [LlamaForCausalLM.from_pretrained(deep / "deep").eval()]
    for rank in RANKS:
        torch.manual_seed(rank)
        base = LlamaForCausalLM.from_pretrained(deep / "deep")
        config = LoraConfig(r=rank, target_modules=list(TARGET_MODULES), init_lora_weights=False)
        models.append(get_peft_model(base, config).eval())
        models[-1].save_pretrained(deep / f"r{rank}")
    return models


def run(
    farm: EngineFarm, deep: Path, cache: Path, env: Mapping[str, str], ranks: Sequence[int] = RANKS
) -> Any:
    """Nothing of what is compiled is there before; what vLLM knows of model classes may be."""
    known = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm/modelinfos"
    if known.is_dir():
        (cache / "modelinfos").symlink_to(known)
    env = {**env, "VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    adapters = [str(deep / f"r{rank}") for rank in ranks]
    return run_script(farm, cache.name, SCRIPT, deep / "deep", json.dumps(PROMPTS), *adapters, env=env)


def by_peft(model: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]


def test_a_compiled_model_has_the_right_answers(
    farm: EngineFarm, deep: Path, peft: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PEFT's, of prompts and of what follows, in batches of adapters and none; stock's artifacts.

    Stock vLLM computes no adapter in a model compiled on a CPU: its artifacts alone are compared.
    """
    ours = run(farm, deep, tmp_path_factory.mktemp("ours"), OURS, RANKS)
    for number, answer in enumerate(ours["answers"]):
        wanted = by_peft(peft[number % len(peft)], answer["tokens"])
        assert answer["logprobs"] == pytest.approx(wanted, abs=NEAR)
    texts = {tuple(answer["tokens"]) for answer in ours["answers"]}
    assert len(texts) == len(ours["answers"])
    stock = run(farm, deep, tmp_path_factory.mktemp("stock"), {"VLLM_PLUGINS": ""}, ())
    for count in ("num_inductor_compiles", "num_compiled_artifacts_saved", "num_backend_compilations"):
        assert ours["counts"][count] <= stock["counts"][count] + 2, count
    assert ours["counts"]["num_piecewise_graphs_seen"] == stock["counts"]["num_piecewise_graphs_seen"]
    assert stock["counts"]["num_compiled_artifacts_saved"] > 0
