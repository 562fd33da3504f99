"""A load that finds the stage folder full: who gives way, and who never does. The copies are real files."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from lora_fs.sidecar.errors import (
    EngineRejected,
    EngineUnavailable,
    InvalidAdapter,
    VolumeUnavailable,
    WaitTimeout,
)
from lora_fs.sidecar.model import Policy, PolicyKind, Record, Scope, public_of
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.residents import eviction
from lora_fs.sidecar.reconcile.residents.eviction import TRY_S
from lora_fs.sidecar.reconcile.stage import cache
from lora_fs.sidecar.reconcile.stage.cache import GRACE_S
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine, FakeStager, Rig
from tests.reconcile.test_staging import Clock
from tests.registry.conftest import write_adapter

pytestmark = pytest.mark.anyio

PATIENCE_S = 1.0  # of a request that is refused: a busy machine has looked for room by then

KEPT = (PolicyKind.EAGER, PolicyKind.PINNED)


@dataclass
class ReadingEngine(FakeEngine):
    """It reads what it is given, and what it has: none of it may be gone."""

    gone: list[str] = field(default_factory=list)

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        await asyncio.sleep(0)
        await super().load(name, path, record)
        self.gone += [one for one in self.adapters.values() if not Path(one, "adapter_config.json").is_file()]


class Pod:
    """A replica whose stage folder has room for ``room`` adapters."""

    stager: Stager = cast("Stager", None)

    def __init__(self, rig: Rig, folder: Path, room: int) -> None:
        self.rig, self._folder, self._room = rig, folder, room
        self.registry = Registry(folder / "volume", create=True)
        self.rig.engine = self.engine = ReadingEngine()
        self.size = self.put("probe").spec.size_bytes
        self.rig.volume.remove("probe")
        self.restart()

    def restart(self) -> None:
        """The sidecar, not the engine."""
        if self.stager is not None:
            self.stager.close()  # as its process's end does
        self.stager = Stager(
            self._folder / "stage",
            lambda record: self.registry.layout.resolve(record.spec.path),
            Expectation(),
            max_bytes=self._room * self.size + self.size // 2,
            timeout_s=60,
        )
        self.stager.prepare()
        self.rig.stager = cast("FakeStager", self.stager)
        self.rig.replica = self.rig.start()

    def put(
        self,
        name: str,
        policy: Policy | None = None,
        revision: str | None = None,
        namespace: str = "default",
    ) -> Record:
        """Register an adapter of its own bytes, and let the replica know of it."""
        seed = zlib.crc32(f"{name}{revision or ''}".encode())
        source = write_adapter(self._folder / f"source-{name}-{revision}", seed)
        wanted = Registration(name, source, source.as_uri(), policy=policy, revision=revision)
        scope = Scope(namespace, "tiny")
        record = ingest.register(self.registry, scope, wanted, Expectation(), writer="test").record
        self.rig.volume.write({record.key: record}, name, record.revision, scope=scope)
        return record

    async def use(self, *names: str, within_s: float = 5) -> None:
        """One request for each, one after another."""
        for name in names:
            self.rig.clock.now += 1
            async with self.rig.replica.hold(name, within_s):
                pass

    async def refused(self, name: str) -> None:
        """A request for it waits for room, and fails for want of room when its time is over."""
        with pytest.raises(StageFull, match="no room to stage"):
            await self.use(name, within_s=PATIENCE_S)
        loads = self.rig.replica._residents._loads.values()
        async with asyncio.timeout(5):  # nobody waits for it any more
            await asyncio.gather(*loads, return_exceptions=True)

    async def told_that_there_is_no_place(self, name: str) -> None:
        with pytest.raises(WaitTimeout, match="no place for"):
            await self.use(name, within_s=PATIENCE_S)

    def served(self, name: str) -> Served:
        found = self.rig.replica.lookup(name)
        assert found is not None
        return found

    def record(self, name: str) -> Record:
        return next(one for one in self.rig.volume.desired.records.values() if one.name == name)

    @property
    def loaded(self) -> set[str]:
        return self.engine.public()

    @property
    def staged(self) -> set[str]:
        return {path.name for path in (self._folder / "stage").glob("*/*")}


MakePod = Callable[..., Pod]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_pod(make_rig: Callable[..., Rig], tmp_path: Path) -> MakePod:
    """``make_pod(room=2, names="ab")``."""

    def make(room: int, names: str = "", max_loaded: int | None = None) -> Pod:
        pod = Pod(make_rig(max_loaded), tmp_path, room)
        for name in names:
            pod.put(name)
        return pod

    return make


async def test_the_least_recently_used_gives_way(make_pod: MakePod) -> None:
    """Its copy goes with it, at once, and as many go as it takes: no request waits for a TTL."""
    pod = make_pod(2, "abcd")
    await pod.rig.settle()
    await pod.use("a", "b", "a", "c")
    assert pod.loaded == pod.staged == {"a", "c"}
    await pod.use("d", "b")
    assert pod.loaded == pod.staged == {"d", "b"}
    assert pod.engine.gone == []
    told = [one.message for one in pod.rig.replica.events.events()]
    assert "Evicted: its copy makes room for d" in told


async def test_no_more_go_than_it_takes(make_pod: MakePod) -> None:
    """Where the folder holds two copies to the byte, a third takes the place of one."""
    pod = make_pod(2, "abc")
    pod.stager.max_bytes = 2 * pod.size
    await pod.rig.settle()
    await pod.use("a", "b", "c")
    assert pod.loaded == pod.staged == {"b", "c"}


async def test_copies_stay_while_their_adapters_are_registered(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long none of them is loaded."""
    pod, clock = make_pod(2, "ab"), Clock()
    monkeypatch.setattr(cache, "time", clock)
    await pod.rig.settle()
    await pod.use("a", "b")
    pod.rig.volume.remove("b")
    pod.engine.adapters.clear()
    await pod.rig.settle()
    for _ in range(2):
        await pod.rig.replica._loop._sweep()
        clock.now += GRACE_S
    assert pod.staged == {"a"}


