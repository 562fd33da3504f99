"""Volumes without link(): unique names, the greatest (generation, token) wins, siblings are shown."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import Conflict, RegistryLost
from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.registry.format.layout import generation_name, parse_generation
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from tests.registry.conftest import MakeAdapter
from tests.registry.faults import copy_instead, without_links
from tests.registry.test_operations import put, served


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    without_links(monkeypatch)
    opened = Registry(tmp_path / "root", create=True)
    yield opened
    opened.close()


def test_links_that_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where link() succeeds and copies, the tier is lww; nothing of the probe stays."""
    monkeypatch.setattr(os, "link", copy_instead)
    assert marker.create(tmp_path).marker.tier == "lww"
    assert not list(tmp_path.glob(".tmp*"))


def test_links_whose_names_have_numbers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each name has an inode number of its own, as on sshfs, a write that both names show decides."""
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    assert marker.find_tier(tmp_path) == "cas"
    monkeypatch.setattr(os, "link", copy_instead)
    assert marker.find_tier(tmp_path) == "lww"


def test_links_whose_names_all_have_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all files have one inode number, a copy still does not count as a second name."""
    monkeypatch.setattr(os.path, "samestat", lambda *_: True)
    assert marker.find_tier(tmp_path) == "cas"
    monkeypatch.setattr(os, "link", copy_instead)
    assert marker.find_tier(tmp_path) == "lww"


def siblings(registry: Registry, monkeypatch: pytest.MonkeyPatch, scope: Scope) -> list[Record]:
    """Two writers that saw the same newest generation, as without a lease they may."""
    series = registry.records(AdapterKey(*scope, "v1", "a1"))
    seen = registry.latest(series)
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "latest", lambda *_: seen)
        return [registry.append(series, lambda _: {}, writer=name) for name in ("one", "two")]


def test_a_registry_without_links_says_so(registry: Registry) -> None:
    """The probe at creation finds out, and the marker tells every later reader and writer."""
    assert registry.marker.tier == "lww"
    assert Registry(registry.layout.root).marker.tier == "lww"


