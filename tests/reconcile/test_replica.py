"""The replica's promises, against an engine, a stage and a volume in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI

from lora_fs.sidecar.engine.protocol import Activity, Loaded
from lora_fs.sidecar.errors import (
    EngineRejected,
    EngineUnavailable,
    InvalidAdapter,
    LoraFsError,
    NameTaken,
    NotFound,
    RegistryLost,
    VolumeUnavailable,
    WaitTimeout,
)
from lora_fs.sidecar.model import Phase, Policy, PolicyKind, Record, public_of, tells_bytes
from lora_fs.sidecar.reconcile import reconciler
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.reconcile.residents import eviction
from lora_fs.sidecar.registry.view.snapshot import ByScope, Desired, no_pointers, no_records
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.routes import observe
from tests.reconcile.conftest import FakeEngine, Rig
from tests.reconcile.test_worker import until

pytestmark = pytest.mark.anyio

MakeRig = Callable[..., Rig]
EAGER = Policy(kind=PolicyKind.EAGER)
STICKY = Policy(kind=PolicyKind.STICKY)
PINNED = Policy(kind=PolicyKind.PINNED)


async def use(rig: Rig, name: str) -> str:
    """One request, from start to end; what the engine calls its adapter, as clients know it."""
    async with rig.replica.hold(name, 5) as engine_name:
        return public_of(engine_name)


async def test_one_load_for_any_number_of_waiters(make_rig: MakeRig) -> None:
    """Twenty requests that arrive together cost one copy and one load."""
    rig = make_rig()
    rig.volume.put("a")
    await rig.settle()
    rig.engine.gate.clear()
    requests = [asyncio.create_task(use(rig, "a")) for _ in range(20)]
    await asyncio.sleep(0)
    rig.engine.gate.set()
    assert await asyncio.gather(*requests) == ["a"] * 20
    assert rig.engine.loads == ["a"]
    assert rig.stager.staged["a"] == 1


async def test_a_waiter_that_leaves_does_not_stop_the_others(make_rig: MakeRig) -> None:
    """A cancelled request leaves the load, and the requests that wait for it, alone."""
    rig = make_rig()
    rig.volume.put("a")
    rig.engine.gate.clear()
    leaver, stayer = (asyncio.create_task(use(rig, "a")) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    rig.engine.gate.set()
    assert await stayer == "a"


async def test_an_engine_that_hangs_costs_a_bounded_wait(make_rig: MakeRig) -> None:
    """The request gets a timeout, and one for another adapter is served meanwhile."""
    rig = make_rig()
    rig.volume.put("stuck")
    rig.volume.put("good")
    await use(rig, "good")
    rig.engine.gate.clear()
    with pytest.raises(WaitTimeout, match="stuck"):
        async with rig.replica.hold("stuck", 0.05):
            pass
    assert await use(rig, "good") == "good"
    rig.engine.gate.set()


async def test_an_unreachable_engine_is_unknown_not_empty(make_rig: MakeRig) -> None:
    """While it does not answer nothing is believed unloaded, and nothing is planned."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.engine.up = False
    await rig.settle()
    assert rig.replica.notable()[0]["a"].phase is Phase.READY
    assert not rig.replica.readiness().ready
    rig.engine.up = True
    await rig.settle()
    assert rig.replica.readiness().ready
    assert rig.engine.loads == ["a"]


async def test_a_request_finds_that_the_engine_is_gone(make_rig: MakeRig) -> None:
    """Not ready from then on, until a pass, which comes at once, has read the engine."""
    rig = make_rig()
    passed = asyncio.Semaphore(0)
    rig.replica._on_pass = lambda _: passed.release()
    loop = asyncio.create_task(rig.replica.run())
    async with asyncio.timeout(4):  # the next pass that nothing wakes comes after 5 s
        await passed.acquire()
        assert rig.replica.readiness().ready
        rig.replica.engine_failed("no engine answers")
        assert rig.replica.readiness().conditions == ("EngineUnavailable: no engine answers",)
        await passed.acquire()
        assert rig.replica.readiness().ready
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_a_load_finds_that_the_engine_is_gone(make_rig: MakeRig) -> None:
    """A request whose adapter is loaded first makes the replica unready, as one that is sent on does."""
    rig = make_rig()
    rig.volume.put("lazy")
    await rig.settle()
    assert rig.replica.readiness().ready
    rig.engine.up = False
    with pytest.raises(EngineUnavailable):
        async with rig.replica.hold("lazy", 5):
            pass
    assert rig.replica.readiness().conditions == ("EngineUnavailable: connection refused",)


async def test_an_engine_that_forgot_everything(make_rig: MakeRig) -> None:
    """After its restart eager adapters are loaded again, lazy ones at their next request."""
    rig = make_rig()
    rig.volume.put("lazy")
    rig.volume.put("eager", policy=EAGER)
    await rig.settle()
    await use(rig, "lazy")
    rig.engine.adapters.clear()
    await rig.settle()
    assert rig.engine.public() == {"eager"}
    await use(rig, "lazy")
    assert rig.engine.public() == {"eager", "lazy"}


