"""An adapter put on the volume in any way is listed and answered by both replicas."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PluginReplica, Replica, SidecarReplica

Adapters = Callable[[int], Path]
Register = Callable[..., None]


@pytest.fixture(scope="module", params=[SidecarReplica, PluginReplica], ids=["sidecar", "plugin"])
def kind(request: pytest.FixtureRequest) -> type[Replica]:
    """Both ways to run a replica keep the same promises."""
    found: type[Replica] = request.param
    return found


@pytest.fixture(scope="module", autouse=True)
def base_answer(pair: Pair[Replica]) -> str:
    """What no adapter may answer."""
    return pair.answer("tiny")


def test_registered_by_command(
    pair: Pair[Replica], register: Register, adapters: Adapters, base_answer: str
) -> None:
    """``register --wait`` returns once both list it; both answer alike, unlike the base."""
    register("by-command", adapters(10))
    assert all("by-command" in replica.names() for replica in pair.both)
    assert pair.answer("by-command") != base_answer


def test_registered_again_with_the_same_bytes(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """The second call changes nothing and succeeds."""
    register("twice", adapters(11))
    register("twice", adapters(11))
    assert not (pair.volume.scope_dir / "v2" / "twice").exists()
    assert pair.answer("twice")


def test_loaded_over_http_on_one_replica(pair: Pair[Replica], adapters: Adapters, base_answer: str) -> None:
    """vLLM's own load call at b makes a serve it too."""
    body = {"lora_name": "by-http", "lora_path": str(adapters(12))}
    response = pair.b.http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text
    assert "by-http" in pair.b.names()
    pair.wait_listed("by-http")
    assert pair.answer("by-http") != base_answer


def test_loaded_over_http_again(pair: Pair[Replica], adapters: Adapters) -> None:
    """A name that is taken is refused as vLLM refuses it, on the other replica too."""
    body = {"lora_name": "taken", "lora_path": str(adapters(13))}
    assert pair.a.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    pair.wait_listed("taken")
    response = pair.b.http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert "taken" in response.text


def test_dropped_as_a_folder(pair: Pair[Replica], adapters: Adapters, base_answer: str) -> None:
    """A copy into the tree is adopted without any command."""
    shutil.copytree(adapters(14), pair.volume.scope_dir / "v1" / "by-drop")
    pair.wait_listed("by-drop")
    assert pair.answer("by-drop") != base_answer


def test_promoted_and_rolled_back(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """The plain name follows the pointer, and the answer comes from the right weights."""
    register("moving", adapters(15))
    first = pair.answer("moving")
    register("moving", adapters(16), "--no-activate")
    assert pair.answer("moving") == first
    second = pair.answer("moving@v2")
    assert second != first
    pair.volume.run("promote", "moving", "v2", "--wait", "20")
    assert pair.answer("moving") == second
    pair.volume.run("rollback", "moving", "--wait", "20")
    assert pair.answer("moving") == first


def test_unregistered(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Gone from both lists and out of both engines; every later request is a 404."""
    register("leaving", adapters(17))
    assert pair.answer("leaving")
    pair.volume.run("unregister", "leaving", "--all-revisions", "--wait", "20")
    for replica in pair.both:
        assert "leaving" not in replica.names()
        assert not any("leaving" in name for name in replica.engine_names())
        with pytest.raises(openai.NotFoundError):
            replica.answer("leaving")


def test_registered_anew_under_an_old_name(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """The answer is from the new bytes: no engine kept the old ones, in memory or as KV blocks."""
    register("reborn", adapters(41))
    before = pair.answer("reborn")
    pair.volume.run("unregister", "reborn", "--all-revisions", "--wait", "20")
    register("reborn", adapters(42))
    assert pair.answer("reborn") != before


def test_two_names_of_the_same_bytes(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Taking one away leaves the other served."""
    register("twin-a", adapters(43))
    register("twin-b", adapters(43))
    expected = pair.answer("twin-a")
    assert pair.answer("twin-b") == expected
    pair.volume.run("unregister", "twin-a", "--all-revisions", "--wait", "20")
    assert pair.answer("twin-b") == expected


def test_unloaded_over_http_on_one_replica(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """vLLM's own unload call at a takes it from b too."""
    register("unloaded", adapters(18))
    assert pair.answer("unloaded")
    response = pair.a.http.post("/v1/unload_lora_adapter", json={"lora_name": "unloaded"})
    assert response.status_code == 200, response.text
    pair.wait_delisted("unloaded")
    with pytest.raises(openai.NotFoundError):
        pair.b.answer("unloaded")


def test_one_name_loaded_on_both_replicas_at_once(pair: Pair[Replica], adapters: Adapters) -> None:
    """One caller wins and the other is told; both replicas serve the winner's bytes."""

    def load(replica: Replica, name: str, folder: Path) -> int:
        body = {"lora_name": name, "lora_path": str(folder)}
        return replica.http.post("/v1/load_lora_adapter", json=body).status_code

    folders = (adapters(19), adapters(20))
    with ThreadPoolExecutor(2) as pool:
        for name in (f"contended-{n}" for n in range(8)):
            statuses = sorted(pool.map(load, pair.both, (name, name), folders))
            assert statuses == [200, 400]
            pair.wait_listed(name)
            assert pair.answer(name)