async def test_an_event_names_no_adapter_of_another_namespace(make_pod: MakePod) -> None:
    """Who reads of an adapter that gave way may not read what it gave way to."""
    pod = make_pod(1)
    pod.rig.replica = pod.rig.start(("default", "team-b"))
    pod.put("a")
    pod.put("merger", namespace="team-b")
    await pod.rig.settle()
    await pod.use("default/a", "team-b/merger")
    evicted = [one.message for one in pod.rig.replica.events.events() if one.reason == "Evicted"]
    assert evicted == ["Evicted: its copy makes room for an adapter of another namespace"]


async def test_another_revision_of_the_same_name_gives_way(make_pod: MakePod) -> None:
    """The request's own name locks nothing that could make room for it."""
    pod = make_pod(2)
    for name, revision in (("a0", "v2"), ("a0", "v1"), ("a1", "v1")):
        pod.put(name, revision=revision)
    await pod.rig.settle()
    await pod.use("a0@v2", "a1", "a0")
    assert pod.loaded == {"a0", "a1"}
    assert len(pod.staged) == 2


async def test_the_old_bytes_of_a_name_give_way_to_its_new_ones(make_pod: MakePod) -> None:
    """There is room for one: what the name served goes before what it serves now is copied."""
    pod = make_pod(1)
    pod.put("a", revision="v1")
    await pod.rig.settle()
    await pod.use("a")
    record = pod.put("a", revision="v2")
    await pod.use("a")
    assert pod.engine.adapters == {pod.engine.name("a"): pod.stager.path(record)}


async def test_who_is_in_use_stays(make_pod: MakePod) -> None:
    """A request for another one waits, the others go on, and when one of them has ended it is served."""
    pod = make_pod(2, "abc")
    await pod.rig.settle()
    async with pod.rig.replica.hold("a", 5):
        async with pod.rig.replica.hold("b", 5):
            await pod.refused("c")
            assert pod.loaded == {"a", "b"}
            looks, find = asyncio.Event(), pod.stager.find_room

            async def find_room(record: Record, lacks: int, since: float) -> bool:
                looks.set()
                return await find(record, lacks, since)

            pod.stager.find_room = find_room
            waits = asyncio.create_task(pod.use("c"))
            await looks.wait()
            assert pod.loaded == {"a", "b"}
        await waits
        assert pod.loaded == pod.staged == {"a", "c"}


