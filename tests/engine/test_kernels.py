"""What computes the adapters changes no answer: choices of ``LORA_FS_KERNELS`` beside stock vLLM.

Probabilities are compared, not only texts: greedy texts are alike long after numbers are not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file, save_file

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.waiting import wait_until
from tests.engine.bad_adapters import CONFIG, WEIGHTS
from tests.engine.client import LONG_PROMPT, Client, owned
from tests.engine.plugin import FOLLOWED_S, Plugin, plugin_engine
from tests.engine.stream import Stream

Adapters = Callable[[int], Path]
Replace = Callable[[Path, int], Path]

# fp32 sums in another order, over the tiny model's layers.
MOST_APART = 2e-3
VOCABULARY_LAYERS = "vocabulary"  # an adapter of the embedding and of the head, beside the rest
HALVES = "halves"  # a5, whose weights were rounded to bfloat16


# Triton's kernels run in its interpreter here, slowly: they are given one batch.
quick = pytest.mark.parametrize("plugin", ["numba", "torch", "off"], indirect=True)


# An engine calls ``reference`` as it calls ``torch``.
@pytest.fixture(scope="module", params=["numba", "torch", "off", "triton"])
def plugin(
    request: pytest.FixtureRequest,
    farm: EngineFarm,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Plugin]:
    """An engine of eight slots for each choice."""
    name = f"kernels-{request.param}"
    folder = tmp_path_factory.mktemp(name)
    arguments = ("--max-loras", "8", "--max-cpu-loras", "16")
    with plugin_engine(name, farm, model_dir, folder, *arguments, LORA_FS_KERNELS=request.param) as plugin:
        yield plugin


@pytest.fixture(scope="module")
def wanted(
    farm: EngineFarm, model_dir: Path, adapters: Adapters, vocabulary: Path, halves: Path
) -> dict[str, list[float]]:
    """The probabilities stock vLLM gives, one request at a time."""
    arguments = ("--max-loras", "8", "--max-cpu-loras", "16")
    folders = {f"a{seed}": adapters(seed) for seed in range(6)}
    folders |= {VOCABULARY_LAYERS: vocabulary, HALVES: halves}
    with owned(farm.start("kernels-stock", model_dir, args=arguments)) as client:
        for name, folder in folders.items():
            assert client.load(name, folder).status == 200
        return {name: client.logprobs(name) for name in [*folders, MODEL_NAME]}


@pytest.fixture(scope="module")
def vocabulary(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of every layer: also the embedding's look-up, and the head's logits."""
    source, folder = adapters(7), tmp_path_factory.mktemp("vocabulary")
    tensors = load_file(source / WEIGHTS)
    config = json.loads((source / CONFIG).read_text())
    hidden = next(a.shape[1] for name, a in tensors.items() if "q_proj.lora_A" in name)
    base = json.loads((source.parents[1] / MODEL_NAME / "config.json").read_text())
    rank, words, random = config["r"], base["vocab_size"], np.random.default_rng(0)
    shapes = {
        "base_model.model.lm_head.lora_A.weight": (rank, hidden),
        "base_model.model.lm_head.lora_B.weight": (words, rank),
        "base_model.model.model.embed_tokens.lora_embedding_A": (rank, words),
        "base_model.model.model.embed_tokens.lora_embedding_B": (hidden, rank),
    }
    more = {name: (0.2 * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    save_file({**tensors, **more}, folder / WEIGHTS)
    config["target_modules"] = [*config["target_modules"], "embed_tokens", "lm_head"]
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def halves(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter in bfloat16, as most are, for an engine of fp32."""
    folder = tmp_path_factory.mktemp("halves")
    shutil.copytree(adapters(5), folder, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    safetensors.torch.save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def client(
    plugin: Plugin, adapters: Adapters, vocabulary: Path, halves: Path, wanted: dict[str, list[float]]
) -> Client:
    """With all of them loaded."""
    for seed in range(6):
        plugin.load(f"a{seed}", adapters(seed))
    plugin.register(VOCABULARY_LAYERS, vocabulary)
    plugin.register(HALVES, halves)
    return plugin.client


@quick
def test_each_alone(client: Client, wanted: dict[str, list[float]]) -> None:
    """Prefill and decode, every kind of layer, the base model too."""
    for name, probabilities in wanted.items():
        np.testing.assert_allclose(client.logprobs(name), probabilities, atol=MOST_APART, err_msg=name)


def test_all_in_one_batch(
    request: pytest.FixtureRequest, client: Client, wanted: dict[str, list[float]]
) -> None:
    """Nobody's neighbours matter; vLLM's own kernels give the base model's rows an adapter's delta."""
    names = [*wanted] * 2
    if "off" in request.node.name:
        names = [name for name in names if name != MODEL_NAME]
    if "triton" in request.node.name:
        names = ["a0", VOCABULARY_LAYERS, MODEL_NAME, "a1"]
    found = client.logprobs_of_all(names, echo=False)
    for name, probabilities in zip(names, found, strict=True):
        generated = wanted[name][-len(probabilities) :]
        np.testing.assert_allclose(probabilities, generated, atol=MOST_APART, err_msg=name)


@pytest.mark.parametrize("plugin", ["numba", "torch"], indirect=True)
def test_a_prompt_beside_a_neighbours_head(client: Client) -> None:
    """Also where its rows are as many as those that are sampled from, as they are of five tokens here."""
    prompts = [list(range(300, 300 + length)) for length in range(2, 8)]
    wanted = [client.prompt_logprobs(MODEL_NAME, prompt) for prompt in prompts]
    with ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(Stream(client.url, VOCABULARY_LAYERS))
        for _ in range(3):
            found = [client.prompt_logprobs(MODEL_NAME, prompt) for prompt in prompts]
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=MOST_APART)


@quick
def test_half_precision_weights_in_an_fp32_engine(
    request: pytest.FixtureRequest, plugin: Plugin, client: Client, adapters: Adapters, halves: Path
) -> None:
    """They take half the memory where they are read as they are, and as much as others elsewhere."""

    def counted_with(name: str, folder: Path) -> float:
        plugin.register(name, folder)
        assert client.complete(name).status == 200
        wait_until(f"{name}'s load is counted", lambda: name in client.resident(), timeout_s=FOLLOWED_S)
        return client.metric("lora_fs_host_load_bytes_total")

    before = counted_with("another", adapters(4))
    wider = counted_with("again", adapters(5)) - before
    narrow = counted_with("again-in-halves", halves) - before - wider
    assert narrow / wider == pytest.approx(0.5 if "numba" in request.node.name else 1, abs=0.03)


@quick
def test_long_prompts_beside_short_ones(client: Client) -> None:
    """Prefill of one adapter in a batch with decode of others."""
    alone = {name: client.complete(name, prompt=LONG_PROMPT).text for name in ("a0", "a1")}
    answers = client.complete_all(["a2", "a3"] * 2, max_tokens=16)
    assert {answer.status for answer in answers} == {200}
    assert {name: client.complete(name, prompt=LONG_PROMPT).text for name in ("a0", "a1")} == alone
