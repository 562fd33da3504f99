"""gc removes what nobody needs and nothing else: in doubt it leaves things where they are."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, Phase, ReplicaStatus, Scope
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.layout import REGISTERING, generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.maintenance import garbage, gc
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import Clock, MakeAdapter, write_adapter
from tests.registry.faults import before_the_record, fail
from tests.registry.test_operations import put, served

DAY_S = 24 * 3600.0


@pytest.fixture
def key(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> AdapterKey:
    """An adapter that was registered and withdrawn, its artifact left behind."""
    put(registry, scope, make_adapter())
    release.unregister(registry, scope, "a1", writer="test")
    return AdapterKey(*scope, "v1", "a1")


def found(registry: Registry, older_than_s: float = 0.0, in_use: object = frozenset()) -> list[Path]:
    scope = Scope("default", "tiny")
    registry.close()  # its own temporary names are due in 50 ms
    return [item.path for item in gc.find(registry, scope, in_use, older_than_s)]  # type: ignore[arg-type]


def age(path: Path, seconds: float) -> None:
    """Let a file look as old as that."""
    then = path.lstat().st_mtime - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def report(registry: Registry, key: AdapterKey, phase: Phase = Phase.READY) -> Path:
    """A replica that holds an adapter."""
    one = AdapterStatus(key=tuple(key), generation=1, phase=phase)
    status = ReplicaStatus(replica="r0", model="tiny", namespaces=("default",), adapters={"a1": one})
    path = registry.layout.replica("r0")
    path.write_bytes(seal(status))
    return path


def test_a_withdrawn_artifact_goes_when_it_is_old(registry: Registry, key: AdapterKey) -> None:
    """The tombstone's age decides; the records stay."""
    artifact = registry.layout.artifact(key)
    assert found(registry, DAY_S) == []
    age(artifact.parent / generation_name("a1", 2), DAY_S + 1)
    assert found(registry, DAY_S) == [artifact]
    collect(gc.find(registry, key.scope, frozenset(), DAY_S))
    assert not artifact.exists()
    assert registry.latest(registry.records(key))[0].generation == 2
    assert os.listdir(registry.layout.incoming(key.scope)) == []


def test_what_a_replica_reports_stays(registry: Registry, key: AdapterKey) -> None:
    """Loaded, loading or draining somewhere is in use; failed is not."""
    for phase in Phase:
        report(registry, key, phase)
        expected = {key} if phase is not Phase.FAILED else set()
        assert gc.in_use(registry) == expected
        assert bool(found(registry, in_use=gc.in_use(registry))) is (not expected)


