"""What is told of ten thousand adapters: a scrape costs what is loaded, not what is registered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from lora_fs.sidecar.errors import EngineRejected
from lora_fs.sidecar.model import AdapterStatus, JsonObject, Phase
from lora_fs.sidecar.reconcile.residents.engine_state import COUNTERS
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.ports import Served
from lora_fs.sidecar.server.routes import models, observe
from tests.reconcile.conftest import Rig, make_rig
from tests.server.conftest import FakeReplica

__all__ = ["make_rig"]

pytestmark = pytest.mark.anyio
SERIES = ("lora_fs_adapter_loaded", "lora_fs_adapter_in_flight", "lora_syncer_adapter_status")


def series(text: str) -> dict[str, str]:
    """Every series by name that a scrape gives, with its value."""
    return dict(re.findall(r'^(\w+\{adapter_name="[^"]+"\}) (\S+)$', text, re.MULTILINE))


def crowd() -> FakeReplica:
    """Ten thousand evicted adapters, and one in each other phase under that phase's name."""
    others = {phase.value: phase for phase in Phase if phase is not Phase.UNLOADED}
    many = [f"a{number}" for number in range(10_000)]
    return FakeReplica((*many, *others), phases=dict.fromkeys(many, Phase.UNLOADED) | others)


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
    found = series(text)
    loaded, in_flight, syncer = SERIES
    assert found == {
        f'{loaded}{{adapter_name="Ready"}}': "1.0",
        f'{loaded}{{adapter_name="Failed"}}': "0.0",
        f'{in_flight}{{adapter_name="Ready"}}': "3.0",
        f'{in_flight}{{adapter_name="Failed"}}': "0.0",
        f'{syncer}{{adapter_name="Ready"}}': "1.0",
        f'{syncer}{{adapter_name="Failed"}}': "0.0",
    }


async def test_adapters_without_effect_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not."""
    replica = FakeReplica(("null", "good"))
    plain = replica.status

    def status(name: str) -> AdapterStatus:
        return plain(name).model_copy(update={"reason": "NoEffect" if name == "null" else "Loaded"})

    monkeypatch.setattr(replica, "status", status)
    assert "\nlora_fs_adapters_without_effect 1.0\n" in (await get(replica, "/metrics")).text


async def test_series_are_bounded() -> None:
    """Of ten thousand that fail a thousand have series, after what is loaded; those without are counted."""
    names = [f"a{number:05d}" for number in range(10_000)]
    replica = FakeReplica((*names, "z"), phases=dict.fromkeys(names, Phase.FAILED))
    text = (await get(replica, "/metrics")).text
    assert f'{SERIES[0]}{{adapter_name="z"}} 1.0' in text
    for name in (*SERIES, "lora_fs_adapter_failed"):
        assert 999 <= text.count(f"\n{name}{{") <= observe.MAX_NAMES
    assert "\nlora_fs_adapters_without_series 9000.0\n" in text
    assert len(text) < 500_000


async def test_what_is_loaded_hides_neither_a_failure_nor_a_busy_adapter() -> None:
    """Alerts name what fails, and autoscalers sum up requests, however many the engine holds."""
    loaded = [f"a{number:04d}" for number in range(1500)]
    replica = FakeReplica((*loaded, "broken"), phases={"broken": Phase.FAILED})
    replica.holds["a1499"] = 7
    text = (await get(replica, "/metrics")).text
    assert '\nlora_fs_adapter_failed{adapter_name="broken",' in text
    assert f'\n{SERIES[1]}{{adapter_name="a1499"}} 7.0\n' in text
    assert text.count(f"\n{SERIES[0]}{{") == observe.MAX_NAMES
    assert "\nlora_fs_adapters_without_series 500.0\n" in text


@pytest.mark.parametrize("last", ["unregistered", "registered anew", "failed"])
async def test_a_series_goes_with_its_adapter(make_rig: Callable[..., Rig], last: str) -> None:
    """Unregistered, it has none; registered anew, evicted is none; failing again, it has its own again."""
    rig = make_rig()
    app = FastAPI()
    app.include_router(observe.router(rig.replica, Admin(None), Trail(None)))

    async def scrape() -> dict[str, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client:
            return series((await client.get("/metrics")).text)

    rig.volume.put("a")
    await rig.replica.reconcile()
    async with rig.replica.hold("a", 5):
        assert {name: value for name, value in (await scrape()).items() if SERIES[1] in name} == {
            f'{SERIES[1]}{{adapter_name="a"}}': "1.0"
        }
    rig.volume.remove("a")
    await rig.settle()
    assert await scrape() == {}
    if last == "unregistered":
        return
    rig.volume.put("a", "v2")
    await rig.settle()
    assert await scrape() == {}
    if last == "failed":
        rig.engine.refuses["a-v2"] = EngineRejected("no", reason="no")
        with pytest.raises(EngineRejected):
            async with rig.replica.hold("a", 5):
                pass
        assert (await scrape())[f'{SERIES[2]}{{adapter_name="a"}}'] == "0.0"


async def test_counters_are_there_before_their_first_event(make_rig: Callable[..., Rig]) -> None:
    """With 0: Prometheus sees no increase in a series that begins at 1."""
    counted = make_rig().replica.counters()
    assert set(COUNTERS) <= counted.keys()
    assert set(counted.values()) == {0}


async def test_loads_are_timed(make_rig: Callable[..., Rig]) -> None:
    """The copy, the load and the pass, in seconds, as histograms whose count is that of the loads."""
    rig = make_rig()
    rig.volume.put("a")
    await rig.replica.reconcile()
    async with rig.replica.hold("a", 5):
        pass
    families = {family.name: family for family in observe.Scrape(rig.replica).collect()}
    for name in ("lora_fs_stage_seconds", "lora_fs_load_seconds"):
        samples = {s.labels.get("le", s.name): s.value for s in families[name].samples}
        assert samples["+Inf"] == samples[f"{name}_count"] == 1


async def test_phases_are_counted_without_building_statuses() -> None:
    """Every phase has its number, zeros included, and evicted adapters cost no status each."""
    replica = crowd()
    text = (await get(replica, "/metrics")).text
    found = dict(re.findall(r'^lora_fs_adapters\{phase="(\w+)"\} (\S+)$', text, re.MULTILINE))
    assert {name: float(value) for name, value in found.items()} == {
        **dict.fromkeys(Phase, 1.0),
        Phase.UNLOADED: 10_000.0,
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
