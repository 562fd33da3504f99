"""What an engine's restart changes: failures of before are tried at once, and hold up no eviction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from lora_fs.sidecar.errors import EngineGone, EngineRejected, EngineUnavailable, LoraFsError
from lora_fs.sidecar.model import Phase, Policy, PolicyKind
from lora_fs.sidecar.reconcile.residents.engine_state import RESTARTS
from tests.reconcile.conftest import Rig

MakeRig = Callable[..., Rig]

pytestmark = pytest.mark.anyio

PINNED = Policy(kind=PolicyKind.PINNED)
MANY = 12  # failures: the next try is minutes away


async def use(rig: Rig, name: str) -> None:
    async with rig.replica.hold(name, 5):
        pass


async def fail(rig: Rig, name: str, kind: type[LoraFsError], pause_s: float = 400) -> None:
    """Ask for an adapter time and again."""
    for _ in range(MANY):
        rig.clock.now += pause_s
        with suppress(kind):
            await use(rig, name)


async def restart(rig: Rig) -> None:
    """End the engine and start it, with other options perhaps: it has no adapter."""
    rig.engine.up = False
    rig.engine.adapters.clear()
    await rig.settle()
    rig.engine.up = True
    rig.engine.refuses.clear()


async def test_requests_during_an_outage_delay_no_pinned_adapter(make_rig: MakeRig) -> None:
    """An engine that takes no connection says nothing of the adapters that clients asked for meanwhile."""
    rig = make_rig(4)
    rig.volume.put("sql", policy=PINNED)
    await rig.settle()
    (engine_name,) = rig.engine.adapters
    rig.engine.up = False
    rig.engine.adapters.clear()
    rig.replica.forget(engine_name)
    await fail(rig, "sql", EngineGone, pause_s=1)
    rig.engine.up = True
    await rig.settle()
    assert rig.engine.public() == {"sql"}
    assert rig.replica.notable()[0]["sql"].phase is Phase.READY


async def test_an_engine_with_other_options_is_asked_again_at_once(make_rig: MakeRig) -> None:
    """It refused a rank, and was restarted with a greater --max-lora-rank, which has the same version."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    refusal = EngineRejected("the engine refused: rank 64", reason="rank 64", status=400)
    rig.engine.refuses["sql"] = refusal
    await fail(rig, "sql", EngineRejected)
    await restart(rig)
    with pytest.raises(EngineRejected):  # as long as nobody knows of the restart
        await use(rig, "sql")
    await rig.settle()
    await use(rig, "sql")


async def test_what_may_have_ended_the_engine_waits_out_its_delay(make_rig: MakeRig) -> None:
    """An eager adapter whose load ends the engine does not end each new one at once."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    rig.engine.refuses["sql"] = EngineUnavailable("the connection broke off")
    await fail(rig, "sql", EngineUnavailable)
    rig.volume.put("sql", policy=PINNED)
    await restart(rig)
    before = len(rig.engine.loads)
    await rig.settle()
    assert len(rig.engine.loads) == before


async def test_an_engine_that_takes_an_adapter_and_does_not_have_it(make_rig: MakeRig) -> None:
    """As one that answers 200 to every load: passes ask less and less, and a request asks at once."""
    rig = make_rig()
    rig.volume.put("sql", policy=PINNED)
    for _ in range(3 * MANY):
        await rig.settle()
        rig.engine.adapters.clear()
        rig.clock.now += 0.2
    assert len(rig.engine.loads) <= MANY
    before = len(rig.engine.loads)
    await use(rig, "sql")
    assert len(rig.engine.loads) == before + 1
    rig.clock.now += 400
    for _ in range(1 + RESTARTS):  # the count begins anew, and a restart delays nothing
        await rig.settle()
        assert rig.engine.public() == {"sql"}
        await use(rig, "sql")
        rig.engine.adapters.clear()


async def test_a_failed_unload_of_an_earlier_engine_holds_no_place(make_rig: MakeRig) -> None:
    """An adapter that is loaded anew gives way to others, whatever became of its last unload."""
    rig = make_rig(1)
    for name in ("a", "b"):
        rig.volume.put(name)
    await rig.settle()
    async with rig.replica.hold("a", 5) as engine_name:
        pass
    rig.engine.keeps = {"a"}
    for _ in range(MANY):
        rig.clock.now += 400
        await rig.settle()
    rig.engine.keeps = set()
    rig.engine.adapters.clear()
    rig.replica.forget(engine_name)  # a request got 404, and loads it before the next pass
    await use(rig, "a")
    await use(rig, "b")
    assert rig.engine.public() == {"b"}


@pytest.mark.parametrize("why", ["the sidecar restarted", "the load answered too late"])
async def test_the_status_has_what_this_process_saw_no_load_of(make_rig: MakeRig, why: str) -> None:
    """It is withdrawn under a request: its status says so until the engine has let it go."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    await use(rig, "sql")
    rig.replica, there = rig.start(), dict(rig.engine.adapters)
    if why == "the load answered too late":
        rig.engine.adapters.clear()
        rig.engine.refuses["sql"] = EngineUnavailable("it did not answer in 120 s")
        await fail(rig, "sql", EngineUnavailable)
        await rig.settle()
        rig.engine.adapters |= there
    await rig.settle()
    async with rig.replica.hold("sql", 5):
        rig.volume.remove("sql")
        await rig.settle()
        assert rig.replica.notable()[0]["sql"].phase is Phase.DRAINING
    await rig.settle()
    assert rig.replica.notable()[0] == {}