async def test_a_sidecar_that_restarts_finds_what_it_loaded(make_rig: MakeRig) -> None:
    """It serves on without a second load."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.replica = rig.start()
    await rig.settle()
    assert await use(rig, "a") == "a"
    assert rig.engine.loads == ["a"]


async def test_an_idle_lazy_adapter_is_evicted(make_rig: MakeRig) -> None:
    """After its TTL, and not before; a sticky one stays."""
    rig = make_rig()
    rig.volume.put("lazy")
    rig.volume.put("sticky", policy=STICKY)
    await use(rig, "lazy")
    await use(rig, "sticky")
    rig.clock.now += 59
    await rig.settle()
    assert rig.engine.public() == {"lazy", "sticky"}
    rig.clock.now += 2
    await rig.settle()
    assert rig.engine.public() == {"sticky"}
    assert set(rig.replica.notable()[0]) == {"sticky"}


async def test_an_earlier_revision_of_a_pinned_adapter_is_lazy(make_rig: MakeRig) -> None:
    """A request for ``a@v1`` loads it beside the pinned ``a``, and it leaves when nobody asks any more."""
    rig = make_rig()
    for revision in ("v1", "v2"):
        rig.volume.put("a", revision, policy=PINNED)
    await rig.settle()
    await use(rig, "a@v1")
    await rig.settle()
    assert rig.engine.public() == {"a", "a@v1"}
    rig.clock.now += 24 * 3600
    await rig.settle()
    assert rig.engine.public() == {"a"}


@pytest.mark.parametrize("has_metrics", [True, False])
async def test_an_adapter_in_use_is_not_idle(make_rig: MakeRig, has_metrics: bool) -> None:
    """A stream lasts longer than the TTL: the adapter is ready, and nobody says that it leaves."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    async with rig.replica.hold("sql", 5):
        rig.engine.has_metrics = has_metrics
        rig.clock.now += 61
        await rig.settle()
        assert {name: one.phase for name, one in rig.replica.notable()[0].items()} == {"sql": Phase.READY}
        assert rig.replica.residency()["sql"]["idle_s"] == 0
    rig.engine.has_metrics = True
    await rig.settle()
    assert rig.engine.public() == {"sql"}


async def test_requests_that_bypass_the_proxy_count_as_use(make_rig: MakeRig) -> None:
    """An adapter the engine reports busy is neither evicted nor unloaded until it is not."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.engine.busy.add("a")
    rig.clock.now += 600
    await rig.settle()
    assert "a" in rig.engine.public()
    rig.volume.remove("a")
    await rig.settle()
    assert "a" in rig.engine.public()
    rig.engine.busy.clear()
    await rig.settle()
    assert "a" not in rig.engine.public()


async def test_an_older_look_counts_no_request_of_the_proxys(make_rig: MakeRig) -> None:
    """The proxy knows when those end: a full replica need not wait for the engine to be looked at again."""
    rig = make_rig()
    for name in ("proxied", "direct"):
        rig.volume.put(name)
        await use(rig, name)
    rig.engine.busy |= {"proxied", "direct"}
    async with rig.replica.hold("proxied", 5):
        await rig.settle()
        rig.engine.is_new = False
        rig.clock.now += 600
        await rig.settle()
        assert rig.engine.public() == {"proxied", "direct"}
    rig.clock.now += 600
    await rig.settle()
    assert rig.engine.public() == {"direct"}
    rig.engine.is_new = True
    rig.engine.busy.clear()
    rig.clock.now += 600
    await rig.settle()
    assert rig.engine.public() == set()


async def test_an_engine_whose_metrics_fail_unloads_nothing(make_rig: MakeRig) -> None:
    """What is in use is unknown: adapters are loaded and served, and none is unloaded until it is known."""
    rig = make_rig()
    for name in ("idle", "withdrawn"):
        rig.volume.put(name)
        await use(rig, name)
    rig.engine.has_metrics = False
    rig.clock.now += 600
    rig.volume.remove("withdrawn")
    rig.volume.put("eager", policy=EAGER)
    await rig.settle()
    assert rig.engine.public() == {"idle", "withdrawn", "eager"}
    assert rig.replica.readiness().ready
    assert rig.replica.readiness().conditions == (
        "ActivityUnknown: nothing is unloaded until it is known: /metrics answered 500",
    )
    rig.engine.has_metrics = True
    await rig.settle()
    assert rig.engine.public() == {"eager"}
    assert rig.replica.readiness().conditions == ()


async def test_a_withdrawn_adapter_drains(make_rig: MakeRig) -> None:
    """The request in flight keeps it, a later one gets NotFound, and it goes at the end."""
    rig = make_rig()
    rig.volume.put("a")
    async with rig.replica.hold("a", 5):
        rig.volume.remove("a")
        await rig.settle()
        assert "a" in rig.engine.public()
        assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
        with pytest.raises(NotFound):
            await use(rig, "a")
    await rig.settle()
    assert rig.engine.adapters == {}
    assert rig.replica.notable()[0] == {}


async def test_what_is_withdrawn_is_told_of_until_it_is_gone(make_rig: MakeRig) -> None:
    """At every moment, which is what ``--wait`` goes by: before the next pass, and while it is unloaded."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.volume.remove("a")
    assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
    rig.engine.gate.clear()
    rig.engine.asked.clear()
    await rig.replica.reconcile()
    await rig.engine.asked.wait()
    assert rig.replica.residency() == {}  # no request may have it any more
    assert rig.engine.adapters
    assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
    rig.engine.gate.set()
    await rig.settle()
    assert rig.engine.adapters == {}
    assert rig.replica.notable()[0] == {}


async def test_what_is_withdrawn_while_it_is_loaded_is_told_of(make_rig: MakeRig) -> None:
    """The engine will have it for a moment: it is not gone."""
    rig = make_rig()
    rig.volume.put("a")
    rig.engine.gate.clear()
    request = asyncio.create_task(use(rig, "a"))
    await rig.engine.asked.wait()
    rig.volume.remove("a")
    assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
    rig.engine.gate.set()
    await request
    assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
    await rig.settle()
    assert rig.replica.notable()[0] == {}


