"""Calls for all replicas at the gateway: loads, unloads and pauses, before real sidecars."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL, Process
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.gateway.conftest import SCOPE, Stubs
from tests.gateway.test_process import health, started, until
from tests.registry.conftest import write_adapter

Complete = Callable[..., httpx.Response]
TOKEN = "trainer-" + "t" * 40
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def owned(fleet: Stubs, tmp_path: Path) -> Stubs:
    """A fleet whose replicas let the holder of TOKEN register, from the folder ``published``."""
    file = tmp_path / "tokens"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    (tmp_path / "published").mkdir()
    fleet.env |= {"LORA_FS_TOKEN_FILE": str(file), "LORA_FS_ALLOWED_SOURCES": str(tmp_path / "published")}
    return fleet


def call(url: str, path: str, *, headers: dict[str, str] = HEADERS, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body or None, headers=headers, timeout=60)


def names(process: Process) -> set[str]:
    return {card["id"] for card in httpx.get(f"{process.url}/v1/models", **LOCAL).json()["data"]}


def loads(fleet: Stubs) -> list[int]:
    return [fleet.counts(number)["loads"] for number in range(len(fleet.engines))]


def test_a_load_ends_when_every_replica_has_it_and_an_unload_when_none_does(
    owned: Stubs, tmp_path: Path, complete: Complete
) -> None:
    """One call loads an adapter on all replicas, which answer without a load; one call takes it away."""
    for _ in range(3):
        owned.add()
    gateway = started(owned, replicas=3)
    source = write_adapter(tmp_path / "published" / "policy")
    done = call(gateway.url, "/v1/load_lora_adapter", lora_name="policy-v1", lora_path=str(source))
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'policy-v1' added successfully.")
    assert loads(owned) == [1, 1, 1]
    for process in owned.sidecars:
        assert complete(process.url, "policy-v1").status_code == 200
    assert loads(owned) == [1, 1, 1]
    again = call(gateway.url, "/v1/load_lora_adapter", lora_name="policy-v1", lora_path=str(source))
    assert again.status_code == 400, again.text
    gone = call(gateway.url, "/v1/unload_lora_adapter", lora_name="policy-v1")
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'policy-v1' removed successfully.",
    )
    for process in (*owned.sidecars, gateway):
        assert complete(process.url, "policy-v1").status_code == 404


def test_replicas_load_at_the_same_time(owned: Stubs, tmp_path: Path) -> None:
    """Every engine is asked to load before one of them is done; the call ends when all are."""
    for _ in range(3):
        owned.add()
    gateway = started(owned, replicas=3)
    source = write_adapter(tmp_path / "published" / "policy")
    for url in owned.engines:
        httpx.post(f"{url}/hold", **LOCAL).raise_for_status()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        path = "/v1/load_lora_adapter"
        loading = pool.submit(call, gateway.url, path, lora_name="policy", lora_path=str(source))
        until(lambda: [owned.counts(number)["asked"] for number in range(3)] == [1, 1, 1], 50)
        assert not loading.done()
        for url in owned.engines:
            httpx.post(f"{url}/release", **LOCAL).raise_for_status()
        assert loading.result().status_code == 200, loading.result().text
    assert loads(owned) == [1, 1, 1]


def test_a_load_that_one_replica_refuses_is_undone_on_all(
    owned: Stubs, tmp_path: Path, complete: Complete
) -> None:
    """The answer names the replica and its reason; no replica serves the adapter afterwards."""
    owned.add()
    owned.add(env={"LORA_FS_MAX_RANK": "1"})
    gateway = started(owned, replicas=2)
    source = write_adapter(tmp_path / "published" / "policy")
    refused = call(gateway.url, "/v1/load_lora_adapter", lora_name="policy", lora_path=str(source))
    assert 400 <= refused.status_code < 500, refused.text
    message = refused.json()["error"]["message"]
    assert "replica r1 answered" in message
    assert "rank" in message
    assert "undone everywhere" in message
    for process in owned.sidecars:
        until(lambda process=process: "policy" not in names(process))  # type: ignore[misc]
        assert complete(process.url, "policy").status_code == 404


def test_a_revision_that_one_replica_refuses_leaves_the_one_before(
    owned: Stubs, tmp_path: Path, complete: Complete
) -> None:
    """A load in place that is undone leaves every replica with the revision that was served."""
    owned.add()
    owned.add(env={"LORA_FS_MAX_RANK": "4"})
    gateway = started(owned, replicas=2)
    first = write_adapter(tmp_path / "published" / "first", rank=4)
    second = write_adapter(tmp_path / "published" / "second", rank=8)
    path = "/v1/load_lora_adapter"
    assert call(gateway.url, path, lora_name="policy", lora_path=str(first)).status_code == 200
    refused = call(gateway.url, path, lora_name="policy", lora_path=str(second), load_inplace=True)
    assert 400 <= refused.status_code < 500, refused.text
    assert "undone everywhere" in refused.json()["error"]["message"]
    for process in owned.sidecars:
        until(lambda process=process: revision(complete(process.url, "policy")) == "v1")  # type: ignore[misc]
        assert complete(process.url, "policy@v2").status_code == 404


def test_a_load_that_the_first_replica_does_not_end_is_undone_on_all(owned: Stubs, tmp_path: Path) -> None:
    """Its time runs out: the answer says when to repeat the load, and a repeat finds no such name."""
    owned.add(env={"LORA_FS_HOLD_TIMEOUT_S": "1"})
    owned.add()
    gateway = started(owned, replicas=2)
    source = write_adapter(tmp_path / "published" / "policy")
    path = "/v1/load_lora_adapter"
    httpx.post(f"{owned.engines[0]}/hold", **LOCAL).raise_for_status()
    late = call(gateway.url, path, lora_name="policy", lora_path=str(source))
    assert (late.status_code, "Retry-After" in late.headers) == (503, True), late.text
    assert "undone everywhere" in late.json()["error"]["message"]
    with closing(Registry(owned.root)) as registry:
        assert not release.present_revisions(registry, SCOPE, "policy")
    httpx.post(f"{owned.engines[0]}/release", **LOCAL).raise_for_status()
    again = call(gateway.url, path, lora_name="policy", lora_path=str(source))
    assert again.status_code == 200, again.text


def test_a_replica_that_hangs_holds_up_no_load(owned: Stubs, tmp_path: Path) -> None:
    """The load ends once the gateway has left the replica out; awake, the replica follows the registry."""
    for _ in range(2):
        owned.add()
    gateway = started(owned, replicas=2)
    source = write_adapter(tmp_path / "published" / "policy")
    with owned.sidecars[1].paused():
        done = call(gateway.url, "/v1/load_lora_adapter", lora_name="policy-v1", lora_path=str(source))
        assert done.status_code == 200, done.text
        assert list(health(gateway)["ready"]) == ["r0"]
    until(lambda: "policy-v1" in names(owned.sidecars[1]))


@pytest.mark.parametrize("active", [True, False])
def test_an_undone_load_takes_away_only_what_it_made(
    owned: Stubs, tmp_path: Path, complete: Complete, active: bool
) -> None:
    """A revision that was registered before the load stays so, and served if it was. So does a repeat."""
    first = write_adapter(tmp_path / "published" / "first", rank=4)
    again = write_adapter(tmp_path / "published" / "again", rank=8)
    with closing(Registry(owned.root)) as registry:
        for source, serves in ((first, True), (again, active)):
            wanted = Registration("policy", source, source.as_uri(), activate=serves)
            ingest.register(registry, SCOPE, wanted, Expectation(("tiny",)), writer="test")
        owned.add()
        owned.add(env={"LORA_FS_MAX_RANK": "4"})
        gateway = started(owned, replicas=2)
        before = release.present_revisions(registry, SCOPE, "policy")
        serving = release.active(registry, SCOPE, "policy")
        for _ in range(2):
            refused = call(
                gateway.url,
                "/v1/load_lora_adapter",
                lora_name="policy",
                lora_path=str(again),
                load_inplace=True,
            )
            assert 400 <= refused.status_code < 500, refused.text
            assert "undone everywhere" in refused.json()["error"]["message"]
            assert release.present_revisions(registry, SCOPE, "policy") == before
            now = release.active(registry, SCOPE, "policy")
            assert now is not None
            assert serving is not None
            assert (now.revision, now.previous_revision) == (serving.revision, serving.previous_revision)
        url, served = owned.sidecars[0].url, "v2" if active else "v1"
        until(lambda: revision(complete(url, "policy")) == served)


@pytest.mark.parametrize("same", [True, False])
def test_two_gateways_that_undo_a_load_of_one_name(
    owned: Stubs, tmp_path: Path, complete: Complete, same: bool
) -> None:
    """Neither leaves what the other one made: the name serves what it did before both."""
    seeds = (1, 1 if same else 2)
    sources = [write_adapter(tmp_path / "published" / str(seed), seed, rank=8) for seed in seeds]
    first = write_adapter(tmp_path / "published" / "first", rank=4)
    owned.add()
    owned.add(env={"LORA_FS_MAX_RANK": "4"})
    gateways = [started(owned, replicas=2) for _ in sources]
    path = "/v1/load_lora_adapter"
    assert call(gateways[0].url, path, lora_name="policy", lora_path=str(first)).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loads = [
            pool.submit(call, gateway.url, path, lora_name="policy", lora_path=str(source), load_inplace=True)
            for gateway, source in zip(gateways, sources, strict=True)
        ]
        for load in loads:
            assert "undone everywhere" in load.result().json()["error"]["message"], load.result().text
    with closing(Registry(owned.root)) as registry:
        assert list(release.present_revisions(registry, SCOPE, "policy")) == ["v1"]
    for process in owned.sidecars:
        until(lambda process=process: revision(complete(process.url, "policy")) == "v1")  # type: ignore[misc]


def test_a_load_that_follows_another_ends_when_the_name_serves_the_revision(
    owned: Stubs, tmp_path: Path, complete: Complete
) -> None:
    """A mount that shows a revision before its pointer is waited for; one that is not active is not."""
    process = owned.add()
    source = write_adapter(tmp_path / "published" / "policy")
    with closing(Registry(owned.root)) as registry, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name in ("late", "never"):
            wanted = Registration(name, source, source.as_uri(), activate=False)
            ingest.register(registry, SCOPE, wanted, Expectation(("tiny",)), writer="test")
        late, never = (
            pool.submit(
                call,
                process.url,
                f"/v1/lora_adapters/default/tiny/{name}/load",
                revision="v1",
                active=name == "late",
            )
            for name in ("late", "never")
        )
        assert never.result().status_code == 200, never.result().text
        until(lambda: complete(process.url, "late@v1").status_code == 200)
        assert not late.done()
        release.promote(registry, SCOPE, "late", "v1", writer="test")
        assert late.result().status_code == 200, late.result().text
        assert complete(process.url, "late").status_code == 200


def revision(answer: httpx.Response) -> str:
    return answer.headers["x-lora-fs-revision"]


def test_who_has_no_token_changes_nothing(owned: Stubs, tmp_path: Path) -> None:
    """Replicas check the caller's credentials for each call."""
    owned.add()
    gateway = started(owned, replicas=1)
    source = write_adapter(tmp_path / "published" / "policy")
    body: dict[str, Any] = {"lora_name": "policy", "lora_path": str(source)}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/load_lora_adapter", body),
        ("/v1/unload_lora_adapter", {"lora_name": "a1"}),
        ("/pause", {}),
        ("/resume", {}),
    ]
    for path, sent in calls:
        assert call(gateway.url, path, headers={}, **sent).status_code == 401, path
    assert httpx.get(f"{gateway.url}/server_info", **LOCAL).status_code == 401
    assert names(owned.sidecars[0]) >= {"a1"}


