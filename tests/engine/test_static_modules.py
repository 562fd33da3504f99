"""Adapters that vLLM was started with stay vLLM's own, beside the registry's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.waiting import wait_until
from tests.engine.plugin import FOLLOWED_S, Plugin, check_refused, plugin_engine

Adapters = Callable[[int], Path]


@pytest.fixture(scope="module")
def plugin(
    farm: EngineFarm, model_dir: Path, adapters: Adapters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plugin]:
    """An engine with ``--lora-modules static=…``, and host memory for two adapters more."""
    modules = ("--lora-modules", f"static={adapters(0)}")
    folder = tmp_path_factory.mktemp("static")
    with plugin_engine("static", farm, model_dir, folder, *modules, LORA_FS_HOST_BYTES="290000") as plugin:
        yield plugin


def test_it_is_listed_and_served(plugin: Plugin, adapters: Adapters, right: Callable[[int], str]) -> None:
    """Also after the registry's adapters took turns in what host memory there is."""
    assert plugin.client.complete("static").text == right(0)
    for seed in range(1, 8):
        plugin.load(f"turn-{seed}", adapters(seed))
        assert plugin.client.complete(f"turn-{seed}").text == right(seed)
    assert "static" in plugin.client.names()
    assert plugin.client.complete("static").text == right(0)


def test_its_name_is_taken(plugin: Plugin, adapters: Adapters, right: Callable[[int], str]) -> None:
    """An adapter registered under it is not served in its place, and says so."""
    plugin.volume.run("register", "static", str(adapters(9)))
    wait_until(
        "the conflict is told",
        lambda: "the engine itself serves 'static'" in plugin.volume.run("status").stdout,
        timeout_s=FOLLOWED_S,
    )
    assert plugin.client.complete("static").text == right(0)


def test_it_is_not_unloaded(plugin: Plugin, right: Callable[[int], str]) -> None:
    """What the registry does not have cannot be withdrawn from it."""
    check_refused(plugin.client.unload("never-there"), 404, "never-there")
    assert plugin.client.complete("static").text == right(0)
