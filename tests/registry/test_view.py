"""The view learns, and never unlearns for an absence or a damaged file."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import Conflict, OperatorError, RegistryLost, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import LAG_LOOK_MOST_S, PATIENCE_S, RETRY_MOST_S, RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import TemporaryNames
from tests.registry.conftest import Clock, MakeAdapter
from tests.registry.faults import fail, without_links
from tests.registry.test_operations import put
from tests.registry.test_root import change_marker

EVERY_TRY = 1 << 30


def names(view: RegistryView) -> list[str]:
    return sorted(name for _, name, _ in view.desired.active())


def test_garbage_in_a_record_keeps_the_last_good_state(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A record edited into garbage is reported, and what it said before is in force."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    record = registry.layout.revision(scope, "v1") / "a1.@00000002.json"
    record.write_text("garbage")
    view.refresh(force=True)
    assert names(view) == ["a1"]
    assert len(view.desired.problems) == 1


def test_absence_withdraws_nothing(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Records that vanish are not tombstones: the view keeps them, and says so when many go."""
    for index in range(8):
        put(registry, scope, make_adapter(seed=index), name=f"a{index}")
    view = RegistryView(registry, (scope,))
    view.refresh()
    shutil.rmtree(registry.layout.scope(scope))
    view.refresh(force=True)
    assert len(names(view)) == 8
    assert view.desired.frozen is not None


