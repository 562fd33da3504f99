"""A model whose output layer is its embedding, and adapters of both as PEFT trains them as one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.engine.client import owned
from tests.engine.plugin import plugin_engine
from tests.engine.rounding import near

TOKENS = [1, 300, 310, 320, 330, 340, 350]
NAMES = ("embedding", "head")


@pytest.fixture(scope="module")
def tied(model_dir: Path, adapters: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its output layer tied, and its adapters beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tied")
    shutil.copytree(model_dir, folder / MODEL_NAME)
    shutil.copytree(adapters(15), folder / "adapters" / "a15")
    config = LlamaConfig.from_pretrained(model_dir, tie_word_embeddings=True)
    LlamaForCausalLM.from_pretrained(model_dir, config=config).save_pretrained(folder / MODEL_NAME)
    return folder


@pytest.fixture(scope="module")
def peft(tied: Path) -> dict[str, list[float]]:
    """What PEFT makes of a prompt with each adapter, which it saves in the folder of adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    told = {}
    for name, target in zip(NAMES, ("embed_tokens", "lm_head"), strict=True):
        torch.manual_seed(7)
        base = LlamaForCausalLM.from_pretrained(tied / MODEL_NAME)
        config = LoraConfig(
            r=4, target_modules=[target, "q_proj"], ensure_weight_tying=True, init_lora_weights=False
        )
        model = get_peft_model(base, config).eval()
        model.save_pretrained(tied / "adapters" / name, save_embedding_layers=False)
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
        told[name] = [float(logits[at, token]) for at, token in enumerate(TOKENS[1:])]
    return told


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own about tied layers
def test_an_adapter_of_tied_embeddings(
    farm: EngineFarm, tied: Path, peft: dict[str, list[float]], tmp_path: Path
) -> None:
    """Nothing refuses it: vLLM's answer is PEFT's, and so is the plugin's."""
    config = json.loads((tied / "adapters" / "embedding" / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"]
    with owned(farm.start("stock-tied", tied / MODEL_NAME)) as client:
        for name in NAMES:
            assert client.load(name, tied / "adapters" / name).status == 200
            assert client.prompt_logprobs(name, TOKENS) == near(peft[name])
        base = client.prompt_logprobs(MODEL_NAME, TOKENS)
    with plugin_engine("tied", farm, tied / MODEL_NAME, tmp_path) as plugin:
        for name in NAMES:
            plugin.load(name, tied / "adapters" / name)
            assert plugin.client.prompt_logprobs(name, TOKENS) == near(peft[name])
            assert base != pytest.approx(peft[name], abs=0.01)
