"""HEAD tells what was written: a reader then reads that and no more, and is never misled by it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store import head as heads
from lora_fs.sidecar.registry.store.head import (
    READ_BYTES,
    Announcer,
    Head,
    advance_head,
    parse_head,
    raise_floor,
    read_head,
)
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from tests.registry.conftest import Clock, MakeAdapter
from tests.registry.faults import fail
from tests.registry.test_operations import put
from tests.registry.test_view import names


@pytest.fixture
def view(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> RegistryView:
    """One that knows ``a1``."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    return view


def head_of(registry: Registry) -> Head:
    head = parse_head(read_head(registry.layout))
    assert head is not None
    return head


def changed_head(registry: Registry, **fields: Any) -> None:
    """Write HEAD as another writer might."""
    value = unseal(registry.layout.head.read_bytes())
    registry.layout.head.write_bytes(seal({**value, **fields}))


def is_head(handle: int, *_: object) -> bool:
    return os.readlink(f"/proc/self/fd/{handle}").endswith("/HEAD")


def test_a_head_that_stays_stale_is_read_by_a_link(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS opens the file that another mount replaced: no read of that name succeeds. No link is left."""
    advance_head(registry.layout, 1)
    known = head_of(registry)
    with monkeypatch.context() as patch:
        fail(patch, "read", errno.ESTALE, times=1 << 30, when=is_head)
        assert heads.current_head(registry.layout) == known
    assert not [*registry.layout.leases.iterdir()]


def test_a_head_that_stays_stale_for_a_second_is_waited_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a link is no help: longer than a client keeps a name, then it is told."""
    advance_head(registry.layout, 1)
    known, now = head_of(registry), [0.0]

    def sleep(pause_s: float) -> None:
        now[0] += pause_s

    monkeypatch.setattr(time, "sleep", sleep)
    fail(monkeypatch, "link", errno.EPERM, times=1 << 30)
    with monkeypatch.context() as patch:
        fail(patch, "read", errno.ESTALE, times=1 << 30, when=lambda *_: now[0] < 1.0)
        assert heads.current_head(registry.layout) == known
    fail(monkeypatch, "read", errno.ESTALE, times=1 << 30)
    with pytest.raises(VolumeUnavailable, match="Stale"):
        heads.current_head(registry.layout)


def test_what_is_told_is_read_and_nothing_is_listed(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two registrations and a withdrawal between two polls: HEAD, the marker, and each new file once."""
    put(registry, scope, make_adapter("b", seed=1), name="b1")
    put(registry, scope, make_adapter("c", seed=2), name="c1")
    release.unregister(registry, scope, "a1", writer="test")
    registry.close()  # a writer looks at HEAD again a moment later: not while it is counted here
    monkeypatch.setattr(Registry, "scan", pytest.fail)
    opened = fail(monkeypatch, "open", errno.EIO, times=0)
    assert view.refresh()
    assert names(view) == ["b1", "c1"]
    read = sorted(Path(str(args[0])).name for args in opened)
    files = [generation_name(name, number) for name, number in (("a1", 2), ("b1", 1), ("c1", 1))]
    assert read == sorted(["HEAD", "lora-fs.json", *files, *files])
    assert not view.refresh()


def test_another_scopes_changes_cost_no_body(
    registry: Registry, make_adapter: MakeAdapter, view: RegistryView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of scopes that are not served is not read: HEAD is all that it takes."""
    put(registry, Scope("other", "tiny"), make_adapter("b", seed=1), name="b1")
    opened = fail(monkeypatch, "open", errno.EIO, times=0)
    monkeypatch.setattr(Registry, "scan", pytest.fail)
    assert not view.refresh()
    assert {Path(str(args[0])).name for args in opened} == {"HEAD"}


@pytest.mark.parametrize(
    "how", ["gap", "older writer", "not followed", "unknown name", "other epoch", "damaged"]
)
def test_what_head_does_not_tell_is_listed(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView, how: str
) -> None:
    """A HEAD that breaks off, or that a writer without changes made, says look; and looking finds all."""
    before = head_of(registry)
    put(registry, scope, make_adapter("b", seed=1), name="b1")
    told = head_of(registry).changes
    if how == "gap":
        registry.announce()
    elif how == "older writer":  # it knows no changes, and keeps them as it found them
        changed_head(registry, seq=before.seq + 2, nonce="f" * 16, changes=before.model_dump()["changes"])
    elif how == "not followed":
        changed_head(registry, changes=[one.model_dump() for one in told[-1:]])
    elif how == "unknown name":
        files = ["../../etc/passwd"]
        changed_head(registry, changes=[told[-2].model_dump(), {"nonce": told[-1].nonce, "files": files}])
    elif how == "other epoch":
        changed_head(registry, epoch=9)
    else:
        registry.layout.head.write_bytes(b"{")
    assert view.refresh()
    assert names(view) == ["a1", "b1"]


def test_a_told_file_that_cannot_be_read_is_left_to_a_listing(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView
) -> None:
    """It is a problem as any other, and the last good state is in force; the next write settles it."""
    put(registry, scope, make_adapter("b", seed=1), name="a1")
    record = registry.layout.active(scope) / generation_name("a1", 2)
    good = record.read_bytes()
    record.write_text("garbage")
    view.refresh()
    assert [one.revision for _, _, one in view.desired.active()] == ["v1"]
    assert list(view.desired.problems) == [str(record)]
    record.write_bytes(good)
    release.rollback(registry, scope, "a1", writer="test")
    view.refresh()
    assert view.desired.problems == {}


def test_a_listing_that_lacks_what_was_told_withdraws_and_freezes_nothing(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On NFS a listing may lack for a minute what HEAD told of; longer, and it has vanished."""
    layout, clock = registry.layout, Clock()
    view = RegistryView(registry, (scope,), lag_s=60.0, clock=clock)
    view.refresh()
    real, folder = atomic.list_names, layout.revision(scope, "v1")
    kept = {at: real(at) or [] for at in (folder, layout.active(scope))}
    for index in range(12):
        put(registry, scope, make_adapter(f"b{index}", seed=index), name=f"b{index:02d}")
        view.refresh()
    assert len(names(view)) == 13
    monkeypatch.setattr(atomic, "list_names", lambda at: kept.get(at) or real(at))
    for after_s, frozen in ((0.0, False), (61.0, True)):
        clock.now += after_s
        kept[folder] = [*kept[folder], "another"]
        view.refresh(force=True)
        assert len(names(view)) == 13
        assert (view.desired.frozen is not None) is frozen


def test_a_change_that_another_writer_replaced_is_told_again(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two writers replace the same HEAD, one after the other: the first looks again and adds its own."""
    put(registry, scope, make_adapter())
    other = Registry(registry.layout.root)
    view = RegistryView(Registry(registry.layout.root), (scope,))
    view.refresh()
    seen = read_head(registry.layout)
    put(registry, scope, make_adapter("b", seed=1), name="b1")
    with monkeypatch.context() as patch:
        patch.setattr(heads, "read_head", lambda _: seen)
        put(other, scope, make_adapter("c", seed=2), name="c1")
    monkeypatch.setattr(Registry, "scan", pytest.fail)
    view.refresh()
    assert names(view) == ["a1", "c1"]
    for one in (registry, other):
        one.close()
    assert view.refresh()
    assert names(view) == ["a1", "b1", "c1"]
    told = head_of(registry)
    registry.close()
    assert head_of(registry) == told


def test_what_is_not_told_any_more_was_not_lost(registry: Registry, tmp_path: Path) -> None:
    """After many other writes one's own has left HEAD: that is no reason to tell it again."""
    clock = Clock()
    announcer = Announcer(registry.layout, clock)
    announcer.note(registry.layout.root / "default/tiny/v1/a1.@00000001.json")
    announcer.announce(1)
    for number in range(200):
        advance_head(registry.layout, 1, (f"default/tiny/v1/b{number}.@00000001.json",))
    clock.now += 1
    before = head_of(registry)
    announcer.check()
    assert head_of(registry) == before


def test_head_stays_small(registry: Registry) -> None:
    """However long the names are and however many were written: old changes leave, else it says look."""
    layout, long = registry.layout, "n" * 128
    for number in range(60):
        advance_head(layout, 1, (f"{long}/{long}/{long}/{long}.@{number + 1:08d}.json",) * 2)
        data = read_head(layout)
        assert data is not None
        assert len(data) <= READ_BYTES
        assert head_of(registry).seq == number + 1
    assert head_of(registry).told()
    advance_head(layout, 1, (f"{long}/{long}/{long}/{long}.@00000001.json",) * 30)
    assert not head_of(registry).told()


def test_a_head_that_cannot_be_read_keeps_what_only_it_says(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EIO is no absent HEAD: it is not made anew, and no freed number is given to a new adapter."""
    put(registry, scope, make_adapter())
    raise_floor(registry.layout, 1, seq=2, first=7)
    before = head_of(registry)
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.EIO, times=1 << 30, when=lambda path, *_, **__: Path(path).name == "HEAD")
        with pytest.raises(VolumeUnavailable):
            advance_head(registry.layout, 1)
        with pytest.raises(VolumeUnavailable):
            put(registry, scope, make_adapter("b", seed=1), name="b1")
    assert head_of(registry) == before
    assert put(registry, scope, make_adapter("b", seed=1), name="b1").record.generation == 7


def test_a_reader_of_many_changes_misses_none(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, view: RegistryView
) -> None:
    """Also of more than HEAD holds."""
    for number in range(40):
        put(registry, scope, make_adapter(f"b{number}", seed=number), name=f"b{number}")
    assert view.refresh()
    assert len(names(view)) == 41


def test_a_retry_announces_what_a_dead_writer_left(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed before its HEAD; the same registration again writes nothing and is seen all the same."""
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "announce", lambda _: None)
        put(Registry(registry.layout.root), scope, make_adapter("b", seed=1), name="b1")
    view.refresh()
    assert names(view) == ["a1"]
    monkeypatch.setattr(Registry, "scan", pytest.fail)
    assert not put(registry, scope, make_adapter("b", seed=1), name="b1").changed
    assert view.refresh()
    assert names(view) == ["a1", "b1"]


@pytest.mark.parametrize("act", ["promote", "canary"])
def test_a_revision_that_a_dead_writer_left_is_announced_with_its_name(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
    act: str,
) -> None:
    """Its writer was killed before its HEAD. Who lets the name serve or try it announces both: a reader that
    learned the pointer alone would serve nothing by the name."""
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "announce", lambda _: None)
        put(Registry(registry.layout.root), scope, make_adapter("b", seed=1), name="a1", activate=False)
    view.refresh()
    monkeypatch.setattr(Registry, "scan", pytest.fail)
    if act == "promote":
        release.promote(registry, scope, "a1", "v2", writer="test")
    else:
        release.set_canary(registry, scope, "a1", "v2", 5, writer="test")
    view.refresh()
    assert view.desired.records[AdapterKey(*scope, "v2", "a1")].present
    assert names(view) == ["a1"]


def test_a_pointer_to_what_is_not_known_is_looked_up(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where HEAD tells of a pointer alone, and its revision was not announced, the reader lists the tree."""
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "announce", lambda _: None)
        put(Registry(registry.layout.root), scope, make_adapter("b", seed=1), name="a1", activate=False)
    view.refresh()
    monkeypatch.setattr(Registry, "confirm", lambda *_: None)  # as an earlier version promotes
    release.promote(registry, scope, "a1", "v2", writer="test")
    view.refresh()
    assert names(view) == ["a1"]


def test_folders_that_are_named_are_listed_alone(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    view: RegistryView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A revision that a notification is of; its parent, where a revision is new; another scope's, never."""
    layout, listed = registry.layout, list[Path]()
    real = atomic.list_names

    def counted(at: Path) -> list[str] | None:
        listed.append(at)
        return real(at)

    monkeypatch.setattr(atomic, "list_names", counted)
    (layout.revision(scope, "v1") / "dropped").mkdir()
    view.refresh(folders={layout.revision(scope, "v1")})
    assert listed == [layout.revision(scope, "v1")]
    assert "dropped" in view.desired.listings[scope].revisions["v1"].folders
    (layout.revision(scope, "v2") / "dropped").mkdir(parents=True)
    view.refresh(folders={layout.scope(scope)})
    assert "dropped" in view.desired.listings[scope].revisions["v2"].folders
    listed.clear()
    view.refresh(folders={layout.scope(Scope("other", "tiny"))})
    assert listed == []


def test_one_change_copies_its_own_scope_alone(registry: Registry, make_adapter: MakeAdapter) -> None:
    """The rest of the state is shared with the one before it, object by object."""
    scopes = tuple(Scope(f"t{number}", "tiny") for number in range(3))
    for number, scope in enumerate(scopes):
        put(registry, scope, make_adapter(f"s{number}", seed=number))
    view = RegistryView(registry, scopes)
    view.refresh()
    before = view.desired
    put(registry, scopes[1], make_adapter("b", seed=9), name="b1")
    view.refresh()
    for scope in scopes:
        same = view.desired.records_of(scope) is before.records_of(scope)
        assert same is (scope != scopes[1])
    assert AdapterKey(*scopes[1], "v1", "b1") in view.desired.records
    assert AdapterKey(*scopes[1], "v1", "b1") not in before.records
    assert dict(view.desired.records) == {key: view.desired.records[key] for key in view.desired.records}
    assert len(view.desired.records) == len(list(view.desired.records.values())) == 4