async def test_an_engine_that_cannot_be_asked_has_what_it_had(make_rig: MakeRig) -> None:
    """A withdrawn adapter is not told to be gone where nobody could unload it."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.volume.remove("a")
    rig.engine.up = False
    await rig.settle()
    assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
    rig.engine.up = True
    await rig.settle()
    assert rig.replica.notable()[0] == {}


async def test_a_promotion_under_a_request(make_rig: MakeRig) -> None:
    """New requests get the new revision beside the old one, which goes when it is free."""
    rig = make_rig()
    first = rig.volume.put("a", "v1")
    async with rig.replica.hold("a", 5) as old:
        second = rig.volume.put("a", "v2")
        async with rig.replica.hold("a", 5) as new:
            assert new != old
        await rig.settle()
        assert rig.engine.adapters == {old: rig.stager.path(first), new: rig.stager.path(second)}
        assert rig.replica.notable()[0]["a@v1"].phase is Phase.DRAINING
        held = rig.replica.residency()["a"]
        assert (held["path"], held["in_flight"]) == (rig.stager.path(second), 1)  # an autoscaler counts it
    await rig.settle()
    assert rig.engine.adapters == {new: rig.stager.path(second)}


async def test_a_revision_overwritten_again_and_again_under_streams(make_rig: MakeRig) -> None:
    """Each content of one revision has an engine's name of its own, and no client sees any of them."""
    rig = make_rig()
    async with AsyncExitStack() as streams:
        for content in range(4):
            record = rig.volume.put("a", "v1", content=content)
            name = await streams.enter_async_context(rig.replica.hold("a", 5))
            assert rig.engine.adapters[name] == rig.stager.path(record)
            explicit = await streams.enter_async_context(rig.replica.hold("a@v1", 5))
            assert rig.engine.adapters[explicit] == rig.stager.path(record)
            await rig.settle()
            assert set(rig.replica.residency()) <= {"a", "a@v1"}
            assert set(rig.replica.notable()[0]) <= {"a", "a@v1"}
            shown = [{**one, "path": ""} for one in rig.replica.residency().values()]
            told = str([*shown, *rig.replica.events.events()])
            assert not [one for one in rig.engine.adapters if one in told]
        assert len(set(rig.engine.adapters.values())) == 4
        with pytest.raises(NotFound):
            await use(rig, name)
    await rig.settle()
    assert set(rig.engine.adapters.values()) == {rig.stager.path(record)}
    assert rig.replica._residents.failures == {}


async def test_a_name_that_comes_back_with_other_bytes(make_rig: MakeRig) -> None:
    """It has another name in the engine: vLLM up to 0.30 finds cached prefixes by the name alone."""
    rig = make_rig()
    names = []
    for content in (0, 1, 0):
        rig.volume.put("a", content=content)
        async with rig.replica.hold("a", 5) as name:
            names.append(name)
        rig.volume.remove("a")
        await rig.settle()
        assert rig.engine.adapters == {}
    assert names[0] == names[2] != names[1]


async def test_what_an_older_sidecar_loaded_under_plain_names(make_rig: MakeRig) -> None:
    """It takes no request, and goes when nobody uses it; what is asked for is loaded under its own name."""
    rig = make_rig()
    record = rig.volume.put("a")
    path = rig.stager.path(record)
    rig.engine.adapters = dict.fromkeys(("a", "a@v1", f"a@v1~{record.spec.digest[7:19]}"), path)
    rig.engine.busy = {"a@v1"}
    async with rig.replica.hold("a", 5) as name:
        assert tells_bytes(name, record.spec.digest)
        await rig.settle()
        assert rig.engine.adapters == {"a@v1": path, name: path}
    rig.engine.busy.clear()
    await rig.settle()
    assert rig.engine.adapters == {name: path}
    told = [one.message for one in rig.replica.events.events()]
    assert any("Outdated: its name in the engine does not tell its bytes" in one for one in told)


async def test_an_old_name_that_looks_like_a_new_one(make_rig: MakeRig) -> None:
    """A revision called by twelve hexadecimal digits, of other bytes: the copy's path tells."""
    rig = make_rig()
    record = rig.volume.put("a", "0123456789ab")
    rig.engine.adapters = {"a@0123456789ab": rig.stager.path(record)}
    async with rig.replica.hold("a", 5) as name:
        assert tells_bytes(name, record.spec.digest)
    await rig.settle()
    assert rig.engine.adapters == {name: rig.stager.path(record)}


async def test_another_sidecars_copy_of_the_same_bytes(make_rig: MakeRig) -> None:
    """Under the name that tells them it is served as it is, and is never unloaded; other bytes are not it."""
    rig = make_rig()
    record = rig.volume.put("a")
    digest = record.spec.digest.removeprefix("sha256:")
    theirs = {f"a@{digest[:12]}": f"/other-stage/{digest}/a"}
    rig.engine.adapters = dict(theirs)
    await rig.settle()
    async with rig.replica.hold("a", 5) as name:
        assert {name} == theirs.keys()
    assert rig.replica.notable()[0]["a"].phase is Phase.READY
    assert (rig.replica.passes_through(name), rig.replica.lookup(name)) == (False, None)
    rig.clock.now += 600
    rig.volume.remove("a")
    await rig.settle()
    assert rig.engine.adapters == theirs
    assert rig.engine.loads == []


async def test_another_sidecar_that_was_quicker(make_rig: MakeRig) -> None:
    """It loaded the same bytes since the last look: the engine's "already loaded" is no failure."""
    rig = make_rig()
    record = rig.volume.put("a")
    await rig.settle()
    digest = record.spec.digest.removeprefix("sha256:")
    rig.engine.adapters = {f"a@{digest[:12]}": f"/other-stage/{digest}/a"}
    async with rig.replica.hold("a", 5) as name:
        assert {name} == rig.engine.adapters.keys()
    other = f"{digest[:12]}{'0' * 52}"
    rig.engine.adapters = {name: f"/other-stage/{other}/a"}
    await rig.settle()
    with pytest.raises(NameTaken):
        async with rig.replica.hold("a", 5):
            pass