async def test_who_is_busy_in_the_engine_stays(make_pod: MakePod) -> None:
    """A request that did not come by the proxy is seen before anybody is chosen."""
    pod = make_pod(2, "abc")
    await pod.rig.settle()
    await pod.use("a", "b")
    pod.engine.busy = {"a"}
    await pod.use("c")
    assert pod.loaded == {"a", "c"}


async def test_who_is_asked_for_stays(make_pod: MakePod) -> None:
    """It was loaded, and the request that waited for it has not come to its turn yet."""
    pod = make_pod(1, "ab")
    await pod.rig.settle()
    await pod.use("a")
    with pod.rig.replica._room.asked(pod.served("a")):
        await pod.refused("b")
    await pod.use("b")
    assert pod.loaded == {"b"}


async def test_who_is_asked_for_twice_stays_for_the_second(make_pod: MakePod) -> None:
    """One of two requests for it has ended: nobody takes it from the other."""
    pod = make_pod(1, "ab")
    await pod.rig.settle()
    await pod.use("a")
    served = pod.served("a")
    room = pod.rig.replica._room
    with room.asked(served):
        with room.asked(served):
            pass
        await pod.refused("b")
    await pod.use("b")
    assert pod.loaded == {"b"}


async def test_who_is_withdrawn_and_in_use_is_passed_over(make_pod: MakePod) -> None:
    """It serves no record any more, and another one gives way."""
    pod = make_pod(2, "abc")
    await pod.rig.settle()
    async with pod.rig.replica.hold("a", 5):
        await pod.use("b")
        pod.rig.volume.remove("a")
        await pod.use("c")
        assert pod.loaded == {"a", "c"}


async def test_what_is_free_already_is_not_asked_for_again(make_pod: MakePod) -> None:
    """A copy that nobody uses gives half of the room, so one adapter is unloaded for the rest, not two."""
    pod = make_pod(3, "abc", max_loaded=2)
    await pod.use("a", "b", "c")
    await pod.rig.settle()
    assert (pod.loaded, pod.staged) == ({"b", "c"}, {"a", "b", "c"})
    record = pod.put("large")
    spec = record.spec.model_copy(update={"size_bytes": 2 * pod.size})
    pod.rig.volume.write({record.key: record.model_copy(update={"spec": spec})}, "large", record.revision)
    await pod.use("large")
    assert pod.loaded == pod.staged == {"c", "large"}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_copy_stays_until_the_engine_let_it_go(make_pod: MakePod, restarted: bool) -> None:
    """While it is asked to unload, it may still read what it has, whoever loaded it, and it may refuse."""
    pod = make_pod(1, "ab")
    await pod.rig.settle()
    await pod.use("a")
    if restarted:
        pod.restart()
        await pod.rig.settle()
        await pod.stager.stage(pod.record("a"))  # as what is made ahead
    pod.engine.gate.clear()
    pod.engine.asked.clear()
    unloading = asyncio.create_task(pod.rig.replica._residents.unload(pod.engine.name("a"), "idle"))
    await pod.engine.asked.wait()
    await pod.refused("b")
    assert pod.staged == {"a"}
    pod.engine.gate.set()
    await unloading
    await pod.use("b")
    assert pod.loaded == pod.staged == {"b"}


