"""How many revisions of a name stay registered, and which never go."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import OperatorError
from lora_fs.sidecar.model import AdapterKey, Policy, PolicyKind, Quota, Scope, State
from lora_fs.sidecar.registry.format.ids import written_at
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.lifecycle.retention import Revision, beyond
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.maintenance.garbage import What, collect
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from tests.registry.conftest import write_adapter
from tests.registry.test_operations import before_append, put, served

DAY_S = 24 * 3600.0
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
moments = st.integers(0, 5).map(lambda hours: START + datetime.timedelta(hours=hours))
revisions = st.lists(
    st.builds(Revision, st.integers(1, 30).map("v{}".format), st.none() | moments, st.booleans()),
    max_size=12,
    unique_by=lambda one: one.name,
)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00", "2026-01-01T09:00:00+09:00"])
def test_times_of_writers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time without a zone is UTC, wherever it is read; what is no time is none."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    assert written_at(text) == START
    assert written_at("yesterday") is None
    monkeypatch.undo()
    time.tzset()


@given(revisions, st.integers(1, 8))
def test_which_are_too_many(known: list[Revision], keep: int) -> None:
    """Never fewer than ``keep`` stay; what goes is older than all that stay unprotected; unknown is kept."""
    gone = set(beyond(known, keep))
    stay = [one for one in known if one.name not in gone]
    assert len(stay) >= min(keep, len(known))
    assert not any(one.protected or one.at is None for one in known if one.name in gone)
    free = [one.at for one in stay if not one.protected and one.at is not None]
    for one in known:
        if one.name in gone:
            assert one.at is not None
            assert all(one.at <= at for at in free)
    if len(known) > keep:
        assert sum(one.name in gone for one in known) >= len(known) - keep - sum(
            one.protected or one.at is None for one in known
        )


def test_of_one_moment_the_greater_name_is_newer() -> None:
    """v10 after v9, as a restore gives them all one time."""
    known = [Revision(f"v{number}", START) for number in (10, 9, 2, 1)]
    assert beyond(known, 2) == ["v2", "v1"]


def test_one_of_unknown_age_counts_as_the_newest() -> None:
    """It stays, and one fewer of the others does."""
    known = [Revision("v1", START), Revision("v2", START + datetime.timedelta(days=1)), Revision("v3", None)]
    assert beyond(known, 2) == ["v1"]
    assert beyond(known, 1) == ["v2", "v1"]


@pytest.fixture
def many(registry: Registry, scope: Scope, tmp_path: Path) -> list[str]:
    """``a1`` with v1 to v7, registered one after the other two days ago; serves v7, before that v6."""
    for number in range(1, 8):
        put(registry, scope, write_adapter(tmp_path / f"s{number}", number))
    age(registry, scope)
    return [f"v{number}" for number in range(1, 8)]


def age(registry: Registry, scope: Scope) -> None:
    """Make every record two days old, as gc reads it."""
    registry.close()  # its temporary names are links to what is made old here
    then = time.time() - 2 * DAY_S
    for path in registry.layout.scope(scope).glob("*/*.json"):
        os.utime(path, (then, then))


def withdrawn(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey] | None = frozenset()
) -> list[str]:
    """The revisions that gc would withdraw."""
    found = gc.find(registry, scope, in_use, DAY_S)
    return sorted(item.path.parent.name for item in found if item.what is What.REVISION)


def test_nothing_goes_unless_it_is_said(registry: Registry, scope: Scope, many: list[str]) -> None:
    assert withdrawn(registry, scope) == []


def test_what_is_served_tried_pinned_or_in_use_never_goes(
    registry: Registry, scope: Scope, many: list[str]
) -> None:
    """However old it is, and however few are kept. So does what a rollback would bring back."""
    for revision in ("v6", "v2"):
        release.promote(registry, scope, "a1", revision, writer="test")
    release.set_canary(registry, scope, "a1", "v3", 5, writer="test")
    pinned = amend.with_policy(Policy(), {"kind": PolicyKind.PINNED})
    amend.amend(registry, scope, "a1", [pinned], writer="test", revision="v4")
    amend.keep_revisions(registry, scope, "a1", 1, writer="test")
    age(registry, scope)
    key = AdapterKey(*scope, "v5", "a1")
    assert withdrawn(registry, scope, {key}) == ["v1"]
    assert withdrawn(registry, scope, None) == []  # not known what is in use


def test_a_pointer_that_cannot_be_read_keeps_all(registry: Registry, scope: Scope, many: list[str]) -> None:
    """What it names is unknown: replicas that read it before serve that."""
    amend.keep_revisions(registry, scope, "a1", 1, writer="test")
    pointer = release.promote(registry, scope, "a1", "v1", writer="test")
    assert withdrawn(registry, scope) == ["v2", "v3", "v4", "v5", "v6"]
    registry.path(registry.pointers(scope, "a1"), pointer).write_bytes(b"\0" * 64)
    assert withdrawn(registry, scope) == []


def test_gc_withdraws_and_a_day_later_removes(registry: Registry, scope: Scope, many: list[str]) -> None:
    """First the records, with what they will free; their files by the next gc."""
    amend.keep_revisions(registry, scope, "a1", 3, writer="test")
    garbage = gc.find(registry, scope, frozenset(), DAY_S, writer="collector")
    assert [item.path.parent.name for item in garbage] == ["v4", "v3", "v2", "v1"]
    assert all(item.size_bytes > 500 and "keeps 3 revisions" in item.why for item in garbage)
    assert set(release.present_revisions(registry, scope, "a1")) == set(many)  # so far nothing happened
    view = RegistryView(registry, (scope,))
    view.refresh()
    collect(garbage)
    assert view.refresh(), "readers learn of it by HEAD"
    assert set(release.present_revisions(registry, scope, "a1")) == {"v5", "v6", "v7"}
    assert served(registry, scope) == {"a1": "v7"}
    assert gc.find(registry, scope, frozenset(), DAY_S) == []  # tombstones of today
    age(registry, scope)
    later = gc.find(registry, scope, frozenset(), DAY_S)
    assert sorted(item.path.parent.name for item in later) == ["v1", "v2", "v3", "v4"]
    assert [item.size_bytes for item in later] == [item.size_bytes for item in reversed(garbage)]
    collect(later)
    assert not registry.layout.artifact(AdapterKey(*scope, "v1", "a1")).exists()


def test_the_names_own_number_beats_the_namespaces(registry: Registry, scope: Scope, many: list[str]) -> None:
    """The namespace's counts for names that say nothing; a damaged one is not taken for none."""
    quota = Quota(namespace="default", keep_revisions=5, writer="test", updated_at="")
    registry.accounts.write(quota)
    assert withdrawn(registry, scope) == ["v1", "v2"]
    amend.keep_revisions(registry, scope, "a1", 6, writer="test")
    assert withdrawn(registry, scope) == ["v1"]
    registry.layout.quota("default").write_bytes(b"damage")
    with pytest.raises(OperatorError, match="not JSON"):
        gc.find(registry, scope, frozenset(), DAY_S)


