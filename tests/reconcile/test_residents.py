"""What happens within one turn of the event loop: answers that come together, locks that change hands."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any
from weakref import WeakSet

import pytest

from lora_fs.sidecar import errors
from lora_fs.sidecar.engine.protocol import Loaded
from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, LoraFsError, NoSpareRoom
from lora_fs.sidecar.model import Finding, Phase, Policy, PolicyKind, Record, Severity, public_of
from lora_fs.sidecar.reconcile.residents import backoff
from tests.reconcile.conftest import Rig

MakeRig = Callable[..., Rig]

pytestmark = pytest.mark.anyio


async def test_what_the_engine_lost_it_lost_under_every_name(make_rig: MakeRig) -> None:
    """``name`` and ``name@revision`` are the same bytes and one integer id: neither answers for the other."""
    rig = make_rig()
    rig.volume.put("sql")
    rig.volume.put("other")
    async with AsyncExitStack() as held:
        for name in ("sql", "sql@v1", "other"):
            await held.enter_async_context(rig.replica.hold(name, 5))
    rig.replica.forget(rig.engine.name("sql"))
    assert set(rig.replica._residents.paths) == {rig.engine.name("other")}


async def test_what_an_engine_may_have_counts_once(make_rig: MakeRig) -> None:
    """What it holds, what it unloads, and loads whose answers did not come: one may be all three."""
    residents = make_rig().replica._residents
    residents.paths = {"a": "/1", "b": "/2"}
    residents._under_unload = {"b": ("/2", None), "c": ("/3", None), "d": ("/4", None)}
    residents._doubtful = {"b": "/2", "c": "/3", "e": "/5"}
    assert [residents._count(but) for but in (None, *"abcdef")] == [5, 4, 4, 4, 4, 4, 5]


async def test_a_load_that_has_just_ended_is_not_joined(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests get a 404 from an engine that was restarted, the second as the first's reload ends.

    Awaiting an ended load over and over would never let the event loop take it away.
    """
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    answers = [asyncio.Event(), asyncio.Event()]
    reloads = 0

    async def request(not_found: asyncio.Event) -> None:
        async with rig.replica.hold("sql", 5) as name:
            await not_found.wait()
        rig.replica.forget(name)
        async with rig.replica.hold("sql", 5):
            pass

    requests = [asyncio.create_task(request(answer)) for answer in answers]
    await rig.settle()
    reloaded = asyncio.Event()

    async def load(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        nonlocal reloads
        reloads += 1
        await reloaded.wait()
        rig.engine.adapters[name] = path

    monkeypatch.setattr(rig.engine, "load", load)
    answers[0].set()
    await rig.settle()
    assert reloads == 1
    reloaded.set()
    answers[1].set()
    await asyncio.gather(*requests)
    assert reloads == 2


async def test_a_request_that_comes_before_the_unloads_lock_keeps_the_adapter(make_rig: MakeRig) -> None:
    """To unload was decided, but a load of another revision has the lock first, and a stream began."""
    rig = make_rig()
    rig.volume.put("sql", "v1")
    await rig.settle()
    async with rig.replica.hold("sql", 5) as engine_name:
        pass
    residents, loading = rig.replica._residents, asyncio.Event()
    lock = residents.locks.of(engine_name)

    async def load_another() -> None:
        async with lock:
            await loading.wait()

    await lock.acquire()
    other = asyncio.create_task(load_another())
    await asyncio.sleep(0)
    unloading = asyncio.create_task(residents.unload(engine_name, "idle"))
    lock.release()
    await asyncio.sleep(0)
    async with rig.replica.hold("sql", 5) as name:
        loading.set()
        await asyncio.gather(other, unloading)
        assert name in rig.engine.adapters


async def test_the_request_that_ends_first_leaves_the_other_its_adapter(make_rig: MakeRig) -> None:
    """Two requests use one adapter: while one still runs, it is in flight and is not unloaded."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    residents = rig.replica._residents
    async with rig.replica.hold("sql", 5) as name:
        async with rig.replica.hold("sql", 5):
            assert residents.in_flight(name) == 2
        assert residents.in_flight(name) == 1
        await residents.unload(name, "idle")
        assert name in rig.engine.adapters
    assert residents.in_flight(name) == 0
    await residents.unload(name, "idle")
    assert name not in rig.engine.adapters


async def test_an_unload_that_is_cancelled_may_not_have_been_done(make_rig: MakeRig) -> None:
    """The engine has it as far as is known, so that its copy stays; the next read says what is true."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    async with rig.replica.hold("sql", 5) as name:
        pass
    residents, path = rig.replica._residents, rig.engine.adapters[name]
    rig.engine.gate.clear()
    rig.engine.asked.clear()
    unloading = asyncio.create_task(residents.unload(name, "idle"))
    await rig.engine.asked.wait()
    assert residents.copies_in_use() == {path}
    unloading.cancel()
    await asyncio.gather(unloading, return_exceptions=True)
    assert residents.paths == {name: path}
    rig.engine.adapters.clear()
    await rig.settle()
    assert residents.copies_in_use() == set()


@pytest.mark.parametrize("change", ["load", "unload"])
async def test_an_answer_from_before_a_change_is_not_believed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The change began and ended while the engine's answer was on its way; of other names it is believed."""
    rig = make_rig()
    for name in ("sql", "law", "gone"):
        rig.volume.put(name)
    await rig.settle()
    for name in ("law", "gone") if change == "load" else ("sql", "law", "gone"):
        async with rig.replica.hold(name, 5):
            pass
    residents, loaded = rig.replica._residents, rig.engine.loaded
    answered, comes = asyncio.Event(), asyncio.Event()
    del rig.engine.adapters[rig.engine.name("gone")]

    async def slow() -> Loaded:
        answer = await loaded()
        answered.set()
        await comes.wait()
        return answer

    monkeypatch.setattr(rig.engine, "loaded", slow)
    reading = asyncio.create_task(rig.replica._loop.read_engine())
    await answered.wait()
    if change == "load":
        async with rig.replica.hold("sql", 5):
            pass
    else:
        await residents.unload(rig.engine.name("sql"), "idle")
    comes.set()
    await reading
    assert residents.paths.keys() == rig.engine.adapters.keys()
    assert rig.engine.public() == ({"sql", "law"} if change == "load" else {"law"})
    del reading
    gc.collect()
    assert not residents.locks._changing, "of a read that is over nothing is kept"


async def test_idleness_counts_from_the_load(make_rig: MakeRig) -> None:
    """What was loaded unasked, and never asked for since, was last used when it was loaded."""
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    served = rig.replica.lookup("sql")
    assert served is not None
    name = await rig.replica._residents.load(served)
    rig.clock.now += 30
    assert rig.replica._residents.idle_s(name) == 30


async def test_failures_of_what_is_withdrawn_are_forgotten(make_rig: MakeRig) -> None:
    """Nobody will ask for it, and nothing of it is kept; the failure of another stays."""
    rig = make_rig()
    for name in ("bad", "worse"):
        rig.volume.put(name)
        rig.engine.refuses[name] = EngineRejected("rank 64", reason="rank 64")
        with pytest.raises(EngineRejected):
            async with rig.replica.hold(name, 5):
                pass
    rig.volume.remove("bad")
    await rig.settle()
    assert rig.replica._residents.failures.keys() == {"worse"}


async def test_the_last_request_of_a_draining_one_wakes_the_replica(make_rig: MakeRig) -> None:
    """What waits for its requests alone goes when they have ended; where nothing waits, nobody is woken."""
    rig = make_rig()
    rig.volume.put("sql")
    async with rig.replica.hold("sql", 5):
        await rig.settle()
        rig.replica._loop._wake.clear()
    assert not rig.replica._loop._wake.is_set()
    async with rig.replica.hold("sql", 5):
        async with rig.replica.hold("sql", 5):
            rig.volume.remove("sql")
            await rig.settle()
            rig.replica._loop._wake.clear()
        assert not rig.replica._loop._wake.is_set()
    assert rig.replica._loop._wake.is_set()


async def test_what_was_forgotten_and_is_there_is_no_hindrance(make_rig: MakeRig) -> None:
    """The engine has other bytes of the name under theirs: new ones are loaded, and the old ones go."""
    rig = make_rig()
    rig.volume.put("sql", "v1")
    await rig.settle()
    async with rig.replica.hold("sql", 5) as old:
        rig.replica.forget(old)
        record = rig.volume.put("sql", "v2")
        async with rig.replica.hold("sql", 5) as new:
            assert rig.engine.adapters[new] == rig.stager.path(record)
    await rig.settle()
    assert rig.engine.adapters.keys() == {new}
    assert rig.replica._residents.failures == {}


class Request:
    """Something large that a request brings."""


@pytest.mark.parametrize(
    "error",
    [EngineRejected("rank 64", reason="rank 64"), EngineUnavailable("refused")],
    ids=["told from memory", "tried at each request"],
)
async def test_nothing_is_kept_of_who_was_refused(make_rig: MakeRig, error: LoraFsError) -> None:
    """Of those who waited for a load that failed, and of those who are told so until its delay is over."""
    rig = make_rig()
    rig.volume.put("bad")
    kind, told = type(error), backoff.afresh(error)
    alive: WeakSet[Request] = WeakSet()

    async def load(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        await asyncio.sleep(0)
        raise kind.__new__(kind, *told.args)

    async def request() -> None:
        brought = Request()
        alive.add(brought)
        with suppress(kind):
            async with rig.replica.hold("bad", 5):
                pass

    rig.engine.load = load  # type: ignore[method-assign]
    await asyncio.gather(*(request() for _ in range(50)))
    for _ in range(50):
        await request()
    await rig.settle()
    gc.collect()
    failure = rig.replica._residents.failures["bad"]
    assert failure.error.__traceback__ is None
    assert str(failure.error) == str(error)
    assert len(alive) == 0


def _causes() -> list[LoraFsError]:
    """One of every error, with all that it may carry."""
    finding = Finding(code="missing", severity=Severity.ERROR, file=".", message="gone")
    given: dict[type[LoraFsError], tuple[tuple[Any, ...], dict[str, Any]]] = {
        errors.InvalidName: (("name", "../x", "it leaves its folder"), {}),
        errors.InvalidAdapter: (("team/sql", [finding]), {}),
        errors.TooManyRegistrations: (("later",), {"retry_after_s": 7.0}),
        errors.EngineRejected: (("no",), {"reason": "rank", "status": 400}),
        errors.NameTaken: (("no",), {"reason": "taken", "status": 400, "path": "/stage/x/sql"}),
    }
    every = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, LoraFsError)]
    told = ((kind, *given.get(kind, (("a sentence",), {}))) for kind in every)
    return [kind(*args, **more) for kind, args, more in told]