def test_a_pause_of_one_adapter_holds_its_requests_at_every_gateway(owned: Stubs, complete: Complete) -> None:
    """Requests for the paused adapter wait, whichever gateway they come by; those for another one go on."""
    owned.add()
    owned.add()
    one, other = started(owned, replicas=2), started(owned, replicas=2)
    paused = call(one.url, "/pause?mode=wait&lora_name=a1")
    assert paused.status_code == 200, paused.text
    assert {tuple(told["paused"]) for told in paused.json()["replicas"].values()} == {("default/a1",)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(complete, gateway.url, "a1") for gateway in (one, other)]
        assert complete(one.url, "a2").status_code == 200
        assert complete(other.url, "tiny").status_code == 200
        done, _ = concurrent.futures.wait(waiting, timeout=0.5)
        assert not done
        assert call(other.url, "/resume?lora_name=a1").status_code == 200
        assert [future.result().status_code for future in waiting] == [200, 200]


def test_a_pause_waits_for_what_is_under_way_and_holds_the_rest(owned: Stubs, complete: Complete) -> None:
    """mode=wait answers when no request is under way; then every request waits until the resume."""
    owned.add()
    gateway = started(owned, replicas=1)
    assert complete(gateway.url, "a1").status_code == 200  # it is loaded
    httpx.post(f"{owned.engines[0]}/hold", **LOCAL).raise_for_status()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = pool.submit(complete, gateway.url, "a1")
        until(lambda: owned.counts(0)["under_way"] == 1)
        pausing = pool.submit(call, gateway.url, "/pause?mode=wait")
        done, _ = concurrent.futures.wait([running, pausing], timeout=0.5)
        assert not done
        httpx.post(f"{owned.engines[0]}/release", **LOCAL).raise_for_status()
        assert pausing.result().status_code == 200
        assert owned.counts(0)["under_way"] == 0
        assert running.result().status_code == 200
        held = pool.submit(complete, gateway.url, "tiny")
        done, _ = concurrent.futures.wait([held], timeout=0.5)
        assert not done
        assert owned.counts(0)["under_way"] == 0
        assert call(gateway.url, "/resume").status_code == 200
        assert held.result().status_code == 200


