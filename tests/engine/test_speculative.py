"""Speculative decoding: an adapter says what it says without, in a batch of others too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.engine.bad_adapters import CONFIG, WEIGHTS
from tests.engine.client import owned
from tests.engine.plugin import plugin_engine

HEAD = "head"
SLOTS = ("--max-loras", "8", "--max-cpu-loras", "16")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
TOKENS = 48  # greedy texts of the tiny model repeat themselves before


@pytest.fixture(scope="module")
def head(adapters: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the output layer, beside the rest: of several rows a request, all are its."""
    source, folder = adapters(7), tmp_path_factory.mktemp("head")
    tensors = load_file(source / WEIGHTS)
    config = json.loads((source / CONFIG).read_text())
    base = json.loads((source.parents[1] / MODEL_NAME / "config.json").read_text())
    random = np.random.default_rng(3)
    for part, shape in (
        ("A", (config["r"], base["hidden_size"])),
        ("B", (base["vocab_size"], config["r"])),
    ):
        matrix = (0.2 * random.standard_normal(shape)).astype(np.float32)
        tensors[f"base_model.model.lm_head.lora_{part}.weight"] = matrix
    save_file(tensors, folder / WEIGHTS)
    config["target_modules"] = [*config["target_modules"], "lm_head"]
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_drafts_change_no_answer(
    farm: EngineFarm, model_dir: Path, adapters: Callable[[int], Path], head: Path, tmp_path: Path
) -> None:
    """With drafts from the text itself, which are tried and taken; an adapter of the output layer beside."""
    folders = {"a0": adapters(0), "a1": adapters(1), HEAD: head}
    names = [*folders, MODEL_NAME]
    with owned(farm.start("stock-undrafted", model_dir, args=SLOTS)) as client:
        for name, folder in folders.items():
            assert client.load(name, folder).status == 200
        wanted = {name: client.complete(name, max_tokens=TOKENS).text for name in names}
    assert len(set(wanted.values())) == len(names)
    arguments = (*SLOTS, "--speculative-config", json.dumps(NGRAM))
    with plugin_engine("drafts", farm, model_dir, tmp_path, *arguments) as plugin:
        for name, folder in folders.items():
            plugin.register(name, folder)
        client = plugin.client
        with plugin.unharmed(steady=False):  # how long a step with drafts takes is no matter here
            assert {name: client.complete(name, max_tokens=TOKENS).text for name in names} == wanted
            answers = client.complete_all(names * 2, max_tokens=TOKENS)
        assert [answer.text for answer in answers] == [wanted[name] for name in names * 2]
        assert client.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
