"""`GET /metadata`: what routers learn of a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.ports import ReplicaPort
from tests.reconcile.conftest import Rig, make_rig
from tests.security.conftest import CI_A, OPERATORS, TOKENS, Tenants, bearer

__all__ = ["make_rig"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def client_of(replica: ReplicaPort, admin: Admin | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, without a socket."""
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=admin or Admin(None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client:
        yield client


async def lora(replica: ReplicaPort) -> dict[str, Any]:
    async with client_of(replica) as client:
        told: dict[str, Any] = (await client.get("/metadata")).json()["lora"]
        return told


@pytest.mark.parametrize(
    ("held", "names", "copies"),
    [
        (("a",), {"a"}, 1),
        (("a@v1",), {"a", "a@v1"}, 1),  # one copy serves both names
        (("a", "a@v1"), {"a", "a@v1"}, 2),
        (("b@v1",), {"b@v1"}, 1),  # b serves v2
        (("b@v1", "b", "a"), {"b@v1", "b", "a"}, 3),
    ],
)
async def test_every_name_that_needs_no_load_is_listed(
    make_rig: Callable[..., Rig], held: tuple[str, ...], names: set[str], copies: int
) -> None:
    """Also `name@revision`. The counts are of copies: together they are the replica's capacity."""
    rig = make_rig(4)
    await rig.replica.reconcile()  # its first pass would load everything
    for name, revision in (("a", "v1"), ("b", "v1"), ("b", "v2")):
        rig.volume.put(name, revision)
    await rig.replica.reconcile()
    for name in held:
        async with rig.replica.hold(name, 5):
            pass
    told = await lora(rig.replica)
    medians = [rig.replica.durations()[f"{what}_seconds"].median_s() for what in ("stage", "load")]
    assert told["load_seconds"] == (round(sum(filter(None, medians)), 4) if held else None)
    assert told["loaded_loras"].keys() == names
    for name, one in told["loaded_loras"].items():
        served = rig.replica.lookup(name)
        assert served is not None
        assert (one["revision"], one["digest"]) == (served.record.revision, served.record.spec.digest)
    counts = told["lora_capacity"]
    capacity = rig.replica.capacity()
    assert capacity is not None
    assert (counts["loaded_count"], counts["available_slots"]) == (copies, capacity - copies)


async def test_a_withdrawn_adapter_takes_a_slot_until_it_has_drained(make_rig: Callable[..., Rig]) -> None:
    """Nobody may ask for it, so it has no entry. It counts."""
    rig = make_rig(4)
    rig.volume.put("a")
    await rig.replica.reconcile()
    async with rig.replica.hold("a", 5):
        rig.volume.remove("a")
        await rig.settle()
        told = await lora(rig.replica)
        capacity = rig.replica.capacity()
        assert capacity is not None
        assert told["loaded_loras"] == {}
        assert told["lora_capacity"] == {
            "max_loras": told["lora_capacity"]["max_loras"],
            "loaded_count": 1,
            "available_slots": capacity - 1,
        }


async def test_pauses_are_listed_for_those_who_may_read_them(tmp_path: Path) -> None:
    """A pause of all requests concerns everybody. The answers to `/pause` and `/resume` list the same."""
    file = tmp_path / "tokens"
    file.write_text(TOKENS + "register-a-1 name=trainer-a namespaces=team-a verbs=register\n")
    readers = {"nobody": {}, "a": bearer(CI_A), "all": bearer(OPERATORS)}
    async with client_of(Tenants(), Admin(file, ("-",))) as client:

        async def paused() -> dict[str, list[str]]:
            return {
                who: (await client.get("/metadata", headers=headers)).json()["paused"]
                for who, headers in readers.items()
            }

        async def call(path: str, headers: dict[str, str], name: str | None = None) -> list[str]:
            params = {"lora_name": name} if name is not None else {}
            answer = await client.post(path, params=params, headers=headers)
            assert answer.status_code == 200, answer.text
            told: list[str] = answer.json()["paused"]
            return told

        assert await paused() == {"nobody": [], "a": [], "all": []}
        sql, both = ["team-a/sql"], ["team-a/sql", "team-b/law"]
        assert await call("/pause", readers["all"], "team-b/law") == ["team-b/law"]
        assert await call("/pause", readers["a"], "team-a/sql") == sql
        assert await call("/pause", bearer("register-a-1"), "team-a/sql") == sql  # which it may not read
        assert await paused() == {"nobody": [], "a": sql, "all": both}
        assert await call("/pause", readers["all"]) == ["*", *both]
        assert await paused() == {"nobody": ["*"], "a": ["*", *sql], "all": ["*", *both]}
        assert await call("/resume", readers["all"]) == []
        assert await paused() == {"nobody": [], "a": [], "all": []}