async def test_a_side_copy_goes_after_a_roll_back(make_rig: MakeRig) -> None:
    """A copy the plain name no longer serves goes, even of a sticky adapter."""
    rig = make_rig()
    first = rig.volume.put("a", "v1", STICKY)
    async with rig.replica.hold("a", 5):
        rig.volume.put("a", "v2", STICKY)
        await use(rig, "a")
        rig.volume.point("a", "v1")
        assert await use(rig, "a") == "a"
    rig.clock.now += rig.limits.default_policy.ttl_s + STICKY.ttl_s
    await rig.settle()
    assert rig.engine.copies() == {"a": rig.stager.path(first)}
    assert len(rig.engine.adapters) == 1


async def test_a_promotion_at_rest(make_rig: MakeRig) -> None:
    """With no request on the old bytes they go, and the new revision is what the plain name means."""
    rig = make_rig()
    rig.volume.put("a", "v1")
    await use(rig, "a")
    record = rig.volume.put("a", "v2")
    assert await use(rig, "a") == "a"
    await rig.settle()
    assert rig.engine.adapters == {rig.engine.name("a"): rig.stager.path(record)}


async def test_one_revision_asked_for_by_name(make_rig: MakeRig) -> None:
    """``name@revision`` is served beside the plain name, each with its own bytes."""
    rig = make_rig()
    old = rig.volume.put("a", "v1")
    new = rig.volume.put("a", "v2")
    assert await use(rig, "a") == "a"
    assert await use(rig, "a@v1") == "a@v1"
    assert rig.engine.copies() == {"a": rig.stager.path(new), "a@v1": rig.stager.path(old)}


async def test_a_refused_adapter_waits_out_its_delay(make_rig: MakeRig) -> None:
    """It is not tried at every request, its reason is told, and a new generation starts anew."""
    rig = make_rig()
    bad = rig.volume.put("bad")
    rig.volume.put("good")
    rig.engine.refuses["bad"] = EngineRejected("rank 64 is too high", reason="rank", status=400)
    for _ in range(3):
        with pytest.raises(EngineRejected, match="rank"):
            await use(rig, "bad")
    assert rig.engine.loads.count("bad") == 1
    status = rig.replica.notable()[0]["bad"]
    assert (status.phase, status.reason, status.attempts) == (Phase.FAILED, "EngineRejected", 1)
    assert await use(rig, "good") == "good"
    rig.clock.now += 2
    with pytest.raises(EngineRejected):
        await use(rig, "bad")
    assert rig.replica.notable()[0]["bad"].attempts == 2
    rig.engine.refuses.clear()
    again = bad.model_copy(update={"generation": 3})
    rig.volume.write({bad.key: again}, "bad", "v1")
    assert await use(rig, "bad") == "bad"


@pytest.mark.parametrize(
    "error",
    [VolumeUnavailable("stale handle"), EngineUnavailable("refused"), RegistryLost("is it still mounted?")],
)
async def test_a_passing_trouble_blocks_no_request(make_rig: MakeRig, error: Exception) -> None:
    """After a temporary failure the next request tries at once, whatever the delay."""
    rig = make_rig()
    rig.volume.put("a")
    rig.stager.refuses["a"] = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        await use(rig, "a")
    rig.stager.refuses.clear()
    assert await use(rig, "a") == "a"