@pytest.mark.parametrize("damage", ["garbage", "empty", "fifo", "EIO"])
def test_unknown_is_not_unused(
    registry: Registry, key: AdapterKey, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """A report that cannot be read refuses; and without reports no artifact is listed at all."""
    path = report(registry, key)
    if damage == "EIO":
        fail(monkeypatch, "open", errno.EIO, when=lambda name, *_, **__: str(name) == str(path))
    elif damage == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(b"garbage" if damage == "garbage" else b"")
    with pytest.raises(VolumeUnavailable, match=r"r0\.json"):
        gc.in_use(registry)
    assert found(registry, in_use=None) == []


def test_a_present_artifact_stays(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """What is registered, served or not, is not garbage at any age."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    assert found(registry) == []


@pytest.fixture
def orphan(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> Path:
    """A copy whose register ended before its record, two days ago."""
    with before_the_record():
        put(registry, scope, make_adapter())
    folder = registry.layout.artifact(AdapterKey(*scope, "v1", "a1"))
    for path in (*folder.iterdir(), folder):
        age(path, 2 * DAY_S)
    return folder


def test_a_copy_without_a_record_goes_when_it_is_old(registry: Registry, orphan: Path) -> None:
    """Nobody was told of it. One in which somebody works is theirs."""
    assert found(registry, 3 * DAY_S) == []
    assert found(registry, DAY_S, in_use=None) == []
    assert found(registry, DAY_S) == [orphan]
    os.utime(orphan / "adapter_model.safetensors")
    assert found(registry, DAY_S) == []
    age(orphan / "adapter_model.safetensors", 2 * DAY_S)
    collect(gc.find(registry, Scope("default", "tiny"), frozenset(), DAY_S))
    assert not orphan.exists()


def test_a_copy_that_is_registered_meanwhile_stays(
    registry: Registry, scope: Scope, orphan: Path, make_adapter: MakeAdapter
) -> None:
    """Between the look and the removal the same register came again."""
    chosen = gc.find(registry, scope, frozenset(), DAY_S)
    assert orphan in [item.path for item in chosen]
    put(registry, scope, make_adapter())
    collect(chosen)
    assert served(registry, scope) == {"a1": "v1"}
    assert (orphan / "adapter_model.safetensors").exists()


def test_a_copy_that_another_record_names_stays(registry: Registry, orphan: Path) -> None:
    """It has no record of its own, and is the folder of a linked one."""
    put(registry, Scope("other", "tiny"), orphan, name="linked", link=True)
    assert found(registry, DAY_S) == []


def test_what_another_record_names_stays(registry: Registry, key: AdapterKey) -> None:
    """An artifact that any scope's record links to is in use, though its own name was withdrawn."""
    artifact = registry.layout.artifact(key)
    put(registry, Scope("other", "tiny"), artifact, name="linked", link=True)
    assert found(registry) == []
    release.unregister(registry, Scope("other", "tiny"), "linked", writer="test")
    assert found(registry) == [artifact]


def test_kept_files_stay(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """``keep_files``, and what was linked, is its owner's."""
    put(registry, scope, make_adapter(), name="kept")
    release.unregister(registry, scope, "kept", writer="test", keep_files=True)
    linked = write_adapter(registry.layout.root / "default" / "tiny" / "v1" / "linked")
    put(registry, scope, linked, name="linked", revision="v1", link=True)
    release.unregister(registry, scope, "linked", writer="test")
    assert found(registry) == []


def test_a_dropped_folder_is_its_owner_s(registry: Registry, scope: Scope) -> None:
    """What somebody copied into the tree is never removed, registered or withdrawn."""
    write_adapter(registry.layout.revision(scope, "v1") / "dropped")
    clock, view = Clock(), RegistryView(registry, (scope,))
    adopter = Adopter(registry, Expectation(), settle_s=0.0, writer="test", clock=clock)
    view.refresh()
    adopter.step(view.desired)
    assert served(registry, scope) == {"dropped": "v1"}
    release.unregister(registry, scope, "dropped", writer="test")
    assert found(registry) == []


def test_a_damaged_newest_record_keeps_the_artifact(registry: Registry, key: AdapterKey) -> None:
    """Over the tombstone lies a record that cannot be read: it may have registered the adapter again."""
    (registry.layout.artifact(key).parent / generation_name("a1", 3)).write_text("garbage")
    assert found(registry) == []


def test_registered_again_in_between_stays(
    registry: Registry, scope: Scope, key: AdapterKey, make_adapter: MakeAdapter
) -> None:
    """What was garbage when it was found is looked at again before it goes."""
    chosen = gc.find(registry, scope, frozenset(), 0)
    put(registry, scope, make_adapter(), revision="v1")
    collect(chosen)
    assert registry.layout.artifact(key).is_dir()


def test_registered_again_at_the_worst_moment(
    registry: Registry, scope: Scope, key: AdapterKey, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """Whichever of gc's removal and register's record comes first, the adapter has its bytes."""
    source, artifact = make_adapter(), registry.layout.artifact(key)
    answers = [True, False]  # the record came between the look and the removal: put back
    collect([garbage.artifact(registry.layout, key, "test", lambda: answers.pop(0))])
    assert artifact.is_dir()

    def unknown() -> bool:  # the second time the volume does not answer
        if not artifact.exists():
            raise VolumeUnavailable("cannot list it")
        return True

    kept = collect([garbage.artifact(registry.layout, key, "test", unknown)])
    assert str(kept[artifact]) == "cannot list it"
    assert artifact.is_dir()
    with pytest.MonkeyPatch.context() as patch:  # removed between register's look and its record
        real = Registry.append

        def racing(*args: object, **kwargs: object) -> object:
            if artifact.exists():
                artifact.rename(tmp_path / "removed")
            patch.undo()
            return real(*args, **kwargs)  # type: ignore[arg-type]

        patch.setattr(Registry, "append", racing)
        put(registry, scope, source, revision="v1")
    assert artifact.is_dir()
    assert served(registry, scope) == {"a1": "v1"}


def test_temporary_names_come_first(registry: Registry, scope: Scope, key: AdapterKey) -> None:
    """Whatever dead writers left goes before any artifact; what is fresh stays."""
    layout = registry.layout
    places = [layout.root, layout.leases, layout.active(scope), layout.revision(scope, "v1")]
    left = [place / ".tmp-dead" for place in places]
    for path in left:
        path.write_bytes(b"half")
    (layout.incoming(scope) / "upload").mkdir()
    assert found(registry, 3600.0) == []
    paths = found(registry)
    assert set(paths) == {*left, layout.incoming(scope) / "upload", layout.artifact(key)}
    assert set(paths[:4]) == set(left)
    collect(gc.find(registry, scope, frozenset(), 0))
    assert found(registry) == []


def test_old_hints_go(registry: Registry, key: AdapterKey) -> None:
    """Reports and leases of a day ago are of the dead; younger ones stay, whatever age is asked for."""
    status, lock = report(registry, key), registry.layout.lease("adopt-x")
    broken = [lock.with_name(f"{lock.name}.{how}.71.{'0' * 32}") for how in ("break", "restore")]
    hints = {status, lock, *broken}
    for one in (lock, *broken):
        one.touch()
    assert not hints & set(found(registry))
    for one in hints:
        age(one, DAY_S + 1)
    assert hints <= set(found(registry))


def test_what_its_going_frees_is_told(registry: Registry, scope: Scope, key: AdapterKey) -> None:
    """The bytes of a file, or of all files below a folder; what a link leads to is not freed with it."""
    layout = registry.layout
    incoming, status = layout.incoming(scope), report(registry, AdapterKey(*scope, "v1", "another"))
    age(status, DAY_S + 1)
    (incoming / "upload" / "deep").mkdir(parents=True)
    (incoming / "upload" / "config").write_bytes(bytes(10))
    (incoming / "upload" / "deep" / "weights").write_bytes(bytes(100))
    (incoming / "archive").write_bytes(bytes(7))
    (incoming / "link").symlink_to(layout.root)
    artifact = layout.artifact(key)
    registry.close()
    assert {item.path: item.size_bytes for item in gc.find(registry, scope, frozenset(), 0.0)} == {
        incoming / "upload": 110,
        incoming / "archive": 7,
        incoming / "link": 0,
        status: status.stat().st_size,
        artifact: sum(file.stat().st_size for file in artifact.iterdir()),
    }


def test_a_removal_that_fails_is_told(
    registry: Registry, key: AdapterKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only volume is VolumeUnavailable, and the artifact stays whole."""
    chosen, artifact = gc.find(registry, key.scope, frozenset(), 0), registry.layout.artifact(key)
    fail(monkeypatch, "rename", errno.EROFS)
    kept = collect(chosen)
    assert kept.keys() == {artifact}
    assert isinstance(kept[artifact], VolumeUnavailable)
    assert "read-only" in str(kept[artifact])
    assert len(os.listdir(artifact)) == 2


@pytest.mark.parametrize("refused", ["a leftover", "an artifact", "the artifact's own folder"])
def test_gc_goes_on_after_what_it_may_not_remove(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
) -> None:
    """gc removes the rest and returns what stays. An artifact stays with a temporary name beside it."""
    layout = registry.layout
    keys = AdapterKey(*scope, "v1", "a"), AdapterKey(*scope, "v2", "b")
    for key in keys:
        put(registry, scope, make_adapter(key.name), name=key.name, revision=key.revision)
        release.unregister(registry, scope, key.name, writer="test")
    first, second = map(layout.artifact, keys)
    left = layout.root / ".tmp-dead", layout.revision(scope, "v1") / ".tmp-dead"
    for path in left:
        path.touch()
    stays, call = {
        "a leftover": ({left[0]}, "unlink"),
        "an artifact": ({first}, "rename"),
        "the artifact's own folder": ({left[1], first}, "unlink"),
    }[refused]
    target = left[1] if refused == "the artifact's own folder" else min(stays)
    fail(monkeypatch, call, errno.EACCES, when=lambda path, *_, **__: Path(path) == target)
    assert collect(gc.find(registry, scope, frozenset(), 0)).keys() == stays
    assert {path for path in (*left, first, second) if path.exists()} == stays


@pytest.mark.parametrize("nth", range(5))
def test_a_leftover_that_cannot_be_looked_at_stops_no_gc(
    registry: Registry, key: AdapterKey, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Whichever look at it fails, gc removes the rest."""
    left, looks = registry.layout.root / ".tmp-dead", itertools.count()
    left.touch()

    def is_due(path: object, *_: object, **__: object) -> bool:
        return path == left and next(looks) == nth

    fail(monkeypatch, "stat", errno.EIO, when=is_due)
    kept = collect(gc.find(registry, key.scope, frozenset(), 0))
    assert all(isinstance(error, VolumeUnavailable) for error in kept.values())
    assert not registry.layout.artifact(key).exists()


@pytest.mark.parametrize("where", [".incoming/copy", "v1/a1/inside"])
def test_folders_nested_without_end_stop_no_gc(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, where: str
) -> None:
    """What is nested deeper than Python recurses stays, with the reason; gc removes the rest."""
    put(registry, scope, make_adapter())
    nest(registry.layout.scope(scope) / where)
    release.unregister(registry, scope, "a1", writer="test")
    left = registry.layout.events / ".tmp-dead"
    left.touch()
    registry.close()
    try:
        kept = collect(gc.find(registry, scope, frozenset(), 0))
        assert [str(error).partition(" is nested ")[2] for error in kept.values()] == [
            "too deep: remove it with `rm -r`"
        ]
        assert not left.exists()
        assert not registry.layout.artifact(AdapterKey(*scope, "v1", "a1")).exists()
    finally:
        subprocess.run(["rm", "-rf", registry.layout.scope(scope)], check=True)  # pytest cannot, either


def nest(folder: Path) -> None:
    """Make a folder with 1,500 in each other."""
    folder.mkdir(parents=True)
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("a", dir_fd=handle)
        above, handle = handle, os.open("a", os.O_RDONLY, dir_fd=handle)
        os.close(above)
    os.close(handle)


def test_what_is_gone_already_is_fine(registry: Registry, scope: Scope, key: AdapterKey) -> None:
    """Two collections of one list: the second finds nothing to do."""
    (registry.layout.root / ".tmp-dead").touch()
    chosen = gc.find(registry, scope, frozenset(), 0)
    collect(chosen)
    collect(chosen)
    assert found(registry) == []


def test_what_register_placed_anew_is_not_overwritten(
    registry: Registry, key: AdapterKey, make_adapter: MakeAdapter
) -> None:
    """Moved aside while register looked, and placed by it again: the older copy goes, without an error."""
    artifact, answers = registry.layout.artifact(key), [True, False]

    def still() -> bool:
        if len(answers) == 1:
            write_adapter(artifact, seed=7)
        return answers.pop(0)

    collect([garbage.artifact(registry.layout, key, "test", still)])
    assert len(os.listdir(artifact)) == 2
    assert os.listdir(registry.layout.incoming(key.scope)) == []


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_record_names_in_part_stays(registry: Registry, key: AdapterKey, inside: bool) -> None:
    """A link to a folder within the withdrawn artifact, or to one that holds it, keeps it."""
    artifact = registry.layout.artifact(key)
    named = write_adapter(artifact / "checkpoint" if inside else artifact.parent)
    put(registry, Scope("other", "tiny"), named, name="linked", link=True)
    assert found(registry) == []


@pytest.mark.parametrize("takes", [True, False])
def test_a_withdrawn_revision_that_is_registered_anew(
    registry: Registry,
    key: AdapterKey,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    takes: bool,
) -> None:
    """gc that runs between its bytes and its record judges it by its mark, not by the old tombstone."""
    shutil.rmtree(registry.layout.artifact(key))
    tombstone = registry.records(key).folder / generation_name("a1", 2)
    age(tombstone, 10 * DAY_S)
    source = make_adapter()
    if takes:
        source = write_adapter(registry.layout.incoming(key.scope) / "0123")
    append = Registry.append

    def after_gc(self: Registry, *args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        collect(gc.find(registry, key.scope, frozenset(), DAY_S))
        return append(self, *args, **more)

    monkeypatch.setattr(Registry, "append", after_gc)
    put(registry, key.scope, source, revision="v1", takes=takes)
    assert served(registry, key.scope) == {"a1": "v1"}
    assert sorted(os.listdir(registry.layout.artifact(key))) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_mark_that_is_old_keeps_nothing(registry: Registry, key: AdapterKey) -> None:
    """Who registered a withdrawn revision anew and was killed a day ago leaves no files for ever."""
    artifact = registry.layout.artifact(key)
    age(artifact.parent / generation_name("a1", 2), 10 * DAY_S)
    (artifact / REGISTERING).touch()
    assert artifact not in found(registry, DAY_S)
    for path in (*artifact.iterdir(), artifact):
        age(path, 2 * DAY_S)
    assert artifact in found(registry, DAY_S)


def put_back(registry: Registry, key: AdapterKey, how: str) -> Path:
    """A person's files in the place of a withdrawn revision, of which a copy kept the times."""
    folder = registry.layout.artifact(key)
    long_ago = folder.parent.stat().st_mtime - 100 * DAY_S
    if how == "other weights":
        shutil.rmtree(folder)
        write_adapter(folder, seed=7)
    elif how == "one more file":
        (folder / "notes.txt").write_text("mine")
    elif how == "an edited file":
        (folder / "adapter_config.json").write_text("{}")
    elif how == "moved there":
        shutil.rmtree(folder)
        mine = write_adapter(registry.layout.root / ".mine", seed=7)
        mine.rename(folder)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (long_ago, long_ago))
    return folder


@pytest.mark.parametrize("how", ["other weights", "one more file", "an edited file", "moved there"])
def test_what_came_since_the_withdrawal_stays(registry: Registry, key: AdapterKey, how: str) -> None:
    """What a person put in the place of a withdrawn revision is kept, whatever times its files have."""
    folder = put_back(registry, key, how)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found(registry) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("since", ["touched", "copied back", "given to another owner"])
def test_the_bytes_that_were_withdrawn_go(
    registry: Registry, key: AdapterKey, tmp_path: Path, since: str
) -> None:
    """A copy of the volume gives every file a new time. Its withdrawn adapters are removed all the same."""
    folder = registry.layout.artifact(key)
    if since != "touched":
        (folder / "README.md").write_text("# a1\n")
        age(folder / "README.md", DAY_S)
    if since == "given to another owner":
        for path in (*folder.iterdir(), folder):
            os.chown(path, os.getuid(), os.getgid())
    elif since == "touched":
        for path in (*folder.iterdir(), folder):
            os.utime(path)
    else:
        shutil.move(shutil.copytree(folder, tmp_path / "copy"), folder.with_name("new"))
        shutil.rmtree(folder)
        folder.with_name("new").rename(folder)
    assert found(registry) == [folder]
    collect(gc.find(registry, key.scope, frozenset(), 0.0))
    assert not folder.exists()


def test_what_comes_between_the_look_and_the_removal_stays(registry: Registry, key: AdapterKey) -> None:
    """gc looks at a withdrawn revision's files once more before it moves them aside."""
    chosen = gc.find(registry, key.scope, frozenset(), 0.0)
    folder = put_back(registry, key, "other weights")
    assert collect(chosen) == {}
    assert len(os.listdir(folder)) == 2
