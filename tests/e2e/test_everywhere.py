"""An adapter put on the volume in any way is listed and answered by both replicas."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT, PluginReplica, Replica, SidecarReplica
from lora_fs.demo.waiting import wait_until
from tests.sources.conftest import tar_of

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


def test_the_queue_is_the_engines(pair: Pair[Replica]) -> None:
    """`/metadata` counts what runs in the engine and what waits there, whoever asked; then nothing does."""
    idle, endless = {"running": 0, "waiting": 0}, {"prompt": [PROMPT] * 1_000, "max_tokens": 200}
    body = {**endless, "model": "tiny", "temperature": 0, "ignore_eos": True, "stream": True}

    def queue() -> dict[str, int]:
        told: dict[str, int] = pair.a.http.get("/metadata").raise_for_status().json()["queue"]
        return told

    wait_until("it is idle", lambda: queue() == idle, timeout_s=60)
    with httpx.stream("POST", f"{pair.a.engine_url}/v1/completions", json=body, timeout=200) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()  # kept: the connection ends with it
        assert next(lines)
        wait_until("some run, and others wait", lambda: min(queue().values()) > 0, timeout_s=60)
    wait_until("it is idle again", lambda: queue() == idle, timeout_s=200)


def test_seen_on_the_dashboard(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Either replica serves the page, and its data has what was answered as ready on both."""
    register("shown", adapters(13))
    pair.answer("shown")
    for replica in pair.both:
        page = replica.http.get("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        for path in re.findall(r'"(/dashboard/[^"]+)"', page.text):
            assert replica.http.get(path).status_code == 200, path
        since, cells = "", ""
        while cells != "RR":
            told = replica.http.get(f"/v1/dashboard?since={since}&wait_s=20").raise_for_status()
            if told.status_code != 200:
                continue
            since = told.json()["since"]
            assert len(told.json()["columns"]) == 2
            cells = next((row[6] for row in told.json()["rows"] if row[0] == "shown"), cells)


def test_registered_again_with_the_same_bytes(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """The second call changes nothing and succeeds."""
    register("twice", adapters(11))
    register("twice", adapters(11))
    assert not (pair.volume.scope_dir / "v2" / "twice").exists()
    assert pair.answer("twice")


def test_uploaded_to_one_replica(pair: Pair[Replica], adapters: Adapters, base_answer: str) -> None:
    """A tar that is sent to b is registered, and answered by both."""
    sent = pair.b.http.post(
        "/v1/lora_adapters?name=uploaded",
        content=tar_of(adapters(22), "w:gz"),
        headers={"Content-Type": "application/gzip"},
    )
    assert sent.status_code == 201, sent.text
    pair.wait_listed("uploaded")
    assert pair.answer("uploaded") != base_answer


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


def test_a_canary_by_user(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Each user has one revision on both replicas; a share that grows takes nobody back; both are told of."""
    register("tried", adapters(46))
    register("tried", adapters(47), "--no-activate")
    right = {revision: pair.answer(f"tried@{revision}") for revision in ("v1", "v2")}
    assert right["v1"] != right["v2"]
    crowd = [f"user-{number}" for number in range(8)]

    def asked(replica: Replica, user: str, *, stream: bool) -> str:
        """The revision that a user has, as a header says it and as the answer proves it."""
        ask: Any = replica.openai.completions.with_raw_response.create
        raw = ask(model="tried", prompt=PROMPT, max_tokens=8, temperature=0, user=user, stream=stream)
        pieces = list(raw.parse()) if stream else [raw.parse()]
        assert {piece.model for piece in pieces} == {"tried"}
        revision = str(raw.headers["x-lora-fs-revision"])
        assert "".join(piece.choices[0].text for piece in pieces).strip() == right[revision]
        return revision

    def revisions(*options: str) -> dict[str, str]:
        pair.volume.run("canary", "tried", *options, "--wait", "20")
        first = {user: asked(pair.a, user, stream=False) for user in crowd}
        assert first == {user: asked(pair.b, user, stream=True) for user in crowd}
        return first

    some = revisions("v2", "--percent", "40")
    assert set(some.values()) == {"v1", "v2"}
    more = revisions("--percent", "80")
    assert {user for user in crowd if some[user] == "v2"} < {user for user in crowd if more[user] == "v2"}
    for replica in pair.both:
        text = httpx.get(f"{replica.url}/metrics", **LOCAL).text
        assert 'lora_fs_canary_percent{adapter_name="tried",revision="v2"} 80.0' in text
        assert re.search(r'revision_requests_total{adapter_name="tried",revision="v2"} [1-9]', text)
        told = replica.http.get("/v1/events", params={"name": "tried"}).json()["data"]
        assert {"Registered", "Loaded", "CanaryChanged"} <= {event["reason"] for event in told}
    assert set(revisions("--finish").values()) == {"v2"}
    assert pair.answer("tried") == right["v2"]


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


def test_told_as_dynamos_operator_does(pair: Pair[Replica], adapters: Adapters, base_answer: str) -> None:
    """The same call at both at once, and again: each says success; so it is when it goes."""
    body = {"lora_name": "by-operator", "source": {"uri": adapters(21).as_uri()}}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            loaded = list(pool.map(lambda one: one.http.post("/v1/loras", json=body), pair.both))
            assert [one.status_code for one in loaded] == [200, 200], [one.text for one in loaded]
        (lora_id,) = {one.json()["lora_id"] for one in loaded}
        assert all("by-operator" in replica.engine_names() for replica in pair.both)
        assert pair.answer("by-operator") != base_answer
        for replica in pair.both:
            assert replica.http.get("/v1/loras").json()["loras"]["by-operator"] == lora_id
        gone = list(pool.map(lambda one: one.http.delete("/v1/loras/by-operator"), pair.both))
    assert [one.status_code for one in gone] == [200, 200], [one.text for one in gone]
    pair.wait_delisted("by-operator")