async def test_requests_do_not_flood_the_log(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """Each request tries a passing trouble: that is one line in half a minute, and one of another trouble or
    after a load."""
    rig = make_rig()
    rig.volume.put("a")

    async def fail(error: LoraFsError) -> None:
        rig.stager.refuses["a"] = error
        for _ in range(10):
            with pytest.raises(type(error)):
                await use(rig, "a")

    await fail(VolumeUnavailable(""))
    await fail(RegistryLost("is it still mounted?"))
    await fail(VolumeUnavailable("stale handle"))
    rig.clock.now += 30
    await fail(VolumeUnavailable("stale handle"))
    rig.stager.refuses.clear()
    await use(rig, "a")
    rig.engine.adapters.clear()
    await rig.settle()
    await fail(VolumeUnavailable("stale handle"))
    lines = [one.getMessage().partition(": ")[2] for one in caplog.records if one.levelname == "WARNING"]
    assert lines == ["", "is it still mounted?", "stale handle", "stale handle", "stale handle"]
    assert rig.replica.counters()["load_failures_total"] == 50


async def test_an_eager_adapter_that_fails_delays_no_other(make_rig: MakeRig) -> None:
    """The others are loaded; it is tried again only after its delay."""
    rig = make_rig()
    for name in ("bad", "one", "two"):
        rig.volume.put(name, policy=EAGER)
    rig.stager.refuses["bad"] = InvalidAdapter("bad", [])
    await rig.settle()
    assert rig.engine.public() == {"one", "two"}
    assert rig.stager.staged["bad"] == 1
    rig.clock.now += 2
    await rig.settle()
    assert rig.stager.staged["bad"] == 2


async def test_at_boot_everything_is_loaded_that_fits(make_rig: MakeRig) -> None:
    """All ten where ten fit; none of eleven, for none is eager."""
    fits, full = make_rig(max_loaded=10), make_rig(max_loaded=10)
    for rig, count in ((fits, 10), (full, 11)):
        for number in range(count):
            rig.volume.put(f"a{number}")
        await rig.settle()
    assert len(fits.engine.adapters) == 10
    assert full.engine.adapters == {}


@pytest.mark.parametrize("learned", [False, True])
async def test_no_more_are_loaded_than_may_be(make_rig: MakeRig, learned: bool) -> None:
    """A request waits until a place is free, and its adapter is not loaded beside the others meanwhile.

    The bound is the setting's, or what the engine keeps in memory, where another's adapter has a place, too.
    """
    rig = make_rig(None if learned else 2)
    rig.engine.rereads, rig.engine.max_cpu_loras = learned, 3 if learned else None
    rig.engine.adapters["another's"] = "/elsewhere"
    most, load = 0, rig.engine.load

    async def counted(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        nonlocal most
        await load(name, path, record)
        most = max(most, len(rig.engine.adapters))

    rig.engine.load = counted  # type: ignore[method-assign]
    for name in "abcde":
        rig.volume.put(name)
    await rig.settle()
    async with rig.replica.hold("a", 5):
        async with rig.replica.hold("b", 5):
            with pytest.raises(WaitTimeout, match="no place for c: 2 adapters are loaded and in use"):
                async with rig.replica.hold("c", 0.05):
                    pass
            requests = [asyncio.create_task(use(rig, name)) for name in "cde"]
            await rig.settle()
            assert rig.engine.public() == {"a", "b", "another's"}
        assert await asyncio.gather(*requests) == ["c", "d", "e"]
    assert most == 3
    assert rig.replica.readiness().conditions == ()


async def test_a_bound_that_cannot_be_learned(make_rig: MakeRig) -> None:
    """It is a condition, unless the bound is set or the engine reads no copy again."""
    for max_loaded, rereads, unknown in ((None, True, True), (2, True, False), (None, False, False)):
        rig = make_rig(max_loaded)
        rig.engine.rereads = rereads
        await rig.settle()
        assert any("EngineMayReread" in one for one in rig.replica.readiness().conditions) is unknown


async def test_an_engine_that_keeps_one_adapter(make_rig: MakeRig) -> None:
    """As a stock vLLM by default: where more are registered a condition says what to set, unless it is."""
    for max_loaded, keeps, names, told in (
        (None, 1, "ab", True),
        (None, 1, "a", False),
        (None, 2, "ab", False),
        (1, 1, "ab", False),
    ):
        rig = make_rig(max_loaded)
        rig.engine.rereads, rig.engine.max_cpu_loras = True, keeps
        for name in names:
            rig.volume.put(name)
        await rig.settle()
        assert any("OneAtATime" in one for one in rig.replica.readiness().conditions) is told


async def test_a_bound_that_the_engine_does_not_answer_for_a_moment(make_rig: MakeRig) -> None:
    """It stays what it was: by the metrics' smaller one adapters would be unloaded. It is asked again."""
    rig = make_rig()
    rig.engine = engine = BatchOfTwo(rereads=True, max_cpu_loras=4)
    rig.replica = rig.start()
    for name in "abcd":
        rig.volume.put(name)
        await rig.settle()
        await use(rig, name)
    engine.silent = True
    rig.replica.engine_failed("no answer")
    await rig.settle()
    assert (rig.replica.capacity(), engine.public()) == (4, set("abcd"))
    engine.silent, engine.max_cpu_loras = False, 3
    await rig.settle()
    assert (rig.replica.capacity(), len(engine.adapters)) == (3, 3)


async def test_a_bound_that_is_told_after_the_first_load(make_rig: MakeRig) -> None:
    """A stock engine's --max-loras bounds what is loaded as soon as its metrics tell it: it keeps as many."""
    rig = make_rig()
    rig.engine = BatchOfTwo(rereads=True)
    rig.replica = rig.start()
    for name in "abcd":
        rig.volume.put(name)
    await rig.settle()
    for name in "abcd":
        assert await use(rig, name) == name
        await rig.settle()
        assert len(rig.engine.adapters) <= 2
    assert rig.replica.capacity() == 2
    assert rig.replica.readiness().conditions == ()


async def test_a_load_that_ends_while_the_engine_is_read_moves_no_bound(make_rig: MakeRig) -> None:
    """It is missing in the answer, which tells of the moment before: no place for others comes of it."""
    rig = make_rig()
    rig.engine.rereads, rig.engine.max_cpu_loras = True, 3
    for name in "ab":
        rig.volume.put(name)
    await rig.settle()
    await use(rig, "a")
    read = rig.engine.loaded

    async def late() -> Loaded:
        before = await read()
        await use(rig, "b")
        return before

    rig.engine.loaded = late  # type: ignore[method-assign]
    await rig.replica.reconcile()
    assert rig.engine.public() == {"a", "b"}
    assert rig.replica.capacity() == 3


async def test_what_the_engine_may_have_dropped_is_loaded_anew(make_rig: MakeRig) -> None:
    """An unloaded adapter stays in a stock engine's memory until it is the oldest there."""
    rig = make_rig(max_loaded=2)
    rig.engine.rereads = True
    for name in "abc":
        rig.volume.put(name)
    await rig.settle()
    for name in "ab":
        await use(rig, name)
        rig.clock.now += 1
    rig.volume.remove("b")
    await rig.settle()
    await use(rig, "c")  # beside a, whose place in memory it takes: b was used later
    assert rig.engine.loads == ["a", "b", "c"]
    async with rig.replica.hold("c", 5):
        rig.clock.now += 1
        await use(rig, "a")
        await use(rig, "a")
    assert rig.engine.loads == ["a", "b", "c", "a"]


async def test_an_adapter_that_is_asked_for_again_and_again_gives_way(make_rig: MakeRig) -> None:
    """One request after the other for it: a request for another gets its place between two of them."""
    rig = make_rig(max_loaded=1)
    for name in "ab":
        rig.volume.put(name)
    await rig.settle()
    asked, served = 0, asyncio.Event()

    async def again() -> None:
        nonlocal asked
        while True:
            async with rig.replica.hold("a", 5):
                await asyncio.sleep(0.001)
            asked += 1
            served.set()

    await use(rig, "a")
    task = asyncio.create_task(again())
    async with rig.replica.hold("b", 2):
        before = asked
        served.clear()
        await asyncio.sleep(0.01)
        assert asked == before, "a waits for its place"
    await asyncio.wait_for(served.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_pinned_adapter_gives_no_way(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for it goes on at once while another waits for a place."""
    monkeypatch.setattr(eviction, "GIVE_WAY_S", 600.0)
    rig = make_rig(max_loaded=2)
    rig.volume.put("pinned", policy=PINNED)
    for name in "ab":
        rig.volume.put(name)
    await rig.settle()
    async with rig.replica.hold("a", 5):
        waits = asyncio.create_task(use(rig, "b"))
        await until(lambda: bool(rig.replica._room._wanted))
        await asyncio.wait_for(use(rig, "pinned"), 5)
        assert not waits.done()
    await asyncio.wait_for(waits, 5)


async def test_a_request_that_gave_way_goes_on_when_nobody_waits(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the request that waited left."""
    monkeypatch.setattr(eviction, "GIVE_WAY_S", 600.0)
    monkeypatch.setattr(eviction, "PATIENCE_S", 0.01)
    rig = make_rig(max_loaded=2)
    for name in "abc":
        rig.volume.put(name)
    await rig.settle()
    for name in "ab":
        await use(rig, name)
        rig.clock.now += 1
    rig.engine.stuck = {"a"}
    waits = asyncio.create_task(use(rig, "c"))
    await until(lambda: rig.engine.unloads == ["a"])
    gives_way = asyncio.create_task(use(rig, "b"))
    await asyncio.sleep(0)
    assert not gives_way.done()
    waits.cancel()
    await asyncio.wait_for(gives_way, 5)
    rig.engine.unstick.set()


async def test_capacity_evicts_the_least_recently_used(make_rig: MakeRig) -> None:
    """A third adapter takes the place of the one idle longest; a pinned one stays."""
    rig = make_rig(max_loaded=2)
    rig.volume.put("pinned", policy=PINNED)
    for name in ("a", "b", "c"):
        rig.volume.put(name)
    await rig.settle()
    for name in ("a", "b", "c"):
        rig.clock.now += 1
        await use(rig, name)
        await rig.settle()
        assert rig.engine.public() == {"pinned", name}


@dataclass
class BatchOfTwo(FakeEngine):
    """It says what its --max-loras is, and in which ``tier`` its adapters are if it knows."""

    tier: str | None = None

    async def loaded(self) -> Loaded:
        loaded = await super().loaded()
        return replace(loaded, tiers=dict.fromkeys(loaded.adapters, self.tier) if self.tier else {})

    async def activity(self) -> Activity:
        return Activity(max_loras=2)


@dataclass
class Cards(FakeEngine):
    """It lists these of its base models."""

    of_base: tuple[dict[str, str], ...] = ()

    async def loaded(self) -> Loaded:
        return replace(await super().loaded(), base_cards=self.of_base)


async def metadata_of(rig: Rig) -> dict[str, object]:
    """What ``/metadata`` tells of how many there may be."""
    app = FastAPI()
    app.include_router(observe.discovery(rig.replica, Admin(None)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
        told: dict[str, object] = (await client.get("/metadata")).json()["lora"]["lora_capacity"]
        return told


@pytest.mark.parametrize(
    ("max_loaded", "tier", "capacity", "free"),
    [(None, None, None, None), (None, "gpu", 2, 0), (5, None, 5, 2), (5, "gpu", 5, 2)],
    ids=["stock", "plugin", "stock, bounded", "plugin, bounded"],
)
async def test_what_bounds_how_many_are_loaded(
    make_rig: MakeRig, max_loaded: int | None, tier: str | None, capacity: int | None, free: int | None
) -> None:
    """A stock engine swaps: its --max-loras is told, and neither a capacity nor a trouble is made of it."""
    rig = make_rig(max_loaded)
    rig.engine = BatchOfTwo(tier=tier)
    rig.replica = rig.start()
    for name in "abc":
        rig.volume.put(name, policy=PINNED)
    await rig.settle()
    assert rig.engine.public() == {"a", "b", "c"}
    assert await metadata_of(rig) == {"max_loras": 2, "loaded_count": 3, "available_slots": free}
    assert rig.replica.capacity() == rig.replica.figures().get("capacity") == capacity
    troubles = [one.partition(":")[0] for one in rig.replica.readiness().conditions]
    assert troubles == (["PinnedBeyondSlots"] if capacity == 2 else [])


async def test_names_the_engine_itself_serves(make_rig: MakeRig) -> None:
    """The base model's name, and a static adapter's, keep their meaning; it is reported."""
    rig = make_rig()
    rig.engine.adapters["static"] = "/models/static"
    rig.volume.put("tiny")
    rig.volume.put("static")
    await rig.settle()
    for name in ("tiny", "static"):
        assert rig.replica.passes_through(name)
        assert rig.replica.lookup(name) is None
        assert rig.replica.notable()[0][name].reason == "NameConflict"
    assert rig.engine.adapters == {"static": "/models/static"}


async def test_an_unread_volume_is_unknown_not_empty(make_rig: MakeRig) -> None:
    """Before the first look nothing that an earlier sidecar loaded is unloaded."""
    rig = make_rig()
    rig.volume.read_once = False
    rig.engine.adapters["a"] = "/stage/0/a"
    await rig.settle()
    assert "a" in rig.engine.public()
    assert not rig.replica.readiness().ready


async def test_before_the_first_look_no_name_is_unknown(make_rig: MakeRig) -> None:
    """To a request, and to who withdraws one: it may be there."""
    rig = make_rig()
    rig.volume.read_once = False
    for _ in range(2):
        with pytest.raises(VolumeUnavailable, match="not been read yet"):
            await use(rig, "a")
        with pytest.raises(VolumeUnavailable, match="not been read yet"):
            await rig.replica.unload_adapter("a", writer="test")
        await rig.settle()
    rig.volume.read_once = True
    with pytest.raises(NotFound):
        await use(rig, "a")
    with pytest.raises(NotFound):
        await rig.replica.unload_adapter("a", writer="test")


async def test_names_of_an_engine_that_has_not_answered_yet(make_rig: MakeRig) -> None:
    """They may be known before: an adapter of such a name is never served, with an ``@`` in it or without."""
    rig = make_rig()
    rig.engine.base = ("tiny", "llama@v1")
    rig.volume.put("tiny")
    rig.volume.put("llama", "v1")
    rig.replica.names.of_engine = frozenset(rig.engine.base)
    for _ in range(2):
        assert rig.replica.lookup("tiny") is rig.replica.lookup("llama@v1") is None
        assert rig.replica.passes_through("llama@v1")
        assert rig.replica.lookup("llama") is not None
        await rig.settle()


async def test_no_copy_is_removed_while_the_volume_is_unknown(make_rig: MakeRig) -> None:
    """Which adapters there are was not read yet: to the stage every copy would be nobody's."""
    rig = make_rig()
    rig.volume.read_once = False
    loop = asyncio.create_task(rig.replica.run())
    while rig.replica.durations()["pass_seconds"].count < 2:
        rig.replica.wake()
        await asyncio.sleep(0.01)
    assert rig.stager.swept == []
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_a_pass_goes_through_no_list_of_all(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pass nor what is told after it, whatever changed, was asked for or is loaded."""
    rig = make_rig()
    for number in range(20):
        rig.volume.put(f"a{number}")
    for number in range(0, 20, 2):
        served = rig.replica.lookup(await use(rig, f"a{number}"))
        assert served is not None
        rig.replica.choose(served, None)
    await rig.settle()
    gone_through = []
    for way in ("__iter__", "items", "values"):
        through = getattr(ByScope, way)

        def counted(self: ByScope[Any, Any], through: Any = through) -> Any:
            gone_through.extend([self] * (len(self) >= 10))
            return through(self)

        monkeypatch.setattr(ByScope, way, counted)
    rig.volume.put("new")
    rig.volume.put("a3", "v2")
    rig.volume.remove("a4")
    gone_through.clear()  # by the test's volume
    await use(rig, "a3")
    await rig.settle()
    replica = rig.replica
    _, counts = replica.notable()
    assert counts == {"Ready": 10, "Unloaded": 10}
    assert len(replica.usage().revisions) == 10
    assert len(replica.residency()) == replica.figures()["tier_engine"] == 10
    assert gone_through == []


async def test_a_resident_whose_record_cannot_be_read(make_rig: MakeRig) -> None:
    """A sidecar that starts then knows nothing of it, and unloads it only for a tombstone."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    whole = rig.volume.desired
    for pointers in (whole.pointers, no_pointers()):
        rig.volume.desired = Desired(no_records(), pointers)
        rig.replica = rig.start()
        await rig.settle()
        assert "a" in rig.engine.public()
    rig.volume.desired = whole
    rig.volume.remove("a")
    await rig.settle()
    assert "a" not in rig.engine.public()


async def test_adapters_of_a_namespace_that_was_served_before_take_places(make_rig: MakeRig) -> None:
    """Nobody can ask for them here: no more are loaded beside them than may be, and they give way first."""
    rig = make_rig(max_loaded=2)
    digest = "0" * 64
    before = {f"{name}@{digest[:12]}": f"/stage/{digest}/{name}" for name in "xy"}
    rig.engine.adapters = dict(before)
    for name in "abc":
        rig.volume.put(name)
    await rig.settle()
    assert rig.engine.adapters == before, "what is absent may be a record that cannot be read"
    for name, left in (("a", {"a", "x"}), ("b", {"a", "b"}), ("c", {"b", "c"})):
        rig.clock.now += 1
        await use(rig, name)
        assert rig.engine.public() in (left, {"y" if one == "x" else one for one in left})


async def test_who_registers_once_it_is_ready_was_not_there_at_the_start(make_rig: MakeRig) -> None:
    """It is ready when it has decided what was: what comes later is loaded as its policy says."""
    rig = make_rig(max_loaded=2)
    rig.volume.read_once = False
    rig.volume.put("early")
    await rig.settle()
    rig.volume.read_once = True
    assert not rig.replica.readiness().ready
    await rig.settle()
    assert rig.replica.readiness().ready
    rig.volume.put("late")
    await rig.settle()
    assert rig.engine.public() == {"early"}


async def test_an_engine_without_runtime_loading(make_rig: MakeRig) -> None:
    """The replica is not ready and says so by a condition of its own. It begins no load, and the engine's
    base model is known. It is ready once the engine can load."""
    rig = make_rig()
    rig.volume.put("a", policy=EAGER)
    rig.engine.cannot_load = "the engine cannot load adapters: start it with the route"
    await rig.replica.reconcile()
    assert not rig.replica.readiness().ready
    assert rig.replica.readiness().conditions == (f"NoRuntimeLoading: {rig.engine.cannot_load}",)
    assert (rig.replica.passes_through("tiny"), rig.engine.loads) == (True, [])
    rig.engine.cannot_load = None
    await rig.settle()
    assert rig.replica.readiness().ready
    assert (rig.replica.readiness().conditions, rig.engine.loads) == ((), ["a"])


async def test_a_model_that_the_engine_has_not(make_rig: MakeRig) -> None:
    """It is told while nothing was registered for it; whatever name or path of the engine's is right."""
    chat, tiny = {"id": "chat", "root": "/m/x"}, {"id": "tiny", "root": "/m/x"}
    renamed = {"id": "chat", "root": "/models/tiny"}
    for cards, wrong in (
        (({"id": "tny", "root": "org/tny"},), True),
        ((renamed,), False),
        ((chat, tiny), False),
        ((), False),
    ):
        rig = make_rig()
        rig.engine = Cards(of_base=cards)
        rig.replica = rig.start()
        assert rig.replica.readiness().conditions == ("EngineUnavailable: the engine has not answered yet",)
        await rig.settle()
        told = rig.replica.readiness().conditions
        assert [one.partition(":")[0] for one in told] == ["ModelUnknown"] * wrong
        assert all("tny, org/tny" in one for one in told)
        rig.volume.put("a")
        await rig.settle()
        assert rig.replica.readiness().conditions == ()


async def test_no_state_is_kept_for_names_that_are_gone(make_rig: MakeRig) -> None:
    """A thousand adapters that came, failed or served, and went leave nothing behind."""
    rig = make_rig()
    for number in range(1000):
        name = f"a{number}"
        rig.volume.put(name)
        if number % 2:
            rig.stager.refuses[name] = InvalidAdapter(name, [])
            with pytest.raises(InvalidAdapter):
                await use(rig, name)
        else:
            await use(rig, name)
            served = rig.replica.lookup(name)
            assert served is not None
            rig.replica.choose(served, None)
        rig.replica.dated(rig.replica.notable()[0])
        rig.volume.remove(name)
        await rig.replica.reconcile()
    rig.replica.dated({})
    await rig.replica.reconcile()
    residents, since = rig.replica._residents, rig.replica._since
    kept = {name: value for name, value in vars(residents).items() if isinstance(value, dict) and value}
    assert set(kept) == {"counters", "durations"}
    assert (len(residents.locks._locks), rig.replica.usage()) == (0, ({}, 0))
    assert (since._stamped, since._conditions, since._noted) == ({}, {}, set())


async def test_a_pass_that_breaks_does_not_end_the_loop(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a condition and an event of the replica's report, and the loop goes on."""
    rig, told = make_rig(), asyncio.Semaphore(0)
    rig.replica._on_pass = lambda _: told.release()
    monkeypatch.setattr(rig.engine, "loaded", Mock(side_effect=ZeroDivisionError))
    loop = asyncio.create_task(rig.replica.run())
    for _ in range(2):
        async with asyncio.timeout(5):
            await told.acquire()
        rig.replica.wake()
    assert any("ZeroDivisionError" in line for line in rig.replica.readiness().conditions)
    assert "ZeroDivisionError" in rig.replica.events.events()[0].message
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_no_copy_is_removed_while_the_engine_is_unknown(make_rig: MakeRig) -> None:
    """The stage is swept only after the engine said what it holds, and never of what it loads."""
    rig = make_rig()
    rig.volume.put("a")
    rig.engine.up = False
    loop = asyncio.create_task(rig.replica.run())
    await asyncio.sleep(0.05)
    assert rig.stager.swept == []
    rig.engine.up = True
    rig.engine.gate.clear()
    waiting = asyncio.create_task(use(rig, "a"))
    await asyncio.sleep(0)
    while not rig.stager.swept:
        rig.replica.wake()
        await asyncio.sleep(0.01)
    path = rig.stager.path(rig.volume.desired.records[next(iter(rig.volume.desired.records))])
    assert path in rig.stager.swept[-1]
    rig.engine.gate.set()
    await waiting
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_a_stage_folder_that_hangs_holds_up_no_pass(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may hang while it has the folder: passes go on, one sweep waits, and the loop ends."""
    monkeypatch.setattr(reconciler, "SWEEP_S", 0.01)
    rig, hangs, sweeps = make_rig(), threading.Event(), 0

    def sweep(_: frozenset[str]) -> None:
        nonlocal sweeps
        sweeps += 1
        assert hangs.wait(20)

    monkeypatch.setattr(rig.stager, "sweep", sweep)
    loop = asyncio.create_task(rig.replica.run())
    try:
        async with asyncio.timeout(5):
            for name in "ab":
                rig.volume.put(name, policy=EAGER)
                while name not in rig.engine.public():
                    rig.replica.wake()
                    await asyncio.sleep(0.01)
            assert sweeps == 1
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
    finally:
        hangs.set()


async def test_what_fails_after_a_pass_does_not_end_the_loop(make_rig: MakeRig) -> None:
    """To tell of a pass is a part of it; once that goes well again, the replica is ready."""
    rig, told = make_rig(), asyncio.Event()
    conditions: list[tuple[str, ...]] = []

    def tell(replica: Replica) -> None:
        conditions.append(replica.readiness().conditions)
        told.set()
        if len(conditions) == 1:
            raise RuntimeError("dictionary changed size during iteration")

    rig.replica._on_pass = tell
    loop = asyncio.create_task(rig.replica.run())
    async with asyncio.timeout(5):
        await told.wait()
        assert not rig.replica.readiness().ready
        assert "dictionary changed size" in rig.replica.readiness().conditions[0]
        told.clear()
        rig.replica.wake()
        await told.wait()
    assert not loop.done()
    assert rig.replica.readiness().ready
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_a_loop_that_ended_is_not_ready(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing follows the volume any more: whatever reads the engine afterwards, it stays told."""
    rig = make_rig()
    monkeypatch.setattr(rig.replica._loop._wake, "wait", Mock(side_effect=KeyError("no such thing")))
    with pytest.raises(KeyError):
        await rig.replica.run()
    await rig.replica.reconcile()
    ready, (told,) = rig.replica.readiness().ready, rig.replica.readiness().conditions
    assert not ready
    assert told.startswith("EngineUnavailable: internal error: the reconcile loop ended")
