"""History ends: what is superseded and old goes, and no reader or writer that slept is misled by it."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import Conflict, UnknownOutcome
from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.registry.drops.adopt import RETRY_S, Adopter
from lora_fs.sidecar.registry.format.layout import Generation, generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.maintenance import compaction, fsck, gc, survey
from lora_fs.sidecar.registry.maintenance.garbage import What, collect
from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.store.head import parse_head, read_head
from lora_fs.sidecar.registry.store.reader import Body, ScopeListing, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import Clock, MakeAdapter, write_adapter
from tests.registry.faults import fail, without_links
from tests.registry.test_operations import put, served

YEAR_S = 365 * 24 * 3600.0
LONG_AGO_S = 1_600_000_000
NOBODY: frozenset[AdapterKey] = frozenset()


def compact(registry: Registry, scope: Scope, in_use: Any = NOBODY, history_s: float = 0.0) -> int:
    """One run of gc in which all is old; how many removals of history there were."""
    registry.close()
    found = gc.find(registry, scope, in_use, 0.0, history_s=history_s)
    assert collect(found) == {}
    return sum(item.what is What.HISTORY for item in found)


def compact_whole(registry: Registry, scope: Scope) -> None:
    """Runs of gc until there is nothing to do."""
    for _ in range(6):
        if not compact(registry, scope):
            return
    raise AssertionError("gc finds something to compact at every run")


def files(registry: Registry) -> list[str]:
    """Every record and pointer there is."""
    root = registry.layout.root
    return sorted(path.relative_to(root / "default/tiny").as_posix() for path in root.glob("*/*/*/*.@*.json"))


def look(registry: Registry, scope: Scope, **settings: Any) -> RegistryView:
    view = RegistryView(registry, (scope,), **settings)
    view.refresh()
    return view


@pytest.fixture(params=["cas", "lww"])
def volume(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with and without hard links."""
    monkeypatch.setattr(atomic, "UNLINK_AFTER_S", 0.0)
    if request.param == "lww":
        without_links(monkeypatch)
    registry = Registry(tmp_path / "volume", create=True)
    assert registry.marker.tier == request.param
    return registry


# -- the rules ---------------------------------------------------------------------------------

generations = st.dictionaries(
    st.builds(Generation, st.integers(1, 12), st.sampled_from(["", "0a", "0b"])),
    st.floats(-1e9, 1e9),
    min_size=1,
)


@given(generations, st.floats(0, 1e9))
def test_what_is_superseded(ages: dict[Generation, float], older_than_s: float) -> None:
    """Never the newest; each was superseded for so long; and what stays is the end of the history."""
    going = compaction.superseded(ages, older_than_s)
    newest = max(ages).generation
    assert going == sorted(ages)[: len(going)]
    for one in going:
        assert one.generation < newest
        follower = min(other for other in ages if other.generation > one.generation)
        assert ages[follower] >= older_than_s


def test_a_long_history_is_looked_through_once() -> None:
    """A training that loads a name at each step leaves tens of thousands of its pointers a week."""

    class Counted(dict[Generation, float]):
        looks = 0

        def __getitem__(self, one: Generation) -> float:
            self.looks += 1
            return super().__getitem__(one)

    ages = Counted({Generation(number, ""): 9.0 for number in range(1, 1001)})
    assert len(compaction.superseded(ages, 1.0)) == 999
    assert ages.looks <= 1000


names = st.sets(st.sampled_from(["v1", "v2", "v3", "v10", "beta"]))


@given(names, names, names)
def test_what_may_be_forgotten(revisions: set[str], old: set[str], named: set[str]) -> None:
    """Old tombstones that no pointer names; the greatest number only with all others."""
    old &= revisions
    going = compaction.forgettable(revisions, old, named) if old else []
    assert set(going) <= old - named
    if going and set(going) != revisions:
        assert "v10" not in going
        assert compaction.forgettable(revisions, old, named) == going