@pytest.mark.parametrize("killed", [True, False])
def test_an_init_that_was_killed(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Its marker has a name and no bytes: the next one completes it, unless records were written since."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    root = registry.layout.root
    if not killed:
        put(registry, scope, make_adapter())
    registry.layout.marker.write_bytes(b"")
    with pytest.raises(
        RegistryLost, match=r"it is empty; if `lora-fs init` or .* was killed here, call it again"
    ):
        Registry(root)
    if killed:
        completed = marker.create(root)
        assert completed.made
        assert marker.create(root) == (completed.marker, False)
        registry.layout.marker.write_bytes(b"")  # as another one that completes it at the same time saw it
        assert marker.create(root) == completed
        put(Registry(root), scope, make_adapter())
    else:
        with pytest.raises(RegistryLost, match="from a backup"):
            marker.create(root)
        assert registry.layout.marker.read_bytes() == b""


def test_an_init_under_way_is_awaited(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marker gets its bytes after its name: another one that sees it empty does not complete it."""
    written, path = registry.layout.marker.read_bytes(), registry.layout.marker
    path.write_bytes(b"")
    monkeypatch.setattr("time.sleep", lambda _: path.write_bytes(written))
    assert marker.create(registry.layout.root) == (registry.marker, False)


def test_an_import_that_was_killed_is_not_made_a_registry_by_init(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marker is empty, too. HEAD comes after that: what it put there is another registry's."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    registry.layout.marker.write_bytes(b"")
    registry.layout.head.unlink()
    with pytest.raises(RegistryLost, match="import archive` was killed"):
        marker.create(registry.layout.root)


def test_names_are_unique(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Register, promote, roll back and unregister work, and every name carries its writer's token."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    release.rollback(registry, scope, "a1", writer="test")
    assert served(registry, scope) == {"a1": "v1"}
    parsed = [parse_generation(name) for name in os.listdir(registry.layout.active(scope))]
    assert sorted(p[1].generation for p in parsed if p and p[1].token) == [1, 2, 3]
    release.unregister(registry, scope, "a1", writer="test", all_revisions=True)
    assert served(registry, scope) == {}


def test_names_that_the_volume_takes_for_one(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that differs from another by case alone gets none of its files, so gc removes none of them."""
    put(registry, scope, make_adapter())
    registry.layout.artifact(AdapterKey(*scope, "v1", "A1")).symlink_to("a1")  # as such a volume finds it
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [name for name in real(folder) if name != "A1"])
    with pytest.raises(Conflict, match="upper or lower"):
        put(registry, scope, make_adapter(), name="A1")
    assert served(registry, scope) == {"a1": "v1"}


def test_a_conditional_write_is_refused(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """``expect`` cannot be promised here, so it is refused and nothing is written."""
    put(registry, scope, make_adapter())
    series = registry.records(AdapterKey(*scope, "v1", "a1"))
    with pytest.raises(Conflict, match="no hard links"):
        registry.append(series, lambda _: {}, writer="test", expect=1)
    assert registry.latest(series)[0].generation == 1


def test_the_greatest_token_wins_in_every_reader(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two writers of one generation every view and every writer takes the same one."""
    put(registry, scope, make_adapter())
    early = RegistryView(registry, (scope,))
    early.refresh()
    written = siblings(registry, monkeypatch, scope)
    key, winner = written[0].key, max(record.token for record in written)
    assert {record.generation for record in written} == {2}
    late = RegistryView(registry, (scope,))
    for view in (early, late):
        view.refresh()
        assert view.desired.records[key].token == winner
    newest = registry.latest(registry.records(key))[1]
    assert newest is not None
    assert newest.token == winner


def test_siblings_are_kept_and_shown_until_the_next_write(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators are told of the conflict once, without a re-reading of the tree; a write settles it."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    siblings(registry, monkeypatch, scope)
    view.refresh()
    (problem,) = view.desired.problems.values()
    assert "2 writers published the same generation of a1" in problem
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "scan", pytest.fail)
        assert not view.refresh()
    registry.append(registry.records(AdapterKey(*scope, "v1", "a1")), lambda _: {}, writer="third")
    view.refresh()
    assert view.desired.problems == {}
    assert len([n for n in os.listdir(registry.layout.revision(scope, "v1")) if ".@00000002." in n]) == 2


def test_two_writers_at_once_converge(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """After 40 promotions by two threads every view serves the same revision."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    views = [RegistryView(registry, (scope,)) for _ in range(3)]

    def write(first: int) -> None:
        for turn in range(20):
            release.promote(registry, scope, "a1", f"v{1 + (turn + first) % 2}", writer=str(first))
            views[first].refresh(force=True)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for view in views:
        view.refresh(force=True)
    pointers = [view.desired.pointers[scope, "a1"] for view in views]
    assert len({pointer.token for pointer in pointers}) == 1
    assert pointers[0] == release.active(registry, scope, "a1")


def test_withdrawn_artifacts_are_found(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """The tombstone's name carries a token; gc finds it all the same."""
    put(registry, scope, make_adapter())
    release.unregister(registry, scope, "a1", writer="test")
    (item,) = gc.find(registry, scope, set(), 0)
    assert item.path == registry.layout.artifact(AdapterKey(*scope, "v1", "a1"))


def test_a_copied_sibling_is_nobodys(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """A file whose name carries another token than its body is damage, not a vote."""
    put(registry, scope, make_adapter())
    folder = registry.layout.revision(scope, "v1")
    (record,) = folder.glob("a1.@*.json")
    (folder / f"a1.@00000001.{'f' * 32}.json").write_bytes(record.read_bytes())
    view = RegistryView(registry, (scope,))
    view.refresh()
    assert any("another writer's" in problem for problem in view.desired.problems.values())
    assert served(registry, scope) == {"a1": "v1"}


@pytest.mark.parametrize("greater_first", [True, False])
def test_a_sibling_that_shows_late(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    greater_first: bool,
) -> None:
    """Whichever of two a view saw first, it ends with the greater token."""
    put(registry, scope, make_adapter())
    lesser, greater = sorted(siblings(registry, monkeypatch, scope), key=lambda record: record.token)
    late = lesser if greater_first else greater
    folder = registry.layout.revision(scope, "v1")
    path = folder / generation_name("a1", 2, late.token)
    path.rename(registry.layout.root / "late")
    view = RegistryView(registry, (scope,))
    view.refresh()
    assert view.desired.records[late.key] == (greater if greater_first else lesser)
    (registry.layout.root / "late").rename(path)
    view.refresh(force=True)
    assert view.desired.records[late.key] == greater
    assert "siblings" in str(view.desired.problems)
