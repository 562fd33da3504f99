"""Two engines behind one server: every adapter is in both or in neither, and both say what one would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.waiting import wait_until
from tests.engine.plugin import BYSTANDER, FOLLOWED_S, Plugin, check_refused, plugin_engine

ADAPTERS = 4
NAMES = tuple(f"a{seed}" for seed in range(ADAPTERS))
ENGINES = ("0", "1")

Adapters = Callable[[int], Path]
Right = Callable[[int], str]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file there with an engine's rank for a name is why that engine loads nothing."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def plugin(
    farm: EngineFarm, model_dir: Path, tmp_path_factory: pytest.TempPathFactory, faults: Path
) -> Iterator[Plugin]:
    """The server and its engines, with two slots each."""
    folder, arguments = tmp_path_factory.mktemp("two-engines"), ("--data-parallel-size", "2")
    settings = {
        "FAULTS": str(faults),
        "LORA_FS_RESYNC_S": "0.2",
        "LORA_FS_HOLD_TIMEOUT_S": "10",
        # vLLM 0.33 gives each engine a memory node of its own, unless this is set; at 0 it simulates none.
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
    }
    with plugin_engine("two-engines", farm, model_dir, folder, *arguments, **settings) as plugin:
        yield plugin


def engines_with(plugin: Plugin, name: str) -> list[str]:
    """The engines that have an adapter in memory, by ``/metrics``."""
    series = rf'^vllm:lora_adapter_loaded{{adapter_name="{name}",engine="(.)"'
    return sorted(re.findall(series, plugin.client.metrics(), re.MULTILINE))


def host_bytes_now(plugin: Plugin) -> float:
    """What both engines have taken, as they say at a pass that began after this call."""
    passes = plugin.client.metric("lora_fs_pass_seconds_count")
    wait_until(
        "two more passes",
        lambda: plugin.client.metric("lora_fs_pass_seconds_count") >= passes + 2,
        timeout_s=FOLLOWED_S,
    )
    return plugin.client.metric("lora_fs_host_bytes")


def test_they_say_what_one_engine_says(plugin: Plugin, adapters: Adapters, right: Right) -> None:
    """More adapters than slots, one after the other and at once; both engines answer."""
    client, wanted = plugin.client, [right(seed) for seed in range(ADAPTERS)]
    base = client.complete(MODEL_NAME).text
    for seed, name in enumerate(NAMES):
        plugin.load(name, adapters(seed))
    assert client.names() == {MODEL_NAME, BYSTANDER, *NAMES}
    # One after the other they take turns.
    assert [client.complete(name).text for name in NAMES for _ in ENGINES] == [
        text for text in wanted for _ in ENGINES
    ]
    answers = client.complete_all([*NAMES, MODEL_NAME] * 3)
    assert [answer.text for answer in answers] == [*wanted, base] * 3
    for engine in ENGINES:
        served = rf'^vllm:prompt_tokens_total{{engine="{engine}",.*}} (\S+)$'
        assert sum(map(float, re.findall(served, client.metrics(), re.MULTILINE))) > 0
    host_bytes_now(plugin)
    assert all(engines_with(plugin, name) == [*ENGINES] for name in NAMES)
    assert client.metric("lora_fs_blank_runs_total") == 0


def test_an_unload_frees_both(plugin: Plugin, adapters: Adapters) -> None:
    """And its name is gone at once."""
    client, before = plugin.client, host_bytes_now(plugin)
    plugin.load("gone", adapters(5))
    assert client.complete("gone").text
    assert host_bytes_now(plugin) > before
    assert engines_with(plugin, "gone") == [*ENGINES]
    assert client.unload("gone").status == 200
    check_refused(client.complete("gone"), 404, "gone")
    assert host_bytes_now(plugin) == before
    assert engines_with(plugin, "gone") == []


def test_a_load_that_one_engine_fails(plugin: Plugin, adapters: Adapters, right: Right, faults: Path) -> None:
    """It is refused with that engine's reason, stays in neither, and works once the cause is gone."""
    client, name, fault = plugin.client, "fails-on-one", faults / ENGINES[1]
    before = host_bytes_now(plugin)
    fault.write_text("the reader found no memory")
    plugin.register(name, adapters(6))
    check_refused(client.complete(name), 400, "the reader found no memory")
    # The other engine's reader may not have ended yet: it gives its room back when it does.
    wait_until("its room is given back", lambda: host_bytes_now(plugin) == before, timeout_s=FOLLOWED_S)
    assert engines_with(plugin, name) == []
    fault.unlink()
    wait_until("it is served", lambda: client.complete(name).status == 200, timeout_s=FOLLOWED_S)
    assert [client.complete(name).text for _ in ENGINES] == [right(6)] * len(ENGINES)
    assert client.unload(name).status == 200
    assert host_bytes_now(plugin) == before
