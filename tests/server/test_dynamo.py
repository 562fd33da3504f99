"""Dynamo's calls as its operator makes them: the same one at every replica, at once and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.errors import Conflict, EngineRejected
from lora_fs.sidecar.model import public_of
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.ports import Loaded, LoadRequest
from lora_fs.sidecar.server.routes import dynamo
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine
from tests.reconcile.test_plan import RECORD
from tests.registry.conftest import write_adapter
from tests.server.conftest import FakeReplica, serving

REPLICAS = ("pod-a", "pod-b")


class Fleet:
    """Replicas on one volume, each with its engine, and clients of them."""

    def __init__(self, clients: list[httpx.Client], engines: list[FakeEngine]) -> None:
        self.clients, self.engines = clients, engines

    def everywhere(self, ask: Callable[[httpx.Client], httpx.Response]) -> list[httpx.Response]:
        """As the operator asks: all replicas at once."""
        with ThreadPoolExecutor(len(self.clients)) as threads:
            return list(threads.map(ask, self.clients))

    def load(self, name: str, uri: str) -> list[httpx.Response]:
        return self.everywhere(lambda one: load(one, name, uri))

    def unload(self, name: str) -> list[httpx.Response]:
        return self.everywhere(lambda one: one.delete(f"/v1/loras/{name}"))


def load(client: httpx.Client, name: str, uri: str) -> httpx.Response:
    return client.post("/v1/loras", json={"lora_name": name, "source": {"uri": uri}})


def holds(schema: str, answer: httpx.Response) -> Any:
    """The answer's body, which is as the schema says."""
    body = answer.json()
    Draft202012Validator(schemas.load(schema)).validate(body)
    return body


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        clients, engines = [], []
        for name in REPLICAS:
            settings = Settings(
                root=tmp_path / "volume",
                create=True,
                model="tiny",
                stage_dir=tmp_path / "stage" / name,
                replica_id=name,
                allowed_sources=(str(tmp_path / "sources"),),
                resync_s=0.2,
            )
            engine = FakeEngine()
            assembly = asyncio.run(assemble(settings, Expectation(), engine))
            app = create_app(
                assembly.replica,
                engine_url="http://127.0.0.1:9",
                admin=Admin(None, insecure="loopback"),
                trail=Trail(tmp_path / "audit"),
                background=assembly.running,
            )
            url = stack.enter_context(serving(app, assembly.replica))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60)))
            engines.append(engine)
        yield Fleet(clients, engines)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return write_adapter(tmp_path / "sources" / "an adapter").as_uri()


def test_what_a_router_sees_of_an_instance(fleet: Fleet, uri: str) -> None:
    """What is in its engine, since when unused, and what failed; nothing that only may be loaded."""
    fleet.engines[1].refuses["sql"] = EngineRejected("rank 64 is over 16", reason="rank")
    began = time.time()
    assert load(fleet.clients[0], "sql", uri).status_code == 200
    assert fleet.clients[1].get("/v1/list_lora_adapters").json() == {"status": "success", "loras": []}
    assert load(fleet.clients[1], "sql", uri).status_code == 400
    rows = [holds("list-lora-adapters", one.get("/v1/list_lora_adapters"))["loras"] for one in fleet.clients]
    ((here,), (there,)) = rows
    assert began <= here["last_used"] <= time.time()
    metadata = holds("metadata", fleet.clients[0].get("/metadata"))["lora"]["loaded_loras"]["sql"]
    assert metadata["last_used"] == pytest.approx(here["last_used"], abs=1)
    assert here["memory_usage"] == metadata["memory_usage"] > 0
    same = {"lora_id": "sql", "base_model": "tiny", "namespace": "default", "revision": "v1"}
    assert {**here, "status": "loaded", **same} == here
    assert {**there, "status": "failed", "last_used": None, **same} == there


def test_all_replicas_are_told_at_once(fleet: Fleet, uri: str) -> None:
    """One registers it, all load it, each says success, and the record is one."""
    answers = fleet.load("sql", uri)
    assert [answer.status_code for answer in answers] == [200] * len(REPLICAS), [a.text for a in answers]
    bodies = [holds("dynamo-lora", answer) for answer in answers]
    (lora_id,) = {body["lora_id"] for body in bodies}
    assert {body["status"] for body in bodies} == {"success"}
    assert [list(map(public_of, engine.adapters)) for engine in fleet.engines] == [["sql"]] * len(REPLICAS)
    for client in fleet.clients:
        listed = holds("dynamo-loras", client.get("/v1/loras"))
        assert listed == {"status": "success", "loras": {"sql": lora_id}, "count": 1}
        (row,) = client.get("/v1/lora_adapters").json()["data"]
        assert (row["record"]["revision"], row["record"]["spec"]["int_id"]) == ("v1", lora_id)


