"""The event log for any history; what a replica tells of, and since when things are as they are."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import EngineRejected, VolumeUnavailable
from lora_fs.sidecar.model import (
    AdapterKey,
    AdapterStatus,
    Canary,
    Event,
    EventList,
    Phase,
    Policy,
    PolicyKind,
    ReplicaStatus,
)
from lora_fs.sidecar.reconcile import status_file
from lora_fs.sidecar.reconcile.status import MOST_UNLOADED, bounded, resting
from lora_fs.sidecar.reconcile.status_file import Reporter
from lora_fs.sidecar.reconcile.telemetry.conditions import Since
from lora_fs.sidecar.reconcile.telemetry.events import KEPT, KEPT_OF_ONE, MESSAGE_CHARACTERS, EventLog, News
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import Clock, Rig
from tests.reconcile.test_worker import until

MakeRig = Callable[..., Rig]
anyio = pytest.mark.anyio
keys = st.none() | st.builds(
    AdapterKey,
    st.just("default"),
    st.just("tiny"),
    st.sampled_from(["v1", "v2"]),
    st.sampled_from([f"a{number}" for number in range(30)]),
)
happenings = st.lists(
    st.tuples(st.sampled_from(["Loaded", "Failed"]), st.sampled_from("abcdefghijkl"), keys), max_size=400
)


def told_of(phase: Phase, name: str) -> AdapterStatus:
    return AdapterStatus(key=("default", "tiny", "v1", name), generation=1, phase=phase, message="w" * 200)


def test_a_report_has_room_whatever_waits() -> None:
    """Of twelve thousand eager adapters few fit: the report is written, and names all that are loaded."""
    told = {f"w{number:05d}": told_of(Phase.PENDING, f"w{number:05d}") for number in range(12_000)}
    told |= {f"f{number}": told_of(Phase.FAILED, f"f{number}") for number in range(3)}
    told |= {f"r{number}": told_of(Phase.READY, f"r{number}") for number in range(8)}
    recent = ("default/tiny/v1/w11999", "default/tiny/.active/w11998")
    kept, left_out = bounded(told, recent)
    assert len(kept) + left_out == len(told)
    assert len(kept) == MOST_UNLOADED + 8
    assert kept.keys() >= {"w11999", "w11998", "f0", "f2", "r0", "r7"}
    status = ReplicaStatus(
        replica="r0", model="tiny", namespaces=("default",), adapters=kept, adapters_left_out=left_out
    )
    assert decode(ReplicaStatus, seal(status)).adapters == kept


@given(st.dictionaries(st.text(max_size=3), st.sampled_from(Phase), max_size=12), st.integers(0, 5))
def test_a_report_leaves_out_nothing_that_is_loaded(phases: dict[str, Phase], most: int) -> None:
    """Only what waits or failed, and only what is over the bound."""
    told = {name: told_of(phase, name) for name, phase in phases.items()}
    kept, left_out = bounded(told, (), most)
    others = {name for name, phase in phases.items() if phase in (Phase.PENDING, Phase.FAILED)}
    assert told.keys() - kept.keys() <= others
    assert left_out == len(told) - len(kept) == max(0, len(others) - most)


class Moments:
    """A second later at each look."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> datetime.datetime:
        self.seconds += 1
        return self.at()

    def at(self) -> datetime.datetime:
        return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=self.seconds)


def test_a_phase_keeps_its_time_whatever_else_a_status_says() -> None:
    """As of an adapter that fails again; and one that is not told of any more has changed by then."""
    moments = Moments()
    since, failed = Since(moments), told_of(Phase.FAILED, "a")
    first = since.stamp({"a": failed})["a"].since
    again = since.stamp({"a": failed.model_copy(update={"attempts": 2})})["a"]
    assert (again.since, again.attempts) == (first, 2)
    since.stamp({})
    gone = moments.at().isoformat()
    available, _ = since.conditions("a", told_of(Phase.UNLOADED, "a"))
    assert (available.status, available.lastTransitionTime) == ("True", gone)