def test_all_replicas_are_paused_or_none(owned: Stubs, tmp_path: Path, complete: Complete) -> None:
    """Where one replica refuses a pause, the others go on, and the answer says which and why."""
    other = tmp_path / "other-tokens"
    other.write_text("other-" + "o" * 40 + "\n")
    other.chmod(0o600)
    owned.add()
    owned.add(env={"LORA_FS_TOKEN_FILE": str(other)})
    gateway = started(owned, replicas=2)
    refused = call(gateway.url, "/pause")
    assert refused.status_code == 401
    message = refused.json()["error"]["message"]
    assert "replica r1 answered 401" in message
    assert "no replica is paused" in message
    assert {complete(process.url, "a1").status_code for process in owned.sidecars} == {200}


@pytest.mark.parametrize(
    ("query", "status", "told"),
    [("?mode=abort", 400, "mode=keep"), ("?lora_name=nobody", 404, "nobody"), ("?lora_name=a1@v1", 400, "@")],
)
def test_a_pause_that_means_nothing_is_refused(
    owned: Stubs, query: str, status: int, told: str, complete: Complete
) -> None:
    """A pause that aborts, of an unknown adapter or of one revision is refused with its reason."""
    owned.add()
    gateway = started(owned, replicas=1)
    refused = call(gateway.url, f"/pause{query}")
    assert refused.status_code == status, refused.text
    assert told in refused.json()["error"]["message"]
    assert complete(gateway.url, "a1").status_code == 200