async def test_an_engine_that_takes_its_time_to_unload(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a copy may take: that is no time of the volume's, and the load goes on."""
    pod = make_pod(1, "ab")
    await pod.rig.settle()
    await pod.use("a")
    served = pod.rig.replica.lookup("b")
    assert served is not None
    pod.engine.gate.clear()
    pod.engine.asked.clear()
    with pod.rig.replica._room.asked(served):
        loading = pod.rig.replica._residents.load(served)
        await pod.engine.asked.wait()
        loop, late_s = asyncio.get_running_loop(), 2 * pod.stager._timeout_s
        monkeypatch.setattr(loop, "time", lambda now=loop.time: now() + late_s)
        await asyncio.wait({loading}, timeout=0.05)
        pod.engine.gate.set()
        await loading
    assert pod.loaded == pod.staged == {"b"}
    assert pod.engine.gone == []


async def test_an_unload_that_hangs_holds_up_no_request(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not come back from evicting the least recently used: the next one makes the room."""
    monkeypatch.setattr(eviction, "PATIENCE_S", 0.05)
    pod = make_pod(2, "abc")
    await pod.rig.settle()
    await pod.use("a", "b")
    pod.engine.stuck = {"a"}
    await pod.use("c")
    assert pod.loaded == {"a", "c"}
    assert pod.staged == {"a", "c"}, "the engine may read a's copy yet"
    pod.engine.unstick.set()
    await pod.rig.settle()
    assert pod.loaded == {"c"}


@pytest.mark.parametrize("max_loaded", [None, 4])
async def test_an_engine_that_hangs_in_unloads_keeps_its_adapters(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch, max_loaded: int | None
) -> None:
    """When a second unload hangs, all do: whether room or a place is wanted, no third adapter goes."""
    monkeypatch.setattr(eviction, "PATIENCE_S", 0.01)
    monkeypatch.setattr(eviction, "LOOK_S", 0.01)
    pod = make_pod(4 if max_loaded is None else 9, "abcde", max_loaded)
    await pod.rig.settle()
    await pod.use("a", "b", "c", "d")
    pod.engine.stuck, pod.engine.unloads = {"a", "b", "c", "d"}, []
    for within_s in (0.5, 2.0, 8.0, 32.0):  # a busy machine asks for the second one later
        with pytest.raises((StageFull, WaitTimeout)):
            await pod.use("e", within_s=within_s)
        if len(pod.engine.unloads) > 1:
            break
    assert pod.engine.unloads == ["a", "b"]
    pod.engine.unstick.set()
    await pod.use("e")
    assert pod.loaded == {"c", "d", "e"}


async def test_two_names_of_one_copy_wait_for_a_place(make_pod: MakePod) -> None:
    """Each is served when there is one, and each that gave up is told that there was none."""
    pod = make_pod(9, "ab", max_loaded=1)
    await pod.rig.settle()
    revision = pod.record("a").revision
    async with pod.rig.replica.hold("b", 5), asyncio.TaskGroup() as both:
        for name in ("a", f"a@{revision}"):
            both.create_task(pod.told_that_there_is_no_place(name))
    await pod.use("a", "b", f"a@{revision}")


async def test_another_name_of_the_same_copy_gives_its_place(make_pod: MakePod) -> None:
    """There is one place, and ``NAME@REVISION`` is asked for after ``NAME``."""
    pod = make_pod(9, "a", max_loaded=1)
    await pod.rig.settle()
    revision = f"a@{pod.record('a').revision}"
    for name in ("a", revision):
        await pod.use(name)
        assert pod.loaded == {name}


@pytest.mark.parametrize("damage", [True, False])
async def test_a_copy_that_is_damaged_as_the_engine_reads_it(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch, damage: bool
) -> None:
    """It is made anew and loaded once more; a whole one that the engine refuses is not tried again."""
    pod, tries = make_pod(2, "a"), 0
    engine_load = pod.engine.load

    async def read(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        nonlocal tries
        tries += 1
        weights = Path(path, "adapter_model.safetensors")
        if damage and tries == 1:
            weights.chmod(0o600)
            os.truncate(weights, 10)
        if not damage or weights.stat().st_size == 10:
            raise EngineRejected("the engine refused to load a: header", reason="header", status=500)
        await engine_load(name, path, record, spare=spare)

    monkeypatch.setattr(pod.engine, "load", read)
    await pod.rig.settle()
    if damage:
        await pod.use("a")
        assert (pod.loaded, tries) == ({"a"}, 2)
        assert pod.rig.replica.counters()["load_failures_total"] == 0
    else:
        with pytest.raises(EngineRejected, match="header"):
            await pod.use("a")
        assert tries == 1


async def test_who_waits_in_vain_is_told_of_the_room(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not let one of two go: the other stays, too, and the volume is not blamed."""
    pod = make_pod(2, "ab")
    await pod.rig.settle()
    await pod.use("a", "b")
    record = pod.put("large")
    spec = record.spec.model_copy(update={"size_bytes": 2 * pod.size})
    pod.rig.volume.write({record.key: record.model_copy(update={"spec": spec})}, "large", record.revision)
    unload = pod.engine.unload

    async def refuse(name: str) -> None:
        if public_of(name) == "a":
            raise EngineUnavailable("it did not answer in 60 s")
        await unload(name)

    monkeypatch.setattr(pod.engine, "unload", refuse)
    await pod.refused("large")
    assert pod.loaded == pod.staged == {"a", "b"}


async def test_room_that_others_take_is_not_looked_for_for_ever(make_pod: MakePod) -> None:
    """A request looks as long as it is there; a pinned adapter without one gives up after its time,
    or where nobody can go.
    """
    pod = make_pod(1)
    record = pod.put("a", Policy(kind=PolicyKind.PINNED))
    room, now = pod.rig.replica._room, asyncio.get_running_loop().time()
    assert await room.find(record, 0, now)
    assert not await room.find(record, 1 << 40, now)
    assert not await room.find(record, 0, now - TRY_S - 1)
    with room.asked(pod.served("a")):
        assert await room.find(record, 0, now - TRY_S - 1)


async def test_a_load_whose_answer_did_not_come(make_pod: MakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have done it: it is asked before a copy that nobody here uses makes room."""
    pod = make_pod(1, "ab")
    await pod.rig.settle()
    load = pod.engine.load

    async def silent(name: str, path: str, record: Record, *, spare: bool = False) -> None:
        await load(name, path, record)
        if public_of(name) == "a":
            raise EngineUnavailable("it did not answer in 60 s")

    monkeypatch.setattr(pod.engine, "load", silent)
    with pytest.raises(EngineUnavailable):
        await pod.use("a")
    await pod.use("b")
    assert pod.engine.gone == []
    assert pod.loaded == pod.staged == {"b"}


@pytest.mark.parametrize("kind", KEPT)
async def test_eager_and_pinned_ones_stay(make_pod: MakePod, kind: PolicyKind) -> None:
    """Whatever else was used before."""
    pod = make_pod(2, "cd")
    pod.put("a", Policy(kind=kind))
    await pod.rig.settle()
    await pod.use("a", "c", "d")
    assert pod.loaded == {"a", "d"}
    pod.put("e", Policy(kind=kind))
    await pod.use("e")
    assert pod.loaded == {"a", "e"}
    with pytest.raises(VolumeUnavailable, match="no room to stage"):
        await pod.use("c")
    assert pod.loaded == {"a", "e"}


async def test_sticky_ones_give_way(make_pod: MakePod) -> None:
    """As lazy ones, to a request; there is no time after which they would."""
    pod = make_pod(2)
    for name in "abc":
        pod.put(name, Policy(kind=PolicyKind.STICKY))
    await pod.rig.settle()
    await pod.use("a", "b", "c")
    assert pod.loaded == {"b", "c"}


@pytest.mark.parametrize(("kind", "loaded"), [(PolicyKind.EAGER, "ab"), (PolicyKind.PINNED, "be")])
async def test_who_is_loaded_unasked(make_pod: MakePod, kind: PolicyKind, loaded: str) -> None:
    """An eager one takes what is free, a pinned one makes itself room: as where places are short."""
    pod = make_pod(2, "ab")
    await pod.rig.settle()
    await pod.use("a", "b")
    pod.put("e", Policy(kind=kind))
    async with asyncio.timeout(5):
        while pod.rig.replica.notable()[0]["e"].phase not in ("Ready", "Failed"):
            await pod.rig.settle()
            await asyncio.sleep(0.01)
    assert pod.loaded == set(loaded)
    await pod.use("e")
    assert pod.loaded == {"b", "e"}


async def test_nobody_goes_in_vain(make_pod: MakePod) -> None:
    """Where all that may go are too few, all stay."""
    pod = make_pod(3, "ab")
    for name in "cd":
        pod.put(name, Policy(kind=PolicyKind.PINNED))
    await pod.rig.settle()
    await pod.use("c", "d", "a")
    record = pod.put("large")
    spec = record.spec.model_copy(update={"size_bytes": 2 * pod.size})
    pod.rig.volume.write({record.key: record.model_copy(update={"spec": spec})}, "large", record.revision)
    with pytest.raises(VolumeUnavailable, match="no room to stage"):
        await pod.use("large")
    assert pod.loaded == {"a", "c", "d"}


async def test_what_was_unloaded_a_moment_ago_goes_first(make_pod: MakePod) -> None:
    """Its copy makes room at once; nobody is unloaded for it."""
    pod = make_pod(3, "abcd")
    await pod.use("a", "b", "c")
    await pod.rig.replica._residents.unload(pod.engine.name("a"), "idle")
    assert pod.loaded == {"b", "c"}
    assert pod.staged == {"a", "b", "c"}
    async with pod.rig.replica.hold("d", 5):
        assert pod.loaded == {"b", "c", "d"}
        assert pod.staged == {"b", "c", "d"}


async def test_what_an_earlier_sidecar_loaded_gives_way(make_pod: MakePod) -> None:
    """It made the copies, and this one has never seen them."""
    pod = make_pod(2, "abc")
    await pod.rig.settle()
    await pod.use("a", "b")
    pod.restart()
    await pod.rig.settle()
    await pod.use("c")
    assert len(pod.loaded) == 2
    assert "c" in pod.loaded
    assert pod.loaded == pod.staged


async def test_a_copy_that_is_asked_for_again_makes_no_room(make_pod: MakePod) -> None:
    """It came out of use, and a load took it before the next one looked for room."""
    pod = make_pod(1, "ab")
    records = {record.name: record for record in pod.rig.volume.desired.records.values()}
    path = await pod.stager.stage(records["a"])
    for used in ([], [path]):
        pod.stager.use(used)
        assert pod.stager.free_bytes() == (0 if used else pod.size)
    pod.stager.sweep()
    with pytest.raises(StageFull):
        await pod.stager.stage(records["b"])
    pod.stager.use([])
    await pod.stager.stage(records["b"])
    assert pod.staged == {"b"}


async def test_a_copy_that_the_engine_may_read_again_is_verified(make_pod: MakePod) -> None:
    """What was truncated or removed since is made anew before a request goes there; or it does not."""
    pod = make_pod(3, "ab")
    pod.engine.rereads = True
    await pod.rig.settle()
    await pod.use("a", "b")
    weights, folder = (Path(pod.engine.copies()[name]) for name in "ab")
    size = (weights / "adapter_model.safetensors").stat().st_size
    os.truncate(weights / "adapter_model.safetensors", 10)
    shutil.rmtree(folder)
    await pod.use("a", "b")
    assert (weights / "adapter_model.safetensors").stat().st_size == size
    assert (folder / "adapter_config.json").is_file()
    shutil.rmtree(folder)
    hangs, hung = asyncio.Event(), asyncio.Event()
    stage = pod.stager.stage

    async def stuck(record: Record, *, make_room: bool = True) -> str:
        hung.set()
        await hangs.wait()
        return await stage(record, make_room=make_room)

    pod.stager.stage = stuck  # type: ignore[method-assign]
    waits = asyncio.create_task(pod.use("b"))
    await hung.wait()
    await pod.rig.replica._residents.unload(pod.engine.name("b"), "idle")
    assert "b" in pod.loaded, "a request that waits for its copy keeps it"
    with pytest.raises(WaitTimeout, match="b is still staged anew"):
        await pod.use("b", within_s=0.05)
    hangs.set()
    await waits
    shutil.rmtree(folder)
    shutil.rmtree(pod.registry.layout.resolve(pod.record("b").spec.path))
    with pytest.raises(InvalidAdapter, match="gone"):
        await pod.use("b")


@pytest.mark.parametrize("seed", range(3))
async def test_many_that_come_at_once(make_pod: MakePod, seed: int) -> None:
    """Each is served, though all others are in use for the moment; no copy goes that the engine has."""
    pod, dice = make_pod(3, "abcdefgh"), random.Random(seed)
    await pod.rig.settle()
    served = 0

    async def ask() -> None:
        nonlocal served
        for _ in range(8):
            name = dice.choice("abcdefgh")
            pod.rig.clock.now += 1
            async with AsyncExitStack() as held, asyncio.timeout(60):
                engine_name = await held.enter_async_context(pod.rig.replica.hold(name, 50))
                assert Path(pod.engine.adapters[engine_name], "adapter_config.json").is_file()
                await asyncio.sleep(dice.random() / 200)
            served += 1

    async def passes() -> None:
        while True:
            await pod.rig.replica.reconcile()
            await asyncio.to_thread(pod.stager.sweep, pod.rig.replica.names.copies())

    running = asyncio.create_task(passes())
    await asyncio.gather(*(ask() for _ in range(5)))
    running.cancel()
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), "the passes went on to the end"
    assert pod.engine.gone == []
    assert served == 40
    for name in "abcdefgh":
        await pod.use(name)
    assert pod.rig.replica._room._asked == {}