@given(happenings)
def test_any_history(happened: list[tuple[str, str, AdapterKey | None]]) -> None:
    """Bounded, in the order of the last time, each once; what is kept is counted right since it came."""
    log = EventLog(Moments())
    counts: Counter[tuple[AdapterKey | None, str, str]] = Counter()
    for reason, message, key in happened:
        log.tell(reason, message, key)
        kept = {(event.key, event.reason, event.message) for event in log.events()}
        counts[key, reason, message] += 1
        counts = Counter({one: count for one, count in counts.items() if one in kept})
    events = log.events()
    assert len(events) <= KEPT
    of_one = Counter((event.key[0], event.key[3]) if event.key else event.reason for event in events)
    assert max(of_one.values(), default=0) <= KEPT_OF_ONE
    assert {(event.key, event.reason, event.message): event.count for event in events} == counts
    assert [event.last_at for event in events] == sorted(event.last_at for event in events)
    assert all(event.first_at <= event.last_at for event in events)
    assert log.version == len(happened)
    if happened:
        assert (events[-1].reason, events[-1].message, events[-1].key) == happened[-1]


def test_a_failure_survives_a_flood_of_loads() -> None:
    """What is normal makes room for what is normal, once it has half of the log."""
    log = EventLog()
    for number in range(KEPT):
        log.tell("LoadFailed", key=AdapterKey("default", "tiny", "v1", f"bad{number}"), warning=True)
    for number in range(3 * KEPT):
        log.tell("Loaded", key=AdapterKey("default", "tiny", "v1", f"good{number}"))
    events = log.events()
    warned = [event.key[3] for event in events if event.type == "Warning" and event.key is not None]
    assert len(events) == KEPT
    assert warned == [f"bad{number}" for number in range(KEPT // 2, KEPT)]


def test_one_that_fails_in_other_words_each_time_leaves_the_others() -> None:
    """It takes no more than its share of the log."""
    log = EventLog()
    log.tell("Loaded", key=AdapterKey("default", "tiny", "v1", "quiet"))
    for number in range(1_000):
        log.tell("Failed", f"at {number}" + "x" * 10_000, AdapterKey("default", "tiny", "v1", "loud"))
    assert log.events()[0].reason == "Loaded"
    assert len(log.events()) == 1 + KEPT_OF_ONE
    assert {len(event.message) for event in log.events()[1:]} == {MESSAGE_CHARACTERS}


def test_one_kind_of_trouble_leaves_the_others() -> None:
    """A volume full of refused folders washes out no outage of the engine."""
    log = EventLog()
    news = News(log)
    news.troubles(["EngineUnavailable: no engine answers"])
    news.troubles([f"NotAdopted: default/tiny/v1/a{number}: NotWhole" for number in range(20)])
    reasons = Counter((event.reason, event.message.partition(":")[0]) for event in log.events())
    assert reasons["EngineUnavailable", "no engine answers"] == 1
    assert reasons["EngineUnavailable", "it is over"] == 1
    assert len(log.events()) == 2 + KEPT_OF_ONE


# -- on a replica --------------------------------------------------------------------------------


def told(rig: Rig, name: str = "a") -> list[str]:
    """The reasons of an adapter's events, in their order."""
    return [event.reason for event in rig.replica.events.events() if event.key and event.key[3] == name]


def last(rig: Rig, reason: str) -> Event:
    return next(event for event in reversed(rig.replica.events.events()) if event.reason == reason)


@anyio
async def test_an_adapters_life(make_rig: MakeRig) -> None:
    """From its registration to its end, each step is told once."""
    rig = make_rig()
    rig.volume.put("there", "v1")
    await rig.settle()
    assert rig.replica.events.events() == ()  # what was there at the start is no news
    rig.volume.put("a", "v1", Policy(ttl_s=60))
    await rig.settle()
    async with rig.replica.hold("a", 5):
        pass
    rig.clock.now += 61
    await rig.settle()
    assert told(rig) == ["Registered", "Loading", "Loaded", "Evicted"]
    assert last(rig, "Evicted").message.startswith("Idle: ")
    rig.volume.put("a", "v2")
    rig.volume.point("a", "v1")
    await rig.settle()
    rig.volume.point("a", "v1", Canary(revision="v2", percent=5))
    await rig.settle()
    assert last(rig, "CanaryChanged").message.startswith("answers 5 %")
    assert last(rig, "CanaryChanged").key == ("default", "tiny", "v2", "a")
    rig.volume.point("a", "v2")
    await rig.settle()
    assert last(rig, "Promoted").key == ("default", "tiny", "v2", "a")
    async with rig.replica.hold("a", 5):
        rig.volume.remove("a")
        await rig.settle()
    await rig.settle()
    assert {"Withdrawn", "Removed", "Drained"} <= set(told(rig))
    assert "a" not in rig.engine.public()


@anyio
async def test_a_failure_and_its_retries(make_rig: MakeRig) -> None:
    """The same failure is one event that counts; the retry is told apart from the first try."""
    rig = make_rig()
    await rig.settle()
    record = rig.volume.put("a", "v1", Policy(kind=PolicyKind.EAGER))
    rig.engine.refuses["a-v1"] = EngineRejected("rank 64 is too great", reason="rank")
    for _ in range(3):
        await rig.settle()
        rig.clock.now += 400
    failed = last(rig, "Failed")
    assert (failed.type, failed.count, failed.key) == ("Warning", 3, record.key)
    assert failed.message == "EngineRejected: rank 64 is too great"
    assert told(rig).count("Loading") == 1
    assert last(rig, "Retrying").count == 2


@anyio
async def test_what_the_engine_lets_go(make_rig: MakeRig) -> None:
    """An adapter that is not in the engine any more was evicted there."""
    rig = make_rig()
    rig.volume.put("a")
    await rig.settle()
    async with rig.replica.hold("a", 5):
        pass
    rig.engine.adapters.clear()
    await rig.settle()
    assert last(rig, "Evicted").message == "the engine let it go"


@anyio
async def test_a_trouble_has_the_time_at_which_it_began(make_rig: MakeRig) -> None:
    """It stays while the trouble lasts, whatever its words are; one that comes again begins anew."""
    rig = make_rig()
    rig.engine.up = False
    await rig.replica.reconcile()
    first = rig.replica.readiness().since["EngineUnavailable"]
    rig.replica.engine_failed("timed out")
    assert rig.replica.readiness().since == {"EngineUnavailable": first}
    rig.engine.up = True
    await rig.replica.reconcile()
    assert rig.replica.readiness().since == {}


@anyio
async def test_the_replicas_own_troubles(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """They come as warnings, and it is told when they end; in the log, too, which outlives the replica."""
    caplog.set_level("INFO", logger="lora_fs.sidecar.reconcile.telemetry.events")
    rig = make_rig()
    rig.engine.up = False
    await rig.replica.reconcile()
    rig.replica._news.troubles(rig.replica.readiness().conditions)
    rig.engine.up = True
    await rig.replica.reconcile()
    rig.replica._news.troubles(rig.replica.readiness().conditions)
    events = [(event.type, event.reason, event.message) for event in rig.replica.events.events()]
    assert events == [
        ("Warning", "EngineUnavailable", "connection refused"),
        ("Normal", "EngineUnavailable", "it is over"),
    ]
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [
        ("WARNING", "EngineUnavailable: connection refused"),
        ("INFO", "EngineUnavailable is over"),
    ]


@anyio
async def test_conditions_say_since_when(make_rig: MakeRig) -> None:
    """A condition's time is that of its last change; one that did not change keeps it."""
    moments = Moments()
    rig = make_rig()
    rig.replica._since = Since(moments)
    record = rig.volume.put("a", "v1", Policy(ttl_s=60))
    await rig.settle()

    def conditions() -> dict[str, tuple[str, str]]:
        told = rig.replica.dated(rig.replica.notable()[0])
        found = rig.replica.conditions("a", told.get("a", resting(record)))
        return {one.type: (one.status, one.lastTransitionTime) for one in found}

    begins = conditions()
    assert {kind: status for kind, (status, _) in begins.items()} == {"Available": "True", "Loaded": "False"}
    async with rig.replica.hold("a", 5):
        loaded = conditions()
    assert loaded["Available"] == begins["Available"]
    assert loaded["Loaded"][0] == "True"
    assert loaded["Loaded"][1] > begins["Loaded"][1]
    assert conditions() == loaded
    [since] = {one.since for one in rig.replica.dated(rig.replica.notable()[0]).values()}
    assert since == loaded["Loaded"][1]
    rig.clock.now += 61
    await rig.settle()
    assert conditions()["Loaded"][0] == "False"
    rig.volume.remove("a")
    await rig.settle()
    rig.replica.dated(rig.replica.notable()[0])
    await rig.settle()
    assert rig.replica._since._conditions == {}


@anyio
async def test_a_status_that_did_not_change_has_the_time_of_its_change(make_rig: MakeRig) -> None:
    """One that went and came back has a new one, though it says the same."""
    rig, moments = make_rig(), Moments()
    rig.replica._since = Since(moments)
    rig.volume.put("a", "v1", Policy(ttl_s=60))
    await rig.settle()

    async def told() -> AdapterStatus:
        async with rig.replica.hold("a", 5):
            return rig.replica.dated(rig.replica.notable()[0])["a"]

    first, second = await told(), await told()
    assert first is second
    rig.clock.now += 61
    await rig.settle()
    assert rig.replica.dated(rig.replica.notable()[0]) == {}
    third = await told()
    assert third.model_copy(update={"since": first.since}) == first
    assert str(third.since) > str(first.since)


# -- on the volume -------------------------------------------------------------------------------


class Site:
    """A reporter of a rig's replica on a real registry; the seconds are the test's."""

    def __init__(self, rig: Rig, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.rig, self.registry, self.clock = rig, Registry(root, create=True), Clock()
        self.reporter = Reporter(self.registry, cast("Volume", rig.volume), None, Expectation(), self.clock)
        patch.setattr(status_file, "GATHER_S", 0.0)
        for told_by_others in ("downloads", "figures"):
            patch.setattr(rig.replica, told_by_others, dict)

    async def report(self) -> None:
        self.reporter.report(self.rig.replica)
        assert self.reporter._task is not None
        await self.reporter._task

    def events(self) -> EventList:
        return decode(EventList, self.registry.layout.event_list("r0").read_bytes())


@anyio
async def test_events_are_published(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When there are new ones, at most every few seconds, and never again for nothing."""
    site = Site(make_rig(), tmp_path / "root", monkeypatch)
    log = site.rig.replica.events
    await site.report()
    assert not site.registry.layout.event_list("r0").exists()
    log.tell("Loaded")
    await site.report()
    assert [event.reason for event in site.events().events] == ["Loaded"]
    log.tell("Evicted")
    await site.report()
    assert len(site.events().events) == 1
    site.clock.now += status_file.EVENTS_S
    await site.report()
    assert len(site.events().events) == 2
    written = site.registry.layout.event_list("r0").stat().st_ino
    site.clock.now += status_file.EVENTS_S
    await site.report()
    assert site.registry.layout.event_list("r0").stat().st_ino == written
    await site.reporter.withdraw("r0")
    assert list(site.registry.layout.events.iterdir()) == []


@anyio
async def test_a_replica_that_always_changes_writes_once_a_second(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume may bill each write; a change after a while of few is written at once."""
    site = Site(make_rig(), tmp_path / "root", monkeypatch)
    waited: list[float] = []

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)
        site.clock.now += max(delay_s, 0.1)

    patch = mock.patch.object(status_file, "asyncio", mock.Mock(wraps=asyncio, sleep=sleep))
    began = site.clock.now

    async def change(name: str) -> None:
        site.rig.volume.put(name)
        await site.rig.settle()
        with patch:
            await site.report()

    while site.clock.now < began + 20:
        await change(f"a{len(waited)}")
    prompt = int(status_file.AT_ONCE_S / status_file.EACH_S)
    assert max(waited[:prompt]) < 0.1
    assert len(waited) <= 1 + prompt + 20
    site.clock.now += 10
    waited.clear()
    await change("late")
    assert max(waited) < 0.1
    assert "late" in site.registry.layout.replica("r0").read_text()


@anyio
async def test_two_replicas_of_one_id_are_told(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each overwrites the other's report, so nobody waits for both; told until one of them is gone."""
    one, other = (Site(make_rig(), tmp_path / "root", monkeypatch) for _ in range(2))
    at = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    monkeypatch.setattr(status_file, "utc_now", lambda: at)  # both began together
    left = one.registry.layout.replica("r0")
    left.write_bytes(seal(ReplicaStatus(replica="r0", model="tiny", namespaces=("default",))))

    async def beats(*sites: Site) -> list[str | None]:
        for site in sites:
            site.clock.now += status_file.HEARTBEAT_S
            await site.report()
        return [site.rig.volume.status_problem for site in sites]

    assert await beats(one, one) == [None, None], "an earlier process of this replica left a file"
    assert await beats(other) == [None]
    for problem in [*await beats(one, other), *await beats(one, one)]:
        assert problem is not None, "between two writes of the other, too"
        assert "LORA_FS_REPLICA_ID" in problem
    one.clock.now += status_file.SHARED_S
    assert await beats(one) == [None], "it is gone"
    left.write_bytes(left.read_bytes()[:20])
    assert await beats(one) == [None], "torn is not another's"
    await beats(other)
    await one.reporter.withdraw("r0")
    assert left.exists(), "it is the other's now"
    await other.reporter.withdraw("r0")
    assert not left.exists()


@anyio
async def test_an_earlier_process_is_no_other(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is there still, since the volume took no writes when it ended, nor when this one began."""
    site = Site(make_rig(), tmp_path / "root", monkeypatch)
    left = site.registry.layout.replica("r0")
    left.write_bytes(seal(ReplicaStatus(replica="r0", model="tiny", namespaces=("default",))))

    def refuse(path: Path, data: bytes) -> None:
        raise VolumeUnavailable(f"{path}: read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "replace", refuse)
        for _ in range(2):
            await site.report()
            assert "read-only" in str(site.rig.volume.status_problem)
            site.clock.now += status_file.HEARTBEAT_S
    await site.report()
    assert site.rig.volume.status_problem is None


@anyio
async def test_nothing_is_written_to_another_registry(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that is mounted in this one's place gets no status of a replica that is not its own."""
    root = tmp_path / "root"
    site = Site(make_rig(), root, monkeypatch)
    await site.report()
    assert decode(ReplicaStatus, site.registry.layout.replica("r0").read_bytes()).replica == "r0"
    root.rename(tmp_path / "away")
    Registry(root, create=True).close()
    site.clock.now += status_file.HEARTBEAT_S
    site.rig.replica.events.tell("Loaded")
    await asyncio.gather(site.report())
    assert list(site.registry.layout.replicas.iterdir()) == []
    assert site.rig.volume.status_problem is not None
    assert "another volume is mounted" in site.rig.volume.status_problem


@anyio
async def test_a_report_under_way_is_not_left_behind(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on when it is cancelled; what it writes, or is to write after, is no more."""
    site = Site(make_rig(), tmp_path / "root", monkeypatch)
    begun, go, written = threading.Event(), threading.Event(), threading.Event()
    replace = atomic.replace

    def slowly(path: Path, data: bytes) -> None:
        begun.set()
        assert go.wait(20)
        replace(path, data)
        written.set()

    monkeypatch.setattr(atomic, "replace", slowly)
    reporting = asyncio.create_task(site.report())
    assert await asyncio.to_thread(begun.wait, 20)
    withdrawing = asyncio.create_task(site.reporter.withdraw("r0"))
    await asyncio.wait([withdrawing], timeout=0.2)
    go.set()
    await asyncio.gather(withdrawing, reporting, return_exceptions=True)
    assert await asyncio.to_thread(written.wait, 20)
    assert list(site.registry.layout.replicas.iterdir()) == []
    await site.report()
    assert list(site.registry.layout.replicas.iterdir()) == []


@anyio
async def test_a_change_while_the_status_is_written(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written after it, and not only at the next heartbeat."""
    site = Site(make_rig(), tmp_path / "root", monkeypatch)
    site.registry.layout.replicas.mkdir(exist_ok=True)
    path = site.registry.layout.replica("r0")
    before = site.reporter._heartbeat
    with site.reporter._writing:  # a volume that takes its time
        site.reporter.report(site.rig.replica)
        await until(lambda: site.reporter._heartbeat != before)
        site.rig.volume.recent = {"default/tiny/v1/a": 1}
        site.reporter.report(site.rig.replica)
    assert site.reporter._task is not None
    await site.reporter._task
    assert decode(ReplicaStatus, path.read_bytes()).recent == {"default/tiny/v1/a": 1}