@pytest.mark.parametrize("error", _causes(), ids=lambda error: type(error).__name__)
def test_an_error_that_is_raised_anew_says_the_same(error: LoraFsError) -> None:
    """Whatever its own arguments are; without where it was raised before, and for what."""
    try:
        raise error from OSError(5, "an error of the disk")
    except LoraFsError as raised:
        anew = backoff.afresh(raised)
    assert type(anew) is type(error)
    assert (str(anew), vars(anew)) == (str(error), vars(error))
    assert (anew.__traceback__, anew.__cause__, anew.__context__) == (None, None, None)


async def test_nobody_makes_room_for_what_no_request_asks_for(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine with a bound of its own: it is pending, and comes when asked for or when there is room."""
    rig, size = make_rig(), 2
    load = rig.engine.load
    asked: list[tuple[str, bool]] = []

    async def bounded(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        asked.append((public_of(name), spare))
        if len(rig.engine.adapters) >= size:
            if spare:
                raise NoSpareRoom("no room")
            del rig.engine.adapters[next(iter(rig.engine.adapters))]
        await load(name, path, record)

    monkeypatch.setattr(rig.engine, "load", bounded)
    for name, priority in (("a", 1), ("b", 3), ("c", 2)):
        rig.volume.put(name, policy=Policy(kind=PolicyKind.EAGER, priority=priority))

    async def passes() -> dict[str, tuple[Phase, str]]:
        for _ in range(5):
            await rig.settle()
            await rig.replica.reconcile()
        return {name: (one.phase, one.reason) for name, one in rig.replica.notable()[0].items()}

    loaded, pending = (Phase.READY, "Loaded"), (Phase.PENDING, "NoSpareRoom")
    assert await passes() == {"b": loaded, "c": loaded, "a": pending}
    assert asked == [("b", True), ("c", True), ("a", True)]
    assert rig.replica.figures()["load_failures"] == 0
    async with rig.replica.hold("a", 5):
        assert asked[3:] == [("a", False)]
    assert (await passes())["b"] == pending
    rig.volume.remove("c")
    assert await passes() == {"a": loaded, "b": loaded}


async def test_a_request_that_joins_what_nobody_asked_for(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not told that there is no spare room: room is made for it."""
    rig = make_rig()
    load, begun, go = rig.engine.load, asyncio.Event(), asyncio.Event()

    async def full(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        if spare:
            begun.set()
            await go.wait()
            raise NoSpareRoom("no room")
        await load(name, path, record)

    monkeypatch.setattr(rig.engine, "load", full)
    rig.volume.put("a", policy=Policy(kind=PolicyKind.EAGER))
    await rig.replica.reconcile()
    await begun.wait()
    async with asyncio.timeout(5), AsyncExitStack() as held:
        holding = asyncio.create_task(held.enter_async_context(rig.replica.hold("a", 5)))
        await asyncio.sleep(0)
        go.set()
        assert public_of(await holding) == "a"


async def test_an_eager_adapter_that_waits_says_for_what(make_rig: MakeRig) -> None:
    """Its status is pending, and names the taken places and the setting that gives more."""
    rig = make_rig(max_loaded=1)
    for name, priority in (("a", 2), ("b", 1)):
        rig.volume.put(name, policy=Policy(kind=PolicyKind.EAGER, priority=priority))
    for _ in range(3):
        await rig.settle()
        await rig.replica.reconcile()
    statuses, _ = rig.replica.notable()
    assert statuses["a"].phase is Phase.READY
    assert (statuses["b"].phase, statuses["b"].reason) == (Phase.PENDING, "NotLoadedYet")
    assert "all 1 places are taken" in statuses["b"].message
    assert "--max-loaded" in statuses["b"].message
