"""Two workers that share a model, and its only key and value head: each has its share of an adapter."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import module_command
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.engine.bad_adapters import BAD
from tests.engine.client import owned
from tests.engine.plugin import BYSTANDER, Plugin, plugin_engine
from tests.engine.stream import Stream
from tests.engine.test_plugin_day import ALLOWED

ADAPTERS = 4
STEPS = 50


@pytest.fixture(scope="module")
def model_dir(farm: EngineFarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with one key and value head, and adapters of it."""
    folder = tmp_path_factory.mktemp("one-head")
    # The last one is the bystander's.
    options = ("--adapters", "16", "--kv-heads", "1")
    subprocess.run(
        module_command("lora_fs.demo.tiny_llama", str(folder), *options), check=True, capture_output=True
    )
    farm.wait_imported()
    return folder / MODEL_NAME


@pytest.fixture(scope="module")
def answers(farm: EngineFarm, model_dir: Path) -> list[str]:
    """What the first adapters say on a stock engine of one worker."""
    with owned(farm.start("one-worker", model_dir)) as client:
        folders = {f"a{seed}": model_dir.parent / "adapters" / f"a{seed}" for seed in range(ADAPTERS)}
        assert all(client.load(name, folder).status == 200 for name, folder in folders.items())
        return [client.complete(name).text for name in folders]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is put there goes wrong in one worker."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def plugin(
    farm: EngineFarm, model_dir: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plugin]:
    """The engine of two workers, with two slots; its operator allowed all that can be allowed."""
    folder = tmp_path_factory.mktemp("two-workers")
    arguments = ("--tensor-parallel-size", "2")
    settings = {"LORA_FS_ALLOW": ALLOWED, "FAULTS": str(faults)}
    with plugin_engine("workers", farm, model_dir, folder, *arguments, **settings) as plugin:
        yield plugin


def test_they_say_what_one_worker_says(plugin: Plugin, model_dir: Path, answers: list[str]) -> None:
    """More adapters than slots, one after the other and at once; none ran without its weights."""
    names = [f"a{seed}" for seed in range(ADAPTERS)]
    for name in names:
        plugin.register(name, model_dir.parent / "adapters" / name)
    assert [plugin.client.complete(name).text for name in names] == answers
    assert [answer.text for answer in plugin.client.complete_all(names * 2)] == answers * 2
    assert plugin.client.metric("lora_fs_blank_runs_total") == 0
    assert len(set(answers)) == ADAPTERS


@pytest.mark.parametrize("kind", ["half-hidden", "oversized"])
def test_a_shares_sizes_are_not_an_adapters(plugin: Plugin, model_dir: Path, kind: str) -> None:
    """Half of every layer is what a worker has, and yet no adapter of this model."""
    made = BAD[kind].make(model_dir.parent / "adapters" / "a0", plugin.sources / kind)
    answer = plugin.client.load(kind, made)
    assert answer.status == 400
    assert "model.layers." in answer.error["message"]
    assert plugin.client.healthy()


def test_a_slow_worker_holds_up_its_adapter_alone(
    plugin: Plugin, model_dir: Path, faults: Path, answers: list[str]
) -> None:
    """Its request waits; steps go on, and the workers are hardly asked meanwhile."""
    plugin.register("slow", model_dir.parent / "adapters" / "a0")
    (faults / "slow-1").touch()
    with plugin.unharmed(steady=False) as stream, ThreadPoolExecutor(1) as client:
        waiting = client.submit(plugin.client.complete, "slow")
        stream.wait_tokens(STEPS)
        assert not waiting.done()
        (faults / "slow-1").unlink()
        assert waiting.result().text == answers[0]


def test_a_worker_that_fails_ends_the_answers_it_would_spoil(
    plugin: Plugin, model_dir: Path, faults: Path, answers: list[str]
) -> None:
    """What it and the other add up to is no adapter's. The client gets the reason, and others go on."""
    plugin.register("spoiled", model_dir.parent / "adapters" / "a1")
    with Stream(plugin.client.url, BYSTANDER, engine=plugin.client.engine) as stream:
        (faults / "fill-1").write_text("the second worker has no memory")
        lost = plugin.client.complete("spoiled", max_tokens=200)
        assert lost.status == 503, lost
        assert "no memory" in lost.error["message"]
        (faults / "fill-1").unlink()
        assert plugin.client.complete("spoiled").text == answers[1]
    stream.check_unharmed(steady=False)