def test_what_was_written_today_stays(registry: Registry, scope: Scope, many: list[str]) -> None:
    """A revision whose record changed within ``--older-than`` is left."""
    amend.keep_revisions(registry, scope, "a1", 3, writer="test")
    label = amend.with_labels({"look": "again"})
    amend.amend(registry, scope, "a1", [label], writer="test", revision="v1")
    assert withdrawn(registry, scope) == ["v2", "v3", "v4"]


def test_what_changed_since_the_look_stays(registry: Registry, scope: Scope, many: list[str]) -> None:
    """A revision that somebody pins or promotes after gc found it is never withdrawn."""
    amend.keep_revisions(registry, scope, "a1", 5, writer="test")
    garbage = gc.find(registry, scope, frozenset(), DAY_S)
    assert [item.path.parent.name for item in garbage] == ["v2", "v1"]
    pinned = amend.with_policy(Policy(), {"kind": PolicyKind.PINNED})
    amend.amend(registry, scope, "a1", [pinned], writer="test", revision="v1")
    release.promote(registry, scope, "a1", "v2", writer="test")
    collect(garbage)
    present = release.present_revisions(registry, scope, "a1")
    assert {name: record.generation for name, record in present.items()} == dict.fromkeys(many, 1) | {"v1": 2}


def test_promoted_at_the_last_moment(
    registry: Registry, scope: Scope, many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the tombstone it is left alone; after it the revision is registered again."""
    amend.keep_revisions(registry, scope, "a1", 6, writer="test")
    age(registry, scope)
    [item] = gc.find(registry, scope, frozenset(), DAY_S)

    def promote() -> None:
        release.promote(registry, scope, "a1", "v1", writer="another")

    before_append(monkeypatch, promote, to="Record")
    collect([item])
    assert served(registry, scope) == {"a1": "v1"}
    release.promote(registry, scope, "a1", "v7", writer="test")
    release.promote(registry, scope, "a1", "v6", writer="test")
    age(registry, scope)
    [item] = gc.find(registry, scope, frozenset(), DAY_S)
    real = Registry.append
    announced: list[object] = []

    def append(self: Registry, *args: object, **kwargs: object) -> object:
        body = real(self, *args, **kwargs)  # type: ignore[arg-type]
        if not announced:
            announced.append(body)
            pointers = registry.pointers(scope, "a1")
            real(self, pointers, lambda _: {"revision": "v1"}, writer="another")
        return body

    monkeypatch.setattr(Registry, "append", append)
    collect([item])
    assert served(registry, scope) == {"a1": "v1"}


def test_what_others_withdraw_at_the_last_moment_is_not_registered_again(
    registry: Registry, scope: Scope, many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promotion and a withdrawal overlap: gc sees the pointer of one and the tombstone of the other."""
    amend.keep_revisions(registry, scope, "a1", 6, writer="test")
    age(registry, scope)
    [item] = gc.find(registry, scope, frozenset(), DAY_S)
    series = registry.records(AdapterKey(*scope, "v1", "a1"))

    def overlap() -> None:
        pointers = registry.pointers(scope, "a1")
        registry.append(pointers, lambda _: {"revision": "v1"}, writer="promotes")
        registry.append(series, lambda _: {"state": State.DELETED}, writer="withdraws")

    before_append(monkeypatch, overlap, to="Record")
    collect([item])
    newest = registry.latest(series)[1]
    assert newest is not None
    assert (newest.present, newest.writer) == (False, "withdraws")


def test_a_folders_revisions_are_its_owners(registry: Registry, scope: Scope) -> None:
    """What was dropped is withdrawn by taking the folder away."""
    for number in range(1, 4):
        folder = write_adapter(registry.layout.artifact(AdapterKey(*scope, f"v{number}", "a1")), number)
        put(registry, scope, folder, revision=f"v{number}", origin="folder")
    amend.keep_revisions(registry, scope, "a1", 1, writer="test")
    age(registry, scope)
    assert withdrawn(registry, scope) == []