def test_an_unmounted_volume_is_not_an_empty_registry(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """An empty folder where the registry was is RegistryLost, and the state stays."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    root = registry.layout.root
    root.rename(root.with_name("away"))
    root.mkdir()
    with pytest.raises(RegistryLost):
        view.refresh(force=True)
    assert names(view) == ["a1"]
    root.rmdir()
    root.with_name("away").rename(root)
    view.refresh(force=True)
    assert names(view) == ["a1"]


@pytest.fixture
def view(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> RegistryView:
    """A view that has seen ``a1`` at v1."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    return view


def record_path(registry: Registry, scope: Scope, generation: int, name: str = "a1") -> Path:
    return registry.layout.revision(scope, "v1") / generation_name(name, generation)


def test_one_body_a_generation(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """Of two writers of one generation the second is told, and the first one's bytes stay."""
    series = registry.records(AdapterKey(*scope, "v1", "a1"))
    first = registry.append(series, lambda _: {"writer": "first"}, writer="first", expect=1)
    with pytest.raises(Conflict, match="expected generation 1, found 2"):
        registry.append(series, lambda _: {"writer": "second"}, writer="second", expect=1)
    assert registry.latest(series)[1] == first


def test_a_lost_race_is_run_again(
    registry: Registry, scope: Scope, view: RegistryView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that was overtaken builds on what overtook it, unless it said what it expects."""
    series = registry.records(AdapterKey(*scope, "v1", "a1"))
    stale = registry.latest(series)
    registry.append(series, lambda _: {"uid": "overtaker"}, writer="overtaker")
    answers, real = [stale], Registry.latest
    monkeypatch.setattr(Registry, "latest", lambda *args: answers.pop() if answers else real(*args))
    with pytest.raises(Conflict, match="first"):
        registry.append(series, lambda _: {}, writer="slow", expect=1)
    answers.append(stale)
    done = registry.append(series, lambda _: {}, writer="slow")
    assert (done.generation, done.uid) == (3, "overtaker")


def test_a_generation_only_rises(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """A listing that forgets the newest generation takes nothing back."""
    release.unregister(registry, scope, "a1", writer="test")
    view.refresh()
    record_path(registry, scope, 2).rename(registry.layout.root / "away")
    shutil.rmtree(registry.layout.active(scope))
    view.refresh(force=True)
    assert names(view) == []
    assert view.desired.records[AdapterKey(*scope, "v1", "a1")].generation == 2


def test_a_stale_writer_cannot_resurrect(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """A writer that slept since before the tombstone finds its generation taken."""
    slept = registry.latest(registry.records(AdapterKey(*scope, "v1", "a1")))[1]
    assert slept is not None
    release.unregister(registry, scope, "a1", writer="test")
    body = seal(slept.model_copy(update={"generation": 2}))
    assert not atomic.publish(record_path(registry, scope, 2), body, TemporaryNames())
    view.refresh(force=True)
    assert names(view) == []


def test_without_every_hint_one_scan_converges(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView
) -> None:
    """HEAD, leases and replicas deleted: the next scan knows everything, old view and new."""
    put(registry, scope, make_adapter(seed=1), name="a2")
    registry.layout.head.unlink()
    shutil.rmtree(registry.layout.leases)
    shutil.rmtree(registry.layout.replicas)
    fresh = RegistryView(registry, (scope,))
    for one in (view, fresh):
        one.refresh(force=True)
        assert names(one) == ["a1", "a2"]
    put(registry, scope, make_adapter(seed=2), name="a3")
    view.refresh()
    assert names(view) == ["a1", "a2", "a3"]


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\x00" * 100, b"{", b"[" * 100_000])
def test_no_unsealed_body_is_acted_on(
    registry: Registry, scope: Scope, view: RegistryView, content: bytes
) -> None:
    """Whatever lies under the next generation's name, what was before it is in force."""
    record_path(registry, scope, 2).write_bytes(content)
    (registry.layout.active(scope) / generation_name("a1", 2)).write_bytes(content)
    fresh = RegistryView(registry, (scope,))
    for one in (view, fresh):
        one.refresh(force=True)
        assert names(one) == ["a1"]
        assert len(one.desired.problems) == 2


def test_a_seal_broken_by_hand_is_not_acted_on(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """A body edited without its seal is damage, however well it reads."""
    text = record_path(registry, scope, 1).read_text()
    edited = text.replace('"present"', '"deleted"').replace('"generation": 1', '"generation": 2')
    record_path(registry, scope, 2).write_text(edited)
    view.refresh(force=True)
    assert names(view) == ["a1"]


def test_a_tombstone_under_damage_is_seen(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """A view that missed the tombstone takes it, though a damaged generation lies above it."""
    release.unregister(registry, scope, "a1", writer="test")
    record_path(registry, scope, 3).write_text("garbage")
    fresh = RegistryView(registry, (scope,))
    for one in (view, fresh):
        one.refresh(force=True)
        assert not one.desired.records[AdapterKey(*scope, "v1", "a1")].present


def test_damage_is_looked_at_less_and_less(
    registry: Registry, scope: Scope, view: RegistryView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that stays damaged is tried again, after ever longer pauses, and not at every poll."""
    clock, scans, scan = Clock(), 0, Registry.scan

    def counting(*args: object) -> object:
        nonlocal scans
        scans += 1
        return scan(*args)  # type: ignore[arg-type]

    record_path(registry, scope, 2).write_text("garbage")
    monkeypatch.setattr(Registry, "scan", counting)
    view = RegistryView(registry, (scope,), scan_s=1e9, clock=clock)
    while clock.now < 600:
        view.refresh()
        clock.now += 0.1
    assert 20 < scans < 40
    good = unseal(record_path(registry, scope, 1).read_bytes())
    record_path(registry, scope, 2).write_bytes(seal({**good, "generation": 2}))
    clock.now += RETRY_MOST_S
    assert view.refresh()
    assert view.desired.problems == {}
    assert view.desired.records[AdapterKey(*scope, "v1", "a1")].generation == 2


def test_a_record_copied_elsewhere_is_nobodys(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """``cp -r v1 v2`` copies records that say v1: they are damage in v2, and not served from there."""
    shutil.copytree(registry.layout.revision(scope, "v1"), registry.layout.revision(scope, "v2"))
    shutil.copytree(registry.layout.scope(scope), registry.layout.scope(Scope("other", "tiny")))
    view = RegistryView(registry, (scope, Scope("other", "tiny")))
    view.refresh()
    assert [record.key for _, _, record in view.desired.active()] == [AdapterKey(*scope, "v1", "a1")]
    assert len(view.desired.problems) == 4


def test_the_last_generation_there_can_be(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """A file that claims the greatest generation leaves no name for the next: the write is refused."""
    record_path(registry, scope, 10**18 - 1).write_text("garbage")
    with pytest.raises(OperatorError, match="remove that file"):
        release.unregister(registry, scope, "a1", writer="test")


@pytest.mark.parametrize("call", ["listdir", "open"])
def test_unknown_is_never_empty(
    registry: Registry, scope: Scope, view: RegistryView, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A first look that fails is no state; a later one leaves the state as it was, and says so."""
    release.unregister(registry, scope, "a1", writer="test")
    registry.announce()  # by who does not know what was written
    fresh = RegistryView(registry, (scope,))
    with monkeypatch.context() as patch:
        where = str(registry.layout.revision(scope, "v1"))
        fail(patch, call, errno.EIO, times=EVERY_TRY, when=lambda path, *_: str(path).startswith(where))
        with pytest.raises(VolumeUnavailable):
            fresh.refresh()
        assert not fresh.desired.listings
        view.refresh()
        assert view.desired.records[AdapterKey(*scope, "v1", "a1")].present
        assert len(view.desired.problems) == 1
        assert view.desired.frozen is None
    for one in (view, fresh):
        one.refresh(force=True)
        assert not one.desired.records[AdapterKey(*scope, "v1", "a1")].present
        assert one.desired.problems == {}


@pytest.mark.parametrize("call", ["listdir", "open"])
def test_what_may_not_be_read_stops_nobody_else(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """One folder, or one record, without permission is a problem of its own, also at the first look."""
    put(registry, scope, make_adapter(seed=1), name="b1", revision="r2")
    registry.announce()
    forbidden = str(registry.layout.revision(scope, "r2"))
    fail(monkeypatch, call, errno.EACCES, times=EVERY_TRY, when=lambda p, *_: str(p).startswith(forbidden))
    fresh = RegistryView(registry, (scope,))
    for one in (view, fresh):
        one.refresh()
        assert names(one) == ["a1"]
        assert len(one.desired.problems) == 1


def frozen(view: RegistryView) -> bool:
    return view.desired.frozen is not None


def test_a_few_vanished_records_are_not_reported(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView
) -> None:
    """Up to five, or a fifth, may go without a freeze; they stay in force; a return thaws."""
    for index in range(6):
        put(registry, scope, make_adapter(), name=f"b{index}", revision="r2")
    view.refresh()
    folder = registry.layout.revision(scope, "r2")
    (folder / generation_name("b0", 1)).rename(registry.layout.root / "away")
    view.refresh(force=True)
    assert not frozen(view)
    folder.rename(folder.with_name(".gone"))
    view.refresh(force=True)
    assert frozen(view)
    assert len(names(view)) == 7
    folder.with_name(".gone").rename(folder)
    view.refresh(force=True)
    assert not frozen(view)


@pytest.fixture
def eight(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> Registry:
    """``a0`` to ``a7`` at v1."""
    for index in range(8):
        put(registry, scope, make_adapter(seed=index), name=f"a{index}", revision="v1")
    return registry


@pytest.mark.parametrize(("there", "lost"), [(8, 1), (8, 8), (1, 1)])
def test_a_file_that_never_answers_stops_no_start(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    there: int,
    lost: int,
) -> None:
    """A first look waits for one file of many for a while; a volume that fails is no empty one, ever."""
    clock, is_spared = Clock(), lost < there
    for index in range(there):
        put(registry, scope, make_adapter(seed=index), name=f"a{index}", revision="v1")
    fresh = RegistryView(registry, (scope,), clock=clock)
    records = {str(record_path(registry, scope, 1, f"a{index}")) for index in range(lost)}
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.EIO, times=EVERY_TRY, when=lambda path, *_: str(path) in records)
        with pytest.raises(VolumeUnavailable, match="cannot open"):
            fresh.refresh()
        clock.now += PATIENCE_S
        with nullcontext() if is_spared else pytest.raises(VolumeUnavailable, match="cannot open"):
            fresh.refresh()
        assert (len(names(fresh)), len(fresh.desired.problems)) == ((7, 1) if is_spared else (0, 0))
    clock.now += RETRY_MOST_S
    fresh.refresh()
    assert (len(names(fresh)), len(fresh.desired.problems)) == (there, 0)
    change_marker(registry.layout.root, epoch=2)  # a restore: the next look is a first one, and waits, too
    fail(monkeypatch, "open", errno.EIO, times=EVERY_TRY, when=lambda path, *_: str(path) in records)
    with pytest.raises(VolumeUnavailable, match="cannot open"):
        fresh.refresh(force=True)


def test_pointers_that_vanish_freeze_as_records_do(eight: Registry, scope: Scope) -> None:
    """The names are served on, and it is told what a restart would take away, until enough are back."""
    view, active = RegistryView(eight, (scope,)), eight.layout.active(scope)
    view.refresh()
    for index in range(5):
        (active / generation_name(f"a{index}", 1)).unlink()
    view.refresh(force=True)
    assert not frozen(view)
    shutil.rmtree(active)
    view.refresh(force=True)
    assert len(names(view)) == 8
    assert view.desired.frozen == (
        "8 of 8 pointers vanished from the volume at once; nothing is unloaded for it, and a replica that "
        "starts serves none of these names: restore .active/ from a backup, or `lora-fs promote` each"
    )
    for index in range(3):
        release.promote(eight, scope, f"a{index}", "v1", writer="test")
    view.refresh(force=True)
    assert not frozen(view)
    assert len(names(view)) == 8


def test_a_restored_active_folder_thaws(eight: Registry, scope: Scope) -> None:
    """As the message says."""
    view, active = RegistryView(eight, (scope,)), eight.layout.active(scope)
    view.refresh()
    active.rename(eight.layout.root / "backup")
    view.refresh(force=True)
    assert frozen(view)
    (eight.layout.root / "backup").rename(active)
    view.refresh(force=True)
    assert not frozen(view)


def test_a_whole_scope_that_vanishes_is_told_as_a_volume(eight: Registry, scope: Scope) -> None:
    """Records and pointers, each by its number."""
    view = RegistryView(eight, (scope,))
    view.refresh()
    shutil.rmtree(eight.layout.scope(scope))
    view.refresh(force=True)
    assert view.desired.frozen == (
        "8 of 8 records and 8 of 8 pointers vanished from the volume at once; nothing is unloaded for it: "
        "is the right volume mounted?"
    )


@pytest.mark.parametrize("lag_s", [0.0, 60.0])
def test_what_head_told_has_not_vanished_where_its_folder_was_not_listed(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView, lag_s: float
) -> None:
    """A look at one revision's folder says nothing of other revisions, nor of pointers."""
    clock = Clock()
    view = RegistryView(registry, (scope,), lag_s=lag_s, clock=clock)
    view.refresh()
    for index in range(8):
        put(registry, scope, make_adapter(seed=index), name=f"b{index}", revision="r2")
        view.refresh()
    assert len(names(view)) == 9
    folder = registry.layout.revision(scope, "v1")
    (folder / "dropped").mkdir()
    clock.now += lag_s / 2
    assert view.refresh(folders=[folder]) is False
    assert not frozen(view)
    view.refresh(force=True)
    assert not frozen(view)


@pytest.mark.parametrize("gone", ["records", "pointers"])
def test_what_head_told_and_was_removed_before_it_was_listed(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView, gone: str
) -> None:
    """No listing ever had it, and it is missed."""
    for index in range(8):
        put(registry, scope, make_adapter(seed=index), name=f"b{index}", revision="r2")
        view.refresh()
    layout = registry.layout
    folder = layout.active(scope) if gone == "pointers" else layout.revision(scope, "r2")
    for path in folder.glob("b*.json"):
        path.unlink()
    view.refresh(force=True)
    assert (view.desired.frozen or "").startswith(f"8 of 9 {gone} vanished")


def test_pointers_that_a_listing_lacks_yet_have_not_vanished(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may list ``.active/`` for a minute as it was before HEAD told; longer, and they are gone."""
    clock, real, active = Clock(), atomic.list_names, registry.layout.active(scope)
    view = RegistryView(registry, (scope,), lag_s=60.0, clock=clock)
    view.refresh()
    before = real(active)
    for index in range(8):
        put(registry, scope, make_adapter(seed=index), name=f"b{index}", revision="v1")
        view.refresh()
    monkeypatch.setattr(atomic, "list_names", lambda at: before if at == active else real(at))
    for after_s, missed in ((59.0, False), (2.0, True)):
        clock.now += after_s
        view.refresh(force=True)
        assert len(names(view)) == 9
        assert frozen(view) is missed
    monkeypatch.undo()
    view.refresh(force=True)
    assert not frozen(view)


def test_a_pointer_written_anew_under_its_old_number_is_seen(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView
) -> None:
    """Where HEAD does not tell of it either."""
    put(registry, scope, make_adapter(seed=1), revision="v2", activate=False)
    view.refresh()
    shutil.rmtree(registry.layout.active(scope))
    view.refresh(force=True)
    release.promote(registry, scope, "a1", "v2", writer="test")
    registry.layout.head.unlink()
    view.refresh(force=True)
    assert {name: record.revision for _, name, record in view.desired.active()} == {"a1": "v2"}


def test_a_restored_registry_is_read_anew(registry: Registry, scope: Scope, view: RegistryView) -> None:
    """A raised epoch forgets what was known, lower generations included."""
    copy = registry.layout.root.with_name("backup")
    shutil.copytree(registry.layout.root, copy)
    release.unregister(registry, scope, "a1", writer="test")
    view.refresh()
    assert names(view) == []
    shutil.rmtree(registry.layout.root)
    copy.rename(registry.layout.root)
    change_marker(registry.layout.root, epoch=2)
    view.refresh(force=True)
    assert names(view) == ["a1"]
    assert view.desired.records[AdapterKey(*scope, "v1", "a1")].generation == 1


def test_bodies_are_read_once(
    registry: Registry, scope: Scope, view: RegistryView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan of a tree that did not change opens the marker and HEAD, and no record."""
    registry.close()  # a writer's temporary names go a moment after they were linked: not between the scans
    view.refresh(force=True)
    listings = view.desired.listings
    calls = fail(monkeypatch, "open", errno.EIO, times=0)
    assert not view.refresh(force=True)
    assert {Path(str(args[0])).name for args in calls} <= {"lora-fs.json", "HEAD"}
    assert os.path.exists(registry.layout.head)
    assert view.desired.listings[scope].revisions["v1"] is listings[scope].revisions["v1"]


def test_a_folder_that_could_not_be_listed_is_tried_again(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD said look, the folder did not answer: it is looked at again though HEAD says nothing new."""
    put(registry, scope, make_adapter())
    clock = Clock()
    view = RegistryView(registry, (scope,), clock=clock)
    view.refresh()
    put(registry, scope, make_adapter(seed=1), name="a2")
    registry.announce()
    with monkeypatch.context() as patch:
        folder = str(registry.layout.revision(scope, "v1"))
        fail(patch, "listdir", errno.EIO, times=EVERY_TRY, when=lambda path: str(path) == folder)
        view.refresh()
        assert names(view) == ["a1"]
    clock.now += RETRY_MOST_S
    assert view.refresh()
    assert names(view) == ["a1", "a2"]
    assert view.desired.problems == {}


def test_a_folder_that_cannot_be_listed_keeps_its_last_listing(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """For who takes the reasons; who does not is told, and never that the folder is empty."""
    put(registry, scope, make_adapter())
    last, folder = registry.scan(scope), registry.layout.revision(scope, "v1")
    unlisted: dict[Path, VolumeUnavailable] = {}
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "listdir", errno.EIO, times=EVERY_TRY, when=lambda path: Path(path) == folder)
        assert registry.scan(scope, last, unlisted) is last
        assert list(unlisted) == [folder]
        with pytest.raises(VolumeUnavailable, match="cannot list"):
            registry.scan(scope, last)


def test_a_listing_that_lags_behind_head_is_asked_again(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What HEAD announced and a listing lacks is found soon after it shows, long before the next scan."""
    put(registry, scope, make_adapter(), name="a1")
    clock, shown_at, real = Clock(), 20.0, atomic.list_names
    view = RegistryView(registry, (scope,), scan_s=1e9, lag_s=60.0, clock=clock)
    view.refresh()
    layout = registry.layout
    kept = {at: real(at) for at in (layout.scope(scope), layout.active(scope), layout.revision(scope, "v1"))}
    put(registry, scope, make_adapter("other", seed=1), name="a2")
    registry.announce()
    monkeypatch.setattr(
        atomic, "list_names", lambda at: kept[at] if clock.now < shown_at and at in kept else real(at)
    )
    while names(view) != ["a1", "a2"]:
        view.refresh()
        clock.now += 0.5
        assert clock.now < shown_at + LAG_LOOK_MOST_S + 1
    assert clock.now >= shown_at


@pytest.mark.parametrize(("lag_s", "most"), [(0.0, 1), (60.0, 20)])
def test_head_costs_a_bounded_number_of_looks(
    registry: Registry, scope: Scope, monkeypatch: pytest.MonkeyPatch, lag_s: float, most: int
) -> None:
    """One where listings are fresh; elsewhere some, and none after the lag is over."""
    clock, scans, scan = Clock(), 0, Registry.scan

    def counting(*args: object) -> object:
        nonlocal scans
        scans += 1
        return scan(*args)  # type: ignore[arg-type]

    view = RegistryView(registry, (scope,), scan_s=1e9, lag_s=lag_s, clock=clock)
    monkeypatch.setattr(Registry, "scan", counting)
    registry.announce()
    for _ in range(1000):
        view.refresh()
        clock.now += 0.5
    assert most / 2 < scans <= most


@pytest.mark.parametrize("hint", ["HEAD tells", "a scan finds"])
@pytest.mark.parametrize("links", ["links", "no links"])
@pytest.mark.parametrize("generations", [1, 3])
def test_what_was_removed_by_hand_and_registered_again_is_seen(
    tmp_path: Path,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    generations: int,
    links: str,
    hint: str,
) -> None:
    """`rm -rf` of a model's folder takes nothing away; what is registered in its place is served."""
    if links == "no links":
        without_links(monkeypatch)
    registry = Registry(tmp_path / "removed", create=True)
    put(registry, scope, make_adapter(), revision="v1")
    for _ in range(generations // 2):
        release.unregister(registry, scope, "a1", writer="test")
        put(registry, scope, make_adapter(), revision="v1")
    put(registry, scope, make_adapter(seed=7), revision="v2", name="b1")
    view = RegistryView(registry, (scope,))
    view.refresh()
    key = AdapterKey(*scope, "v1", "a1")
    assert view.desired.records[key].generation == generations
    shutil.rmtree(registry.layout.scope(scope))
    view.refresh(force=True)
    assert names(view) == ["a1", "b1"]
    put(registry, scope, make_adapter(seed=8), revision="v1")
    if hint == "a scan finds":
        registry.layout.head.unlink()
        view.refresh(force=True)
    else:
        view.refresh()
    fresh = RegistryView(registry, (scope,))
    fresh.refresh()
    assert view.desired.records[key] == fresh.desired.records[key]
    assert view.desired.problems == {}
    put(registry, scope, make_adapter(seed=9), revision="v3")
    view.refresh()
    assert {name: record.revision for _, name, record in view.desired.active()} == {"a1": "v3", "b1": "v2"}
    registry.close()


def test_a_pointer_that_was_removed_by_hand_is_written_anew(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView
) -> None:
    """A name whose pointers were removed serves what is registered next, though its numbers begin again."""
    put(registry, scope, make_adapter(seed=1), revision="v2")
    view.refresh()
    shutil.rmtree(registry.layout.scope(scope))
    put(registry, scope, make_adapter(seed=2), revision="v3")
    view.refresh()
    assert {name: record.revision for _, name, record in view.desired.active()} == {"a1": "v3"}


def test_a_listing_that_shows_less_than_there_is_takes_nothing_back(
    registry: Registry, scope: Scope, view: RegistryView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that lists a folder as it was, of a revision whose newest file can be opened."""
    key = AdapterKey(*scope, "v1", "a1")
    release.unregister(registry, scope, "a1", writer="test")
    view.refresh()
    real = atomic.list_names
    newest = generation_name("a1", 2)
    monkeypatch.setattr(
        atomic, "list_names", lambda path: [name for name in real(path) or () if name != newest]
    )
    other_life = view.desired.records[key].model_copy(
        update={"generation": 1, "uid": "0" * 32, "token": "1" * 32}
    )
    record_path(registry, scope, 1).write_bytes(seal(other_life))
    view.refresh(force=True)
    assert view.desired.records[key].generation == 2
    record_path(registry, scope, 2).unlink()
    view.refresh(force=True)
    assert view.desired.records[key].generation == 2, "nothing was listed that is new"