@dataclass
class Late(FakeReplica):
    """Another replica registered ``sql``: the volume says so, and this one sees it at the third look."""

    names: tuple[str, ...] = ("sql",)

    def lookup(self, name: str) -> Served | None:
        found = super().lookup(name)
        return found if self.lookups > 2 else None

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Loaded:
        raise Conflict(f"The lora adapter '{request.lora_name}' has already been loaded.")


@pytest.mark.parametrize(("name", "status"), [("sql", 200), ("law", 400), ("tiny", 400)])
def test_what_another_replica_registered_is_waited_for(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded; what is never seen, and the base model's own name, is the conflict that it was."""
    if status != 200:  # it is never seen: any end of the wait shows that
        monkeypatch.setattr(dynamo, "SEEN_S", 0.3)
    app = create_app(Late(), engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    with serving(app) as url, httpx.Client(base_url=url, **LOCAL) as client:
        answer = load(client, name, RECORD.spec.source.uri)
    assert answer.status_code == status
    assert "already" in answer.text


def test_a_repeat_changes_nothing(fleet: Fleet, uri: str, tmp_path: Path) -> None:
    """An operator asks again whenever it looks; each is told to the audit."""
    one = fleet.clients[0]
    first, again = load(one, "sql", uri).json(), load(one, "sql", f"{uri}/").json()
    assert again["message"] == "LoRA adapter 'sql' already loaded"
    assert again["lora_id"] == first["lora_id"]
    (row,) = one.get("/v1/lora_adapters").json()["data"]
    assert row["record"]["generation"] == 1
    assert (tmp_path / "audit").read_text().count('"register"') == 2


def test_another_source_is_a_conflict(fleet: Fleet, uri: str, tmp_path: Path) -> None:
    """The old weights are not served in silence for the new ones; the source is not told."""
    one = fleet.clients[0]
    load(one, "sql", uri)
    other = write_adapter(tmp_path / "sources" / "other", seed=1).as_uri()
    answer = load(one, "sql", other)
    assert answer.status_code == 400
    assert "registered from another source" in holds("error", answer)["error"]["message"]
    assert uri not in answer.text
    assert len(one.get("/v1/lora_adapters").json()["data"]) == 1


def test_all_replicas_unload_at_once(fleet: Fleet, uri: str) -> None:
    """It is gone from every engine; who comes second, or asks again, is told that it is gone."""
    fleet.load("sql", uri)
    for _ in range(2):
        answers = fleet.unload("sql")
        assert [answer.status_code for answer in answers] == [200] * len(REPLICAS), [a.text for a in answers]
        bodies = [holds("dynamo-lora", answer) for answer in answers]
    assert {body["message"] for body in bodies} == {"LoRA adapter 'sql' not registered"}
    assert "lora_id" not in bodies[0]
    assert [client.get("/v1/loras").json()["count"] for client in fleet.clients] == [0] * len(REPLICAS)


def test_what_an_engine_refuses_is_no_success(fleet: Fleet, uri: str) -> None:
    """Registered by another replica, an adapter that this engine does not take is this call's error."""
    one, two = fleet.clients[:2]
    fleet.engines[1].refuses["sql"] = EngineRejected("rank 64 is over 16", reason="rank")
    assert load(one, "sql", uri).status_code == 200
    answer = load(two, "sql", uri)
    assert (answer.status_code, "rank 64" in answer.text) == (400, True), answer.text


def test_what_may_not_be_loaded(fleet: Fleet) -> None:
    """Sources, names and bodies are held to the rules of every other way to register."""
    one = fleet.clients[0]
    for name, uri in (
        ("sql", "file:///etc"),
        ("sql", "s3://loras/sql"),
        ("sql", "nowhere://x/y"),
        ("../sql", "file:///etc"),
        ("tiny", "file:///etc"),
    ):
        answer = load(one, name, uri)
        assert answer.status_code == 400, uri
        holds("error", answer)
    for body in ({}, {"lora_name": "sql"}, {"lora_name": "sql", "source": "file:///x"}):
        assert not Draft202012Validator(schemas.load("dynamo-load-request")).is_valid(body)
        answer = one.post("/v1/loras", json=body)
        assert answer.status_code == 400
        holds("error", answer)