# -- what goes, and what stays -----------------------------------------------------------------


def test_promotions_leave_one_pointer(volume: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """However often a name was promoted; what it serves and can be rolled back to is what it was."""
    put(volume, scope, make_adapter())
    put(volume, scope, make_adapter(seed=1))
    for number in range(20):
        release.promote(volume, scope, "a1", f"v{1 + number % 2}", writer="test")
    before = release.active(volume, scope, "a1")
    compact_whole(volume, scope)
    assert sum(name.startswith(".active/") for name in files(volume)) == 1
    assert release.active(volume, scope, "a1") == before
    assert before is not None
    assert release.rollback(volume, scope, "a1", writer="test").revision == "v1"


def test_a_name_that_came_back_keeps_its_history(
    volume: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """gc lists the tombstone; then the name goes, and one with the same generation comes: it stays."""
    put(volume, scope, make_adapter())
    release.unregister(volume, scope, "a1", writer="test")
    compact(volume, scope)
    series = volume.records(series_key(scope))
    (item,) = (one for one in compaction.find(volume, scope, NOBODY, 0.0) if one.path.parent == series.folder)
    tombstone = volume.latest(series)[1]
    assert tombstone is not None
    assert not tombstone.present
    item.path.write_bytes(seal(tombstone.model_copy(update={"writer": "another"})))
    item.remove()
    assert item.path.exists()


def test_of_what_came_and_went_nothing_is_left(
    volume: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Neither records nor pointers nor folders; and a view forgets it, without freezing."""
    put(volume, scope, make_adapter("kept"), name="kept")
    for number in range(12):
        put(volume, scope, make_adapter(), name=f"gone{number}", revision="only")
    view = look(volume, scope)
    for number in range(12):
        release.unregister(volume, scope, f"gone{number}", writer="test")
    view.refresh()
    compact_whole(volume, scope)
    assert [name.partition(".@")[0] for name in files(volume)] == [".active/kept", "v1/kept"]
    assert not (volume.layout.scope(scope) / "only").exists()
    view.refresh(force=True)
    assert view.desired.frozen is None
    assert [key.name for key in view.desired.records] == ["kept"]
    assert [name for _, name in view.desired.pointers] == ["kept"]
    state = survey.look(volume)
    assert list(fsck.find(volume, state, older_than_s=0.0, hash_files=True)) == []


def test_what_is_young_stays(volume: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """A generation until the one above it is old, a tombstone until it is."""
    put(volume, scope, make_adapter())
    put(volume, scope, make_adapter(seed=1))
    release.unregister(volume, scope, "a1", writer="test", revision="v1")
    before = files(volume)
    assert compact(volume, scope, history_s=3600.0) == 0
    assert files(volume) == before


@pytest.mark.parametrize("wrong_by_s", [YEAR_S, -3600.0])
def test_a_wrong_clock_collects_nothing_young(
    wrong_by_s: float,
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where gc's host is ahead by a year, or behind by an hour: the volume's clock tells what is old."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    release.unregister(registry, scope, "a1", writer="test", revision="v1")
    make_folder(registry.layout.incoming(scope))
    (registry.layout.active(scope) / ".tmp-of-a-writer-at-work").touch()
    registry.close()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + wrong_by_s)
    assert gc.find(registry, scope, NOBODY, 3600.0) == []


def test_a_folder_keeps_the_tombstone_beside_it(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A dropped folder that was unregistered is not adopted again, however old its tombstone is."""
    key = AdapterKey(*scope, "v1", "a1")
    write_adapter(registry.layout.artifact(key))
    clock = Clock()
    adopter = Adopter(registry, Expectation(), settle_s=0.0, writer="test", clock=clock)

    def look_at_folders() -> None:
        view = look(registry, scope)
        for _ in range(3):
            clock.now += RETRY_S
            adopter.step(view.desired)
            view.refresh(force=True)

    look_at_folders()
    assert served(registry, scope) == {"a1": "v1"}
    release.unregister(registry, scope, "a1", writer="test")
    compact_whole(registry, scope)
    look_at_folders()
    assert served(registry, scope) == {}
    assert any(name.startswith("v1/a1.@") for name in files(registry))


def test_a_replica_keeps_the_tombstone_of_what_it_has(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Also where it is not known what one has: without its tombstone an adapter is unloaded by nobody."""
    put(registry, scope, make_adapter(), link=True)
    release.unregister(registry, scope, "a1", writer="test")
    for in_use in (None, {AdapterKey(*scope, "v1", "a1")}):
        for _ in range(4):
            compact(registry, scope, in_use=in_use)
        assert any(name.startswith("v1/a1.@") for name in files(registry))
    compact_whole(registry, scope)
    assert files(registry) == []


def test_what_a_pointer_names_is_kept(volume: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Else the next registration might be given a number to which a name would be rolled back."""
    for seed in range(3):
        put(volume, scope, make_adapter(f"s{seed}", seed=seed), link=True)
    release.promote(volume, scope, "a1", "v1", writer="test")  # before it v3
    for revision in ("v2", "v3"):
        release.unregister(volume, scope, "a1", writer="test", revision=revision)
    compact_whole(volume, scope)
    assert not any(name.startswith("v2/") for name in files(volume))
    assert any(name.startswith("v3/") for name in files(volume))
    again = put(volume, scope, make_adapter("s4", seed=4), link=True)
    assert again.record.revision == "v4"


def test_a_damaged_newest_keeps_what_is_below(
    volume: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """What is in force may be any of them."""
    put(volume, scope, make_adapter())
    amend.amend(volume, scope, "a1", [amend.with_labels({"a": "b"})], writer="test")
    newest = max((volume.layout.scope(scope) / "v1").glob("a1.@*.json"))
    newest.write_text("{}")
    before = files(volume)
    compact(volume, scope)
    assert files(volume) == before


def test_what_earlier_generations_said_is_kept(
    volume: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """When it was first registered, and the policy from before it was pinned."""
    first = put(volume, scope, make_adapter()).record
    eager = amend.with_policy(first.spec.policy or Policy(), {"kind": "eager", "priority": 7})
    amend.amend(volume, scope, "a1", [eager], writer="test")
    amend.amend(volume, scope, "a1", [amend.with_policy(Policy(), {"kind": "pinned"})], writer="test")
    amend.amend(volume, scope, "a1", [amend.with_labels({"a": "b"})], writer="test")
    compact_whole(volume, scope)
    assert len(files(volume)) == 2
    unpinned = amend.unpin(volume, scope, "a1", writer="test")[0]
    assert unpinned.registered_at == first.updated_at
    assert unpinned.spec.policy is not None
    assert (unpinned.spec.policy.kind, unpinned.spec.policy.priority) == ("eager", 7)


# -- who slept ---------------------------------------------------------------------------------


class Asleep(Registry):
    """A writer that listed a series long ago, and found ``dreamt`` there."""

    def __init__(self, root: Path, dreamt: Record | None) -> None:
        super().__init__(root)
        self._dreamt = [dreamt]

    def latest(self, series: Series[Body]) -> Any:
        if not self._dreamt:
            return super().latest(series)
        body = self._dreamt.pop()
        token = body.token if body is not None and self.marker.tier == "lww" else ""
        return Generation(body.generation if body is not None else 0, token), body


@pytest.mark.parametrize("slept_since", range(4))
def test_a_writer_that_slept_does_not_take_a_free_number(
    slept_since: int, registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Since before the first generation or any later one: it is refused, or writes above the newest."""
    known: list[Record | None] = [None, put(registry, scope, make_adapter()).record]
    for number in range(4):
        known += amend.amend(registry, scope, "a1", [amend.with_labels({"n": str(number)})], writer="test")
    compact(registry, scope)
    series = registry.records(AdapterKey(*scope, "v1", "a1"))
    assert [one.generation for one in registry.generations(series)] == [5]

    def change(newest: Record | None) -> dict[str, Any]:
        base = newest or known[1]
        assert base is not None
        return {**base.model_dump(mode="json", include={"uid", "state", "origin", "revision", "spec"})}

    stale = Asleep(registry.layout.root, known[slept_since])
    with pytest.raises(Conflict):
        stale.append(series, change, writer="stale", expect=slept_since)
    assert [one.generation for one in registry.generations(series)] == [5]
    stale = Asleep(registry.layout.root, known[slept_since])
    assert stale.append(series, change, writer="stale").generation == 6
    assert look(registry, scope).desired.records[series_key(scope)].writer == "stale"


def test_a_conditional_write_makes_the_folder_that_gc_removed(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc removes an empty revision between the look and the write: that is no conflict."""
    base = put(registry, scope, make_adapter()).record
    series = registry.records(AdapterKey(*scope, "v2", "a1"))
    real = atomic.publish

    def publish(path: Path, *args: Any) -> bool:
        monkeypatch.setattr(atomic, "publish", real)
        series.folder.rmdir()
        return real(path, *args)

    monkeypatch.setattr(atomic, "publish", publish)
    fields = base.model_dump(mode="json", include={"uid", "state", "origin", "spec"})
    registry.append(series, lambda _: {**fields, "revision": "v2"}, writer="test", expect=0)
    assert len(registry.generations(series)) == 1


def test_a_clients_cache_gives_no_number_away(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that still opens what gc removed elsewhere (GlusterFS: for 1 s) writes nothing below it."""
    base = put(registry, scope, make_adapter()).record
    for label in "bc":
        amend.amend(registry, scope, "a1", [amend.with_labels({"n": label})], writer="test")
    compact(registry, scope)
    series, stale = registry.records(series_key(scope)), Asleep(registry.layout.root, base)
    monkeypatch.setattr(stale, "is_gone", lambda *_: False)
    with pytest.raises(Conflict):
        stale.append(series, lambda _: {}, writer="stale", expect=1)
    assert [one.generation for one in registry.generations(series)] == [3]


def test_a_number_that_a_client_believes_taken(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose cache still has a removed name (sshfs) refuses the link: the write is lost."""
    base = put(registry, scope, make_adapter()).record
    for label in "bc":
        amend.amend(registry, scope, "a1", [amend.with_labels({"n": label})], writer="test")
    compact(registry, scope)
    series, taken = registry.records(series_key(scope)), generation_name("a1", 2)
    monkeypatch.setattr(atomic, "READ_BACK_S", (0.0,))
    fail(monkeypatch, "link", errno.EEXIST, times=2, when=lambda _, path, **__: path.name == taken)
    with pytest.raises(Conflict):
        Asleep(registry.layout.root, base).append(series, lambda _: {}, writer="stale", expect=1)
    assert [one.generation for one in registry.generations(series)] == [3]
    stale = Asleep(registry.layout.root, base)
    assert stale.append(series, lambda _: {}, writer="stale").generation == 4


@pytest.mark.parametrize("follower", ["built on it", "damaged"])
def test_a_write_that_others_may_have_built_on_is_unknown(
    follower: str,
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link that landed and does not show may count: what lies above it may rest on it."""
    put(registry, scope, make_adapter())
    series = registry.records(series_key(scope))
    real, name = atomic.read_bytes, generation_name("a1", 2)

    def unseen(path: Path, *args: Any) -> bytes | None:
        if path.name != name:
            return real(path, *args)
        monkeypatch.setattr(atomic, "read_bytes", real)
        if follower == "damaged":
            (series.folder / generation_name("a1", 3)).write_text("{}")
        else:
            Registry(registry.layout.root).append(series, lambda _: {}, writer="other")
        return None

    monkeypatch.setattr(atomic, "read_bytes", unseen)
    monkeypatch.setattr(atomic, "READ_BACK_S", (0.0,))
    with pytest.raises(UnknownOutcome):
        registry.append(series, lambda _: {}, writer="test", expect=1)
    assert registry.read(series, Generation(2, "")).writer == "test"


def series_key(scope: Scope) -> AdapterKey:
    return AdapterKey(*scope, "v1", "a1")


def test_no_write_is_lost_beside_a_compaction(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Writers that count up one label, while what is superseded goes at once: the count is right."""
    put(registry, scope, make_adapter())
    series, ended = registry.records(series_key(scope)), threading.Event()

    def count(_: int) -> None:
        own = Registry(registry.layout.root)

        def up(newest: Record | None) -> dict[str, Any]:
            assert newest is not None
            spec = newest.spec.model_dump(mode="json")
            return {"spec": {**spec, "labels": {"n": str(int(newest.spec.labels.get("n", "0")) + 1)}}}

        for _ in range(15):
            while True:
                try:
                    own.append(series, up, writer="test")
                    break
                except Conflict:  # eight races were lost in a row
                    continue

    def remove() -> int:
        runs = 0
        while not ended.is_set():
            for item in compaction.find(registry, scope, NOBODY, 0.0):
                item.remove()
                runs += 1
        return runs

    with ThreadPoolExecutor(4) as threads:
        removing = threads.submit(remove)
        list(threads.map(count, range(3)))
        ended.set()
        assert removing.result() > 0
    newest = registry.latest(series)[1]
    assert newest is not None
    assert newest.spec.labels == {"n": "45"}
    assert newest.generation == 46


def test_a_reader_that_missed_a_tombstone_withdraws(
    volume: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """It slept while an adapter was withdrawn and its tombstone went: HEAD's floor tells of it."""
    put(volume, scope, make_adapter("kept"), name="kept")
    put(volume, scope, make_adapter(seed=1), link=True)
    clock = Clock()
    slept, awake = look(volume, scope, clock=clock), look(volume, scope)
    release.unregister(volume, scope, "a1", writer="test")
    awake.refresh()
    compact_whole(volume, scope)
    assert files(volume) == [name for name in files(volume) if "kept" in name]
    slept.refresh()
    record = slept.desired.records[series_key(scope)]
    assert not record.present  # known to be withdrawn, so that its engine unloads it
    assert slept.desired.pointers[scope, "a1"].revision is None
    assert slept.desired.frozen is None
    assert {name for _, name, _ in slept.desired.active()} == {"kept"}
    clock.now += YEAR_S
    slept.refresh(force=True)
    assert series_key(scope) not in slept.desired.records
    read = awake.desired.records[AdapterKey(*scope, "v1", "kept")]
    awake.refresh()
    assert awake.desired.records[AdapterKey(*scope, "v1", "kept")] is read, "it had missed nothing"
    assert series_key(scope) not in awake.desired.records


class Lagging(Registry):
    """Its client answers with the last listings while ``lags``, as sshfs's does for 20 s."""

    lags = False

    def scan(self, scope: Scope, *args: Any) -> ScopeListing:
        if not self.lags:
            self.listing = super().scan(scope, *args)
        return self.listing


def test_a_reader_whose_listing_lags_misses_no_tombstone(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """HEAD's floor is newer than its listing: the tree is read anew until no listing can lag any more."""
    put(registry, scope, make_adapter())
    lagging, clock = Lagging(registry.layout.root), Clock()
    slept = look(lagging, scope, clock=clock, lag_s=20.0)
    release.unregister(registry, scope, "a1", writer="test")
    gone = registry.layout.artifact(series_key(scope))
    gone.rename(gone.with_name("elsewhere"))
    compact_whole(registry, scope)
    lagging.lags = True
    slept.refresh()
    assert slept.desired.records[series_key(scope)].present, "what cannot be read stays as it was"
    lagging.lags = False
    clock.now += 20.0
    slept.refresh()
    assert not slept.desired.records[series_key(scope)].present


def test_a_reader_that_missed_tombstones_keeps_what_it_cannot_read(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged record or tombstone, a folder that may not be listed: the last good state of these stays."""
    put(registry, scope, make_adapter(), name="damaged")
    put(registry, scope, make_adapter(), name="withdrawn")
    release.unregister(registry, scope, "withdrawn", writer="test")
    put(registry, scope, make_adapter(), name="denied", revision="private")
    put(registry, scope, make_adapter(seed=1), link=True)
    slept = look(registry, scope)
    v1 = registry.layout.scope(scope) / "v1"
    (v1 / "withdrawn.@00000002.json").write_text("{}")
    release.unregister(registry, scope, "a1", writer="test")
    compact_whole(registry, scope)
    (v1 / "damaged.@00000001.json").write_text("{}")
    real, private = os.listdir, registry.layout.revision(scope, "private")

    def listed(path: Any = ".") -> list[str]:
        if path == private:
            raise PermissionError(13, "denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listed)
    slept.refresh()
    assert {name for _, name, _ in slept.desired.active()} == {"damaged", "denied"}
    assert not slept.desired.records[series_key(scope)].present
    assert not slept.desired.records[AdapterKey(*scope, "v1", "withdrawn")].present
    assert len(slept.desired.problems) == 3


def test_absence_alone_withdraws_nothing(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Where no HEAD tells that tombstones are gone, what is not there was lost: it stays in force."""
    put(registry, scope, make_adapter(), link=True)
    slept = look(registry, scope)
    release.unregister(registry, scope, "a1", writer="test")
    compact_whole(registry, scope)
    registry.layout.head.unlink()
    slept.refresh(force=True)
    assert [name for _, name, _ in slept.desired.active()] == ["a1"]


def test_a_name_that_comes_back(volume: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """It begins above every number that it had, and all readers follow it: those that slept, too."""
    put(volume, scope, make_adapter(), link=True)
    slept, awake = look(volume, scope), look(volume, scope)
    amend.amend(volume, scope, "a1", [amend.with_labels({"a": "b"})], writer="test")
    release.unregister(volume, scope, "a1", writer="test")
    awake.refresh()
    compact_whole(volume, scope)
    awake.refresh()
    record = put(volume, scope, make_adapter("other", seed=1), link=True).record
    assert (record.revision, record.generation) == ("v1", 4)
    for view in (slept, awake, look(volume, scope)):
        view.refresh()
        assert view.desired.records == {record.key: record}
        assert [name for _, name, _ in view.desired.active()] == ["a1"]


def test_a_name_that_comes_back_where_head_was_lost(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Its numbers begin anew; a reader that has the tombstone takes what it finds in its place."""
    put(registry, scope, make_adapter(), link=True)
    view = look(registry, scope)
    release.unregister(registry, scope, "a1", writer="test")
    view.refresh()
    compact_whole(registry, scope)
    registry.layout.head.unlink()
    record = put(registry, scope, make_adapter("other", seed=1), link=True).record
    assert record.generation == 1
    view.refresh(force=True)
    assert view.desired.records == {record.key: record}


def test_a_reader_that_slept_since_before_head_was_made_anew(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """HEAD's numbers began anew meanwhile, and its floor is below the last one that it saw."""
    put(registry, scope, make_adapter("kept"), name="kept")
    put(registry, scope, make_adapter(), link=True)
    for number in range(30):
        amend.amend(registry, scope, "a1", [amend.with_labels({"n": str(number)})], writer="test")
    slept, seen = look(registry, scope), parse_head(read_head(registry.layout))
    registry.layout.head.unlink()
    release.unregister(registry, scope, "a1", writer="test")
    compact_whole(registry, scope)
    head = parse_head(read_head(registry.layout))
    assert head is not None
    assert seen is not None
    assert 0 < head.gc_floor < seen.seq
    slept.refresh()
    assert [name for _, name, _ in slept.desired.active()] == ["kept"]
    assert slept.desired.frozen is None


def test_a_listing_that_lags_withdraws_nothing_that_was_told(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A reader that missed tombstones reads anew through it: what HEAD told of stays, and as it was told."""
    put(registry, scope, make_adapter(), name="gone", link=True)
    put(registry, scope, make_adapter("kept"), name="kept")
    lagging, clock = Lagging(registry.layout.root), Clock()
    slept = look(lagging, scope, clock=clock, lag_s=20.0)
    lagging.lags = True
    put(registry, scope, make_adapter("new", seed=1), name="new")
    release.unregister(registry, scope, "kept", writer="test")
    slept.refresh()
    assert {name for _, name, _ in slept.desired.active()} == {"gone", "new"}
    release.unregister(registry, scope, "gone", writer="test")
    compact_whole(registry, scope)
    for _ in range(3):
        clock.now += 2.0
        slept.refresh()
        assert {name for _, name, _ in slept.desired.active()} - {"gone"} == {"new"}
    lagging.lags = False
    clock.now += 20.0
    slept.refresh()
    assert {name for _, name, _ in slept.desired.active()} == {"new"}


def test_the_floor_survives_other_writers(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Every HEAD after it says it, too."""
    put(registry, scope, make_adapter(), link=True)
    release.unregister(registry, scope, "a1", writer="test")
    compact_whole(registry, scope)
    told = parse_head(read_head(registry.layout))
    assert told is not None
    assert told.gc_floor > 0
    assert told.first == 3
    put(registry, scope, make_adapter(seed=1), name="b1")
    after = parse_head(read_head(registry.layout))
    assert after is not None
    assert (after.gc_floor, after.first) == (told.gc_floor, told.first)


def test_a_writer_that_replaces_head_beside_gc_loses_no_floor(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read HEAD before gc raised the floor, and replaces it before the tombstone goes."""
    put(registry, scope, make_adapter(), link=True)
    release.unregister(registry, scope, "a1", writer="test")
    compact(registry, scope)
    earlier, unlink = registry.layout.head.read_bytes(), Path.unlink

    def beside(path: Path, missing_ok: bool = False) -> None:
        if ".@" in path.name:
            registry.layout.head.write_bytes(earlier)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", beside)
    assert compact(registry, scope)
    head = parse_head(read_head(registry.layout))
    assert head is not None
    assert head.gc_floor > 0 < head.first - 1


def test_a_torn_read_of_head_loses_no_floor(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a replaced file is read torn now and then, no writer makes HEAD anew for it."""
    put(registry, scope, make_adapter(), link=True)
    release.unregister(registry, scope, "a1", writer="test")
    compact_whole(registry, scope)
    before = parse_head(read_head(registry.layout))
    real, reads = atomic.read_bytes, itertools.count(1)

    def read(path: Path, *args: Any, **kwargs: Any) -> bytes | None:
        data = real(path, *args, **kwargs)
        if path != registry.layout.head or data is None:
            return data
        return [b"", data[:40], data][next(reads) % 3]

    monkeypatch.setattr(atomic, "read_bytes", read)
    put(registry, scope, make_adapter(seed=1), name="b1")
    monkeypatch.undo()
    after = parse_head(read_head(registry.layout))
    assert before is not None
    assert after is not None
    assert (after.gc_floor, after.first) == (before.gc_floor, before.first)
    assert after.gc_floor > 0


# -- ended in the middle -----------------------------------------------------------------------


class Killed(BaseException):
    """Nothing is done after it."""


def removals(patch: pytest.MonkeyPatch, allowed: int) -> Iterator[None]:
    """Let the process end before the removal or rename after so many."""
    made = 0
    for call in ("unlink", "rmdir", "rename", "replace"):
        real = getattr(os, call)

        def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            nonlocal made
            if made == allowed:
                raise Killed
            made += 1
            return real(*args, **kwargs)

        patch.setattr(os, call, counted)
    yield


def test_killed_at_every_removal(tmp_path: Path, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Every reader, fresh, awake or woken, finds what is served and nothing withdrawn; gc completes it."""
    killed = 0
    for allowed in range(100):
        registry = Registry(tmp_path / f"root{allowed}", create=True)
        put(registry, scope, make_adapter())
        put(registry, scope, make_adapter(seed=1))
        put(registry, scope, make_adapter(), name="b1", link=True)
        slept = look(registry, scope)
        amend.amend(registry, scope, "a1", [amend.with_labels({"a": "b"})], writer="test")
        release.promote(registry, scope, "a1", "v1", writer="test")
        release.unregister(registry, scope, "b1", writer="test")
        awake = look(registry, scope)
        ended = True
        with pytest.MonkeyPatch.context() as patch:
            for _ in removals(patch, allowed):
                try:
                    compact_whole(registry, scope)
                except Killed:
                    ended = False
        for view in (awake, look(registry, scope), slept):
            view.refresh(force=True)
            assert {name: one.revision for _, name, one in view.desired.active()} == {"a1": "v1"}
            assert view.desired.problems == {}
            assert view.desired.frozen is None
        compact_whole(registry, scope)
        assert served(registry, scope) == {"a1": "v1"}
        assert len(files(registry)) == 3
        if ended:
            break
        killed += 1
    assert killed > 10


def test_a_file_that_stays_keeps_those_above_it(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is the end of a history at every moment: a writer that slept rests on it."""
    put(registry, scope, make_adapter())
    for number in range(4):
        amend.amend(registry, scope, "a1", [amend.with_labels({"n": str(number)})], writer="test")
    registry.close()
    real = os.unlink

    def refused(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith("a1.@00000002.json"):
            raise PermissionError(13, "denied")
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refused)
    kept = collect(gc.find(registry, scope, NOBODY, 0.0, history_s=0.0))
    assert len(kept) == 1
    left = [one.generation for one in registry.generations(registry.records(series_key(scope)))]
    assert left == [5, 4, 3, 2]


def test_an_empty_revision_goes_under_a_writer(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old revision without a file goes; one who was about to write there makes it again."""
    put(registry, scope, make_adapter())
    empty = registry.layout.scope(scope) / "v9"
    make_folder(empty)
    assert compact(registry, scope) == 1
    assert not empty.exists()
    record = registry.latest(registry.records(series_key(scope)))[1]
    assert record is not None
    make_folder(empty)
    real, times = make_folder, list[int]()

    def removed_behind_it(folder: Path, **more: Any) -> None:
        real(folder, **more)
        if folder == empty and not times:
            times.append(compact(registry, scope))

    monkeypatch.setattr(writer, "make_folder", removed_behind_it)
    fields = record.model_dump(mode="json", include={"uid", "state", "origin", "spec"})
    key = AdapterKey(*scope, "v9", "a1")
    registry.append(registry.records(key), lambda _: {**fields, "revision": "v9"}, writer="test")
    assert times == [1]
    assert key in look(registry, scope).desired.records


def test_accounts_keep_nothing_of_what_went(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """What a namespace has is counted right, and no more is remembered than there is."""
    for number in range(5):
        put(registry, scope, make_adapter(), name=f"a{number}", link=True)
    assert len(registry.accounts.usage("default").sizes) == 5
    for number in range(4):
        release.unregister(registry, scope, f"a{number}", writer="test")
    compact_whole(registry, scope)
    assert len(registry.accounts.usage("default").sizes) == 1
    assert len(registry.accounts._seen) == 1
