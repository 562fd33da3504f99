"""What fsck finds, what it mends, and what it leaves to a person because it would have to guess."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.model import AdapterKey, Record, Scope, State
from lora_fs.sidecar.registry.format.ids import int_id, new_ids
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import artifacts, release
from lora_fs.sidecar.registry.maintenance import fsck, gc, survey
from lora_fs.sidecar.registry.maintenance.fsck import Finding, Kind
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.maintenance.repair import mend
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.faults import before_the_record, fail
from tests.registry.test_lock import left_by_another_host
from tests.registry.test_operations import put, served

Lease = Callable[..., AbstractContextManager[bool]]
V1 = AdapterKey("default", "tiny", "v1", "a1")
V2 = AdapterKey("default", "tiny", "v2", "a1")


@pytest.fixture(autouse=True)
def _swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers remove their temporary names at once."""
    monkeypatch.setattr(atomic, "UNLINK_AFTER_S", 0.0)


@pytest.fixture
def two(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> Registry:
    """a1 with v1 and v2, which it serves; the sources are gone, so nothing can be copied anew."""
    for seed in (0, 1):
        source = make_adapter(f"source-{seed}", seed)
        put(registry, scope, source)
        shutil.rmtree(source)
    return registry


def look(registry: Registry, *, older_than_s: float = 0.0, hash_files: bool = True) -> list[Finding]:
    registry.close()
    return list(fsck.find(registry, survey.look(registry), older_than_s=older_than_s, hash_files=hash_files))


def kinds(registry: Registry) -> list[str]:
    return sorted(finding.kind.value for finding in look(registry))


def repair(registry: Registry) -> dict[Kind, str | None]:
    """Mend everything; the last outcome of each kind."""
    registry.close()
    state = survey.look(registry)
    found = fsck.find(registry, state, older_than_s=0.0, hash_files=True)
    mended = mend(registry, state, list(found), Expectation(), writer="test")
    return {finding.kind: outcome for finding, outcome in mended}


def newest(registry: Registry, key: AdapterKey) -> Path:
    generation, _ = registry.latest(registry.records(key))
    return registry.layout.revision(key.scope, key.revision) / generation_name(key.name, *generation)


def test_a_sound_registry_has_no_findings(two: Registry, scope: Scope) -> None:
    """Tombstones, several revisions and another tenant are nothing wrong."""
    release.unregister(two, scope, "a1", writer="test", revision="v1")
    assert look(two) == []


def test_a_damaged_record_that_is_served_is_said_anew(two: Registry, scope: Scope) -> None:
    """The name serves it still, so it was not withdrawn: all readers agree again, on the same bytes."""
    two.append(two.records(V2), lambda _: {"keep_files": True}, writer="test")
    newest(two, V2).write_bytes(b"\0" * 100)
    assert kinds(two) == ["unreadable"]
    assert repair(two) == {Kind.UNREADABLE: None}
    assert look(two) == []
    record = two.latest(two.records(V2))[1]
    assert record is not None
    assert (record.generation, record.present) == (3, True)
    assert served(two, scope) == {"a1": "v2"}


def test_a_damaged_tombstone_is_not_guessed(two: Registry, scope: Scope) -> None:
    """A revision that its name does not serve may have been withdrawn: nothing is written."""
    release.unregister(two, scope, "a1", writer="test", revision="v1")
    newest(two, V1).write_bytes(b"")
    before = sorted(path.name for path in two.layout.revision(scope, "v1").iterdir())
    (finding,) = look(two)
    assert (finding.kind, finding.mend) == (Kind.UNREADABLE, "")
    assert "lora-fs register" in finding.text
    assert repair(two) == {Kind.UNREADABLE: "it takes a person"}
    assert sorted(path.name for path in two.layout.revision(scope, "v1").iterdir()) == before


def test_a_damaged_pointer_is_not_guessed_and_a_promote_settles_it(two: Registry, scope: Scope) -> None:
    """What a name was to serve takes a person, whose promote is written even if nothing moves by it."""
    release.promote(two, scope, "a1", "v1", writer="test")
    path = two.layout.active(scope) / generation_name("a1", 3)
    path.write_text("garbage")
    (finding,) = look(two)
    assert "lora-fs promote a1" in finding.text
    assert repair(two) == {Kind.UNREADABLE: "it takes a person"}
    release.promote(two, scope, "a1", "v2", writer="test")
    assert look(two) == []
    assert served(two, scope) == {"a1": "v2"}


def test_registering_again_settles_a_damaged_record(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """The same bytes registered over a newer generation that is damaged are written anew above it."""
    source = make_adapter()
    put(registry, scope, source)
    registry.append(registry.records(V1), lambda _: {"state": State.DELETED}, writer="test")
    newest(registry, V1).write_bytes(b"{}")
    put(registry, scope, source)
    assert look(registry) == []
    assert served(registry, scope) == {"a1": "v1"}


@pytest.mark.parametrize("key", [V1, V2], ids=["another revision", "the served one"])
def test_a_newer_versions_record_is_left_alone(two: Registry, key: AdapterKey) -> None:
    """It is told, with what to do, and no generation is written over what this version cannot read."""
    path = newest(two, key)
    body = json.loads(path.read_bytes()) | {"apiVersion": "lora-fs/v9"}
    (path.parent / generation_name("a1", 2)).write_bytes(seal(body))
    (finding,) = look(two)
    assert (finding.kind, finding.mend) == (Kind.UNREADABLE, "")
    assert "upgrade" in finding.text
    assert repair(two) == {Kind.UNREADABLE: "it takes a person"}


def test_siblings_are_settled(tmp_path: Path, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Where link() is missing, two that published one generation are followed by what is in force."""
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "link", 1, times=1 << 30)
        registry = Registry(tmp_path / "root", create=True)
    put(registry, scope, make_adapter())
    (path,) = registry.layout.active(scope).iterdir()
    pointer = registry.latest(registry.pointers(scope, "a1"))[1]
    assert pointer is not None
    other = pointer.model_copy(update={"token": "f" * 32})
    path.with_name(generation_name("a1", 1, "f" * 32)).write_bytes(seal(other))
    assert kinds(registry) == ["siblings"]
    assert repair(registry) == {Kind.SIBLINGS: None}
    assert look(registry) == []
    assert served(registry, scope) == {"a1": "v1"}


@pytest.mark.parametrize("harm", ["gone", "one file gone", "other bytes", "short"])
def test_files_are_taken_from_the_same_bytes_elsewhere(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, harm: str
) -> None:
    """From another adapter with the same digest, or from the folder that was registered."""
    source = make_adapter()
    put(registry, scope, source)
    put(registry, scope, source, name="twin")
    shutil.rmtree(source)
    _harm(registry.layout.artifact(V1), harm)
    assert kinds(registry) == ["no-files" if harm == "gone" else "bad-files"]
    assert list(repair(registry).values()) == [None]
    assert look(registry) == []


def _harm(folder: Path, harm: str) -> None:
    weights = folder / "adapter_model.safetensors"
    if harm == "gone":
        shutil.rmtree(folder)
    elif harm == "one file gone":
        (folder / "adapter_config.json").unlink()
    else:
        size = weights.stat().st_size
        weights.write_bytes(bytes(size) if harm == "other bytes" else b"")


def test_files_are_taken_from_the_source(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """While it is there and holds the bytes that were registered."""
    source = make_adapter()
    put(registry, scope, source)
    shutil.rmtree(registry.layout.artifact(V1))
    assert repair(registry) == {Kind.NO_FILES: None}
    assert look(registry) == []


def test_files_that_are_nowhere_are_told(two: Registry, scope: Scope) -> None:
    """The record stays: an import that has the bytes mends it, or a person withdraws it."""
    shutil.rmtree(two.layout.artifact(V1))
    (outcome,) = repair(two).values()
    assert outcome is not None
    assert "import an export" in outcome
    assert kinds(two) == ["no-files"]
    assert served(two, scope) == {"a1": "v2"}


@pytest.mark.parametrize(
    "uri", ["file:///a%00b", "file://[::1", "file:///" + "x" * 9000], ids=["NUL", "host", "long"]
)
def test_a_source_that_is_no_path_is_told(two: Registry, uri: str) -> None:
    """Other software wrote it. The other findings are mended."""
    record = two.latest(two.records(V1))[1]
    assert record is not None
    spec = record.spec.model_dump(mode="json")
    two.append(two.records(V1), lambda _: {"spec": {**spec, "source": {"uri": uri}}}, writer="other")
    shutil.rmtree(two.layout.artifact(V1))
    two.layout.head.unlink()
    outcomes = repair(two)
    assert outcomes[Kind.NO_FILES]
    assert outcomes[Kind.HEAD] is None


def test_sizes_alone_when_asked(two: Registry) -> None:
    """Without reading files, other bytes of the same length pass and a short file does not."""
    weights = two.layout.artifact(V1) / "adapter_model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(bytes(size))
    assert look(two, hash_files=False) == []
    weights.write_bytes(b"")
    assert [finding.kind for finding in look(two, hash_files=False)] == [Kind.BAD_FILES]


def test_a_link_in_place_of_a_file_is_bad(two: Registry, tmp_path: Path) -> None:
    """A symlink where a served file belongs is never followed."""
    weights = two.layout.artifact(V1) / "adapter_model.safetensors"
    weights.rename(tmp_path / "w")
    weights.symlink_to(tmp_path / "w")
    assert kinds(two) == ["bad-files"]


def test_an_unregistered_folder_is_adopted(two: Registry, scope: Scope) -> None:
    """As a sidecar would: as a drop, with its name pointed there if it serves nothing."""
    write_adapter(two.layout.artifact(AdapterKey(*scope, "v1", "b1")), seed=5)
    assert kinds(two) == ["no-record"]
    assert repair(two) == {Kind.NO_RECORD: None}
    assert served(two, scope) == {"a1": "v2", "b1": "v1"}
    record = two.latest(two.records(AdapterKey(*scope, "v1", "b1")))[1]
    assert record is not None
    assert record.origin == "folder"


def test_a_copy_without_a_record_is_removed_not_adopted(
    two: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Its register ended before the record: what it asked for beside the bytes is not known."""
    with before_the_record():
        put(two, scope, make_adapter("third", 2), activate=False)
    assert look(two, older_than_s=3600.0) == []
    assert kinds(two) == ["half-upload"]
    assert repair(two) == {Kind.HALF: None}
    assert served(two, scope) == {"a1": "v2"}
    assert not two.layout.artifact(AdapterKey(*scope, "v3", "a1")).exists()


def test_a_copy_that_is_registered_meanwhile_is_left_alone(
    two: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Between the look and the mend the same register came again."""
    with before_the_record():
        put(two, scope, make_adapter("third", 2))
    state, found = survey.look(two), look(two)
    put(two, scope, make_adapter("third", 2))
    list(mend(two, state, found, Expectation(), writer="test"))
    assert served(two, scope) == {"a1": "v3"}
    assert look(two) == []


def in_the_way(path: Path, how: str) -> None:
    path.unlink()
    if how == "symlink":
        path.symlink_to("/dev/null")
    elif how == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("how", ["symlink", "fifo", "folder"])
@pytest.mark.parametrize("pointer", [False, True], ids=["record", "pointer"])
def test_what_is_no_file_is_unreadable(two: Registry, scope: Scope, how: str, pointer: bool) -> None:
    """Under the name of a record or a pointer: told by its path, and all else is looked at as well."""
    path = two.layout.active(scope) / generation_name("a1", 2) if pointer else newest(two, V1)
    in_the_way(path, how)
    (two.layout.root / ".tmp-left").touch()
    found = {finding.kind: finding for finding in look(two)}
    assert found.keys() == {Kind.UNREADABLE, Kind.HALF}
    assert found[Kind.UNREADABLE].path == path


@pytest.mark.parametrize("what", ["record", "pointer"])
def test_what_cannot_be_opened_is_unknown(
    two: Registry, scope: Scope, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its own finding, that nothing follows from: a name that serves it is not said to dangle."""
    path = newest(two, V2) if what == "record" else two.layout.active(scope) / generation_name("a1", 2)
    (two.layout.root / ".tmp-left").touch()
    fail(monkeypatch, "open", errno.EACCES, times=1 << 30, when=lambda name, *_, **__: str(name) == str(path))
    found = {finding.kind: finding for finding in look(two)}
    assert found.keys() == {Kind.UNKNOWN, Kind.HALF}
    assert found[Kind.UNKNOWN].path == path
    assert "permission denied" in found[Kind.UNKNOWN].text


@pytest.mark.parametrize("what", ["namespace", "scope", "revision", ".active", ".incoming", ".leases"])
def test_a_folder_that_cannot_be_listed_is_unknown(
    two: Registry, scope: Scope, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One finding for it, and the rest is looked at: here another tenant's lost files."""
    layout = two.layout
    put(two, Scope("other", "tiny"), layout.artifact(V1), name="b1")
    lost = layout.artifact(AdapterKey("other", "tiny", "v1", "b1"))
    shutil.rmtree(lost)
    folders = {"namespace": layout.root / "default", "scope": layout.scope(scope)}
    folders |= {"revision": layout.revision(scope, "v2"), ".active": layout.active(scope)}
    folders |= {".incoming": layout.incoming(scope), ".leases": layout.leases}
    is_it = {str(folders[what])}
    fail(monkeypatch, "listdir", errno.EACCES, times=1 << 30, when=lambda name: str(name) in is_it)
    found = look(two)
    assert {(one.kind, one.path) for one in found} == {
        (Kind.UNKNOWN, folders[what]),
        (Kind.NO_FILES, lost),
    }


def test_a_damaged_quota_is_told(two: Registry) -> None:
    """Until it is written anew nothing is registered in its namespace, though all its adapters are sound."""
    two.layout.quota("default").write_text("{}")
    (finding,) = look(two)
    assert (finding.kind, finding.path) == (Kind.QUOTA, two.layout.quota("default"))
    assert "lora-fs quota" in finding.text
    assert repair(two) == {Kind.QUOTA: "it takes a person"}


def test_a_registry_that_a_newer_one_writes_is_told(two: Registry) -> None:
    """It reads well, and every write would be refused."""
    marker = two.marker.model_copy(update={"min_writer": 2})
    two.layout.marker.write_bytes(seal(marker))
    (finding,) = look(two)
    assert (finding.kind, finding.path) == (Kind.MARKER, two.layout.marker)
    assert "writer of format 2" in finding.text


def test_a_folder_that_cannot_be_served_is_told_and_stays(two: Registry, scope: Scope) -> None:
    """Nothing that may be somebody's is removed."""
    folder = two.layout.artifact(AdapterKey(*scope, "v1", "b1"))
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (outcome,) = repair(two).values()
    assert outcome is not None
    assert "adapter_config.json" in outcome
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_file_beside_adapters_is_no_adapter(two: Registry, scope: Scope) -> None:
    """Notes and checksums are people's own: nothing is wrong with them, and nothing adopts them."""
    folder = two.layout.revision(scope, "v1")
    (folder / "README.md").write_text("what v1 is")
    (folder / "SHA256SUMS").write_text("x")
    assert kinds(two) == []
    (folder / "b1").symlink_to(folder / "gone")
    assert kinds(two) == ["no-record"]


def test_what_is_young_is_passed_over(two: Registry, scope: Scope) -> None:
    """A folder being dropped and a copy under way are nobody's leftovers yet."""
    write_adapter(two.layout.artifact(AdapterKey(*scope, "v1", "b1")))
    make_folder(two.layout.incoming(scope))
    write_adapter(artifacts.new_draft(two.layout, scope))
    assert look(two, older_than_s=3600) == []
    assert [finding.kind for finding in look(two)] == [Kind.NO_RECORD, Kind.HALF]


def test_equal_ids_are_told_apart(two: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """A record that was copied by hand shares an id: the one whose id it is keeps it."""
    put(two, scope, make_adapter("b", seed=7), name="b1")
    key = AdapterKey(*scope, "v1", "b1")
    first = two.latest(two.records(V1))[1]
    assert first is not None

    def copied(record: Record | None) -> dict[str, Any]:
        assert record is not None
        return {"spec": {**record.spec.model_dump(mode="json"), "int_id": first.spec.int_id}}

    two.append(two.records(key), copied, writer="by hand")
    assert kinds(two) == ["same-id"]
    assert repair(two) == {Kind.SAME_ID: None}
    assert look(two) == []
    again = two.latest(two.records(V1))[1], two.latest(two.records(key))[1]
    assert again[0] == first
    assert again[1] is not None
    assert again[1].spec.int_id == int_id(two.marker.registry_uuid, key, again[1].spec.digest)


def test_ids_that_collide_by_the_formula_differ_afterwards(two: Registry) -> None:
    """Were two ids equal by chance, or three, the decision ends with all different."""
    records = survey.look(two).records
    one = records[V1]
    same = {
        AdapterKey("default", "tiny", "v1", f"n{number}"): one.model_copy(update={"name": f"n{number}"})
        for number in range(5)
    }
    ids = new_ids(same, two.marker.registry_uuid)
    after = [ids.get(key, record.spec.int_id) for key, record in same.items()]
    assert len(set(after)) == 5
    assert all(1 <= identity < 2**63 for identity in after)


def test_a_name_that_serves_nothing_registered_is_told(two: Registry, scope: Scope) -> None:
    """Which revision it is to serve instead is a person's to say."""
    gone = {"state": State.DELETED}
    two.append(two.records(V2), lambda _: gone, writer="by hand")
    assert kinds(two) == ["dangling"]
    assert repair(two) == {Kind.DANGLING: "it takes a person"}


def test_leftovers_go(two: Registry, scope: Scope) -> None:
    """Temporary names and half copies, wherever writers leave them."""
    make_folder(two.layout.incoming(scope))
    write_adapter(artifacts.new_draft(two.layout, scope))
    (two.layout.revision(scope, "v1") / ".tmp-x").touch()
    (two.layout.root / ".tmp-y").touch()
    two.close()
    assert kinds(two) == ["half-upload"] * 3
    repair(two)
    assert look(two) == []


def test_a_lost_head_is_made_anew(two: Registry) -> None:
    """Missing or damaged; readers then look at once again."""
    for content in (None, b"garbage"):
        two.layout.head.unlink()
        if content is not None:
            two.layout.head.write_bytes(content)
        assert kinds(two) == ["head"]
        assert repair(two) == {Kind.HEAD: None}
        assert look(two) == []


def test_an_unreadable_report_is_told(two: Registry) -> None:
    """It keeps every file from gc until a person has looked."""
    (two.layout.replicas / "a.json").write_text("garbage")
    assert repair(two) == {Kind.REPORT: "it takes a person"}


def test_what_changed_meanwhile_is_left_alone(two: Registry, scope: Scope) -> None:
    """A mend that finds another state than the one it was decided on writes nothing."""
    two.append(two.records(V2), lambda _: {"keep_files": True}, writer="test")
    newest(two, V2).write_bytes(b"")
    state = survey.look(two)
    found = list(fsck.find(two, state, older_than_s=0.0, hash_files=False))
    release.unregister(two, scope, "a1", writer="test", all_revisions=True)
    mended = mend(two, state, found, Expectation(), writer="test")
    assert ["meanwhile" in (outcome or "") for _, outcome in mended] == [True]
    assert served(two, scope) == {}


def test_nothing_is_changed_without_repair(two: Registry, scope: Scope) -> None:
    """Looking writes nothing at all, not even HEAD."""
    shutil.rmtree(two.layout.artifact(V1))
    (two.layout.root / ".tmp-y").touch()
    two.layout.head.unlink()
    before = {path: path.stat().st_mtime_ns for path in two.layout.root.rglob("*")}
    assert len(look(two)) == 3
    assert {path: path.stat().st_mtime_ns for path in two.layout.root.rglob("*")} == before


def test_files_that_cannot_be_read_are_unknown(two: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error is no bad checksum: it is told as what it is, and nothing is mended."""
    state = survey.look(two)
    fail(monkeypatch, "open", 5, times=1 << 30, when=lambda path, *_, **__: "safetensors" in str(path))
    found = list(fsck.find(two, state, older_than_s=0.0, hash_files=True))
    assert [one.kind for one in found] == [Kind.UNKNOWN, Kind.UNKNOWN]
    assert not any(one.mend for one in found)


def test_a_view_agrees_after_a_repair(two: Registry, scope: Scope) -> None:
    """A reader that saw the damage, and one that starts now, find the same."""
    view = RegistryView(two, (scope,))
    two.append(two.records(V2), lambda _: {"keep_files": True}, writer="test")
    view.refresh()
    newest(two, V2).write_bytes(b"\0")
    view.refresh(force=True)
    repair(two)
    view.refresh(force=True)
    fresh = RegistryView(Registry(two.layout.root), (scope,))
    fresh.refresh()
    assert view.desired.records == fresh.desired.records


def test_a_revision_whose_record_is_lost_is_taken_again(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Its only record damaged, the same bytes registered again are that revision, not the next one."""
    put(registry, scope, make_adapter())
    newest(registry, V1).write_bytes(b"")
    put(registry, scope, make_adapter())
    assert served(registry, scope) == {"a1": "v1"}
    assert look(registry) == []
    put(registry, scope, make_adapter(seed=1))
    assert served(registry, scope) == {"a1": "v2"}


def test_what_gc_removes_while_fsck_looks_is_no_finding(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tombstone that was listed, and is gone with its pointer when it is read, is not a damaged record."""
    put(registry, scope, make_adapter(), link=True)
    release.unregister(registry, scope, "a1", writer="test")
    other, scan = Registry(registry.layout.root), Registry.scan

    def gone_behind_it(self: Registry, *args: Any, **more: Any) -> Any:
        found = scan(self, *args, **more)
        monkeypatch.undo()
        for _ in range(3):
            collect(gc.find(other, scope, frozenset(), 0.0, history_s=0.0))
        return found

    registry.close()
    monkeypatch.setattr(Registry, "scan", gone_behind_it)
    found = look(registry)
    assert registry.generations(registry.records(V1)) == []
    assert found == []


def test_a_lease_that_nobody_refreshes_is_no_finding(two: Registry) -> None:
    """It holds nothing up: writers and sidecars take it over, and gc removes it after a day."""
    left = two.layout.lease("dead")
    left_by_another_host(left)
    os.utime(left, (1, 1))
    assert look(two) == []
