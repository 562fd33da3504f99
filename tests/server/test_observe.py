"""What is told of ten thousand adapters: a scrape costs what is loaded, not what is registered."""

from __future__ import annotations

import re
from collections import Counter

import httpx
import pytest

from lora_fs.sidecar.model import JsonObject, Phase
from lora_fs.sidecar.server import models
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.server.ports import Served
from tests.server.conftest import FakeReplica

pytestmark = pytest.mark.anyio
SERIES = ("lora_fs_adapter_loaded", "lora_fs_adapter_in_flight", "lora_syncer_adapter_status")


def crowd() -> FakeReplica:
    """Ten thousand evicted adapters, and one in each other phase under that phase's name."""
    others = {phase.value: phase for phase in Phase if phase is not Phase.EVICTED}
    many = [f"a{number}" for number in range(10_000)]
    return FakeReplica((*many, *others), phases=dict.fromkeys(many, Phase.EVICTED) | others)


async def get(replica: FakeReplica, path: str) -> httpx.Response:
    """Ask the app, without a socket."""
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client:
        return await client.get(path)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_only_what_is_loaded_or_failed_has_a_series() -> None:
    """The loaded one has 1 and the failed one 0; the evicted, the waiting and the loading have none."""
    replica = crowd()
    replica.holds["Ready"] = 3
    text = (await get(replica, "/metrics")).text
    found = dict(re.findall(r'^(\w+\{adapter_name="[^"]+"\}) (\S+)$', text, re.MULTILINE))
    loaded, in_flight, syncer = SERIES
    assert found == {
        f'{loaded}{{adapter_name="Ready"}}': "1.0",
        f'{loaded}{{adapter_name="Failed"}}': "0.0",
        f'{in_flight}{{adapter_name="Ready"}}': "3.0",
        f'{in_flight}{{adapter_name="Failed"}}': "0.0",
        f'{syncer}{{adapter_name="Ready"}}': "1.0",
        f'{syncer}{{adapter_name="Failed"}}': "0.0",
    }


async def test_phases_are_counted_without_building_statuses() -> None:
    """Every phase has its number, zeros included, and evicted adapters cost no status each."""
    replica = crowd()
    text = (await get(replica, "/metrics")).text
    found = dict(re.findall(r'^lora_fs_adapters\{phase="(\w+)"\} (\S+)$', text, re.MULTILINE))
    assert {name: float(value) for name, value in found.items()} == {
        **dict.fromkeys(Phase, 1.0),
        Phase.EVICTED: 10_000.0,
    }
    assert replica.built < 10
    empty = (await get(FakeReplica(()), "/metrics")).text
    assert Counter(re.findall(r"^lora_fs_adapters\{.*\} (\S+)$", empty, re.MULTILINE)) == {"0.0": len(Phase)}


async def test_a_list_of_models_is_rendered_once_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter's card is made when the catalog changed, and not again for the next caller."""
    made: list[str] = []
    card = models.card

    def counted(served: Served, parent: str) -> JsonObject:
        made.append(served.name)
        return card(served, parent)

    monkeypatch.setattr(models, "card", counted)
    replica = FakeReplica(("a1", "a2"))
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client:
        first, again = [(await client.get("/v1/models")).content for _ in range(2)]
        assert (first == again, made) == (True, ["a1", "a2"])
        replica.version += 1
        await client.get("/v1/models")
    assert made == ["a1", "a2"] * 2


async def test_liveness_holds_while_nothing_is_ready() -> None:
    """Neither a lost volume nor a dead engine restarts the sidecar."""
    replica = FakeReplica(ready=False)
    assert (await get(replica, "/health")).json() == {"status": "ok"}
    assert (await get(replica, "/readyz")).status_code == 503