def test_the_engines_configuration_is_the_common_one_or_the_difference(owned: Stubs) -> None:
    """/server_info is what all engines say; where they differ, 409 says in what."""
    owned.add()
    owned.add()
    gateway = started(owned, replicas=2)
    path = "/server_info?config_format=json"
    told = httpx.get(f"{gateway.url}{path}", headers=HEADERS, **LOCAL)
    assert told.status_code == 200, told.text
    assert told.json()["vllm_config"]["pace"]["load_s"] == 0.0
    assert told.json()["vllm_env"] == {"VLLM_PLUGINS": ""}, "no engine's own"
    owned.add(load_s=0.1)
    until(lambda: len(health(gateway)["ready"]) == 3)
    differ = httpx.get(f"{gateway.url}{path}", headers=HEADERS, **LOCAL)
    assert differ.status_code == 409
    assert "vllm_config.pace.load_s: 0.0 and 0.1" in differ.json()["error"]["message"]


@pytest.mark.parametrize(
    "page",
    [
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"},
    ],
    ids=["another origin", "another site", "a name made to resolve to the gateway"],
)
def test_a_page_of_another_site_changes_nothing(fleet: Stubs, page: dict[str, str]) -> None:
    """Replicas that let anybody register see the gateway's address alone: the gateway refuses the page."""
    fleet.add(env={"LORA_FS_INSECURE": "any"})
    gateway = started(fleet, replicas=1)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("/pause", {}),
        ("/v1/unload_lora_adapter", {"lora_name": "a1"}),
        ("/v1/lora_adapters/default/tiny/a1/unregister", {"revision": "v1"}),
    ]
    for path, body in changes:
        refused = call(gateway.url, path, headers=page, **body)
        assert refused.status_code == 403, (path, refused.text)
    asked = call(gateway.url, "/v1/completions", headers=page, model="a1", prompt="x")
    assert asked.status_code == 200, "it changes nothing"
    assert "a1" in names(fleet.sidecars[0])
    assert call(gateway.url, "/v1/unload_lora_adapter", headers={}, lora_name="a1").status_code == 200
