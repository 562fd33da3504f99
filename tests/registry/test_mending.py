"""Lost files put back: into the registry's own folder and nowhere else, also by several at once."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import Conflict
from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.copying import Copy
from lora_fs.sidecar.registry.lifecycle.taking import Taker
from lora_fs.sidecar.registry.maintenance import fsck, gc, survey
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.maintenance.repair import mend
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.crash.acts import look_at_folders
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.test_operations import put

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
V1 = AdapterKey("default", "tiny", "v1", "a1")


@pytest.fixture
def source(make_adapter: MakeAdapter) -> Path:
    return make_adapter()


@pytest.fixture
def target(registry: Registry, scope: Scope, source: Path) -> Path:
    """The folder of a1, which has lost its config."""
    put(registry, scope, source)
    folder = registry.layout.artifact(V1)
    (folder / CONFIG).unlink()
    return folder


@pytest.fixture
def dropped(registry: Registry, scope: Scope) -> Path:
    """The folder of a1, which was dropped there and adopted."""
    folder = write_adapter(registry.layout.artifact(V1))
    look_at_folders(registry, scope)
    record = newest(registry)
    assert record is not None
    assert record.origin == "folder"
    return folder


def newest(registry: Registry, key: AdapterKey = V1) -> Record | None:
    return registry.latest(registry.records(key))[1]


# -- dropped folders -----------------------------------------------------------------------------


def test_a_dropped_folder_is_its_owners(
    registry: Registry, scope: Scope, dropped: Path, make_adapter: MakeAdapter
) -> None:
    """Who registers its old bytes again changes nothing of what the owner has brought since."""
    write_adapter(dropped, seed=1, rank=8)
    (dropped / CONFIG).unlink()  # he is not done
    theirs = (dropped / WEIGHTS).read_bytes()
    done = put(registry, scope, make_adapter())
    assert (done.changed, done.restored) == (False, False)
    assert [path.name for path in dropped.iterdir()] == [WEIGHTS]
    assert (dropped / WEIGHTS).read_bytes() == theirs


def test_a_dropped_folder_that_is_gone_comes_back(
    registry: Registry, scope: Scope, dropped: Path, make_adapter: MakeAdapter
) -> None:
    """Its bytes are registered, and lie nowhere."""
    shutil.rmtree(dropped)
    assert put(registry, scope, make_adapter()).restored
    assert (dropped / WEIGHTS).read_bytes() == (make_adapter() / WEIGHTS).read_bytes()


def test_a_dropped_folder_that_comes_meanwhile_is_its_owners(
    registry: Registry,
    scope: Scope,
    dropped: Path,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was gone when it was looked for, and its owner brought other bytes before the copy was there."""
    shutil.rmtree(dropped)
    place = Copy.place

    def late(*args: Any, **more: Any) -> None:
        write_adapter(dropped, seed=1)
        place(*args, **more)

    monkeypatch.setattr(Copy, "place", late)
    put(registry, scope, make_adapter())
    assert (dropped / WEIGHTS).read_bytes() == (make_adapter("theirs", seed=1) / WEIGHTS).read_bytes()


# -- symlinks that were planted ------------------------------------------------------------------


def test_a_link_beside_the_files_is_not_followed(
    registry: Registry, scope: Scope, source: Path, target: Path, tmp_path: Path
) -> None:
    """By whatever name a draft has or had: what it leads to is as it was, and the adapter holds no link."""
    (tmp_path / "host").write_text("precious")
    for name in (f".tmp-{CONFIG}", CONFIG):
        (target / name).symlink_to(tmp_path / "host")
    assert put(registry, scope, source).restored
    assert (tmp_path / "host").read_text() == "precious"
    assert not (target / CONFIG).is_symlink()
    assert (target / CONFIG).read_bytes() == (source / CONFIG).read_bytes()


def test_a_link_in_the_folders_place_is_not_followed(
    registry: Registry, scope: Scope, source: Path, target: Path, tmp_path: Path
) -> None:
    """Nothing is written where it leads, by whoever mends: it is told to be removed."""
    other = write_adapter(tmp_path / "other", seed=9, rank=8)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    shutil.rmtree(target)
    target.symlink_to(other)
    with pytest.raises(Conflict, match="is a symlink, or no folder"):
        put(registry, scope, source)
    state = survey.look(registry)
    found = [
        one
        for one in fsck.find(registry, state, older_than_s=3600, hash_files=True)
        if one.kind is fsck.Kind.BAD_FILES
    ]
    ((_, why),) = mend(registry, state, found, Expectation(), writer="test")
    assert "is a symlink, or no folder" in str(why)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    target.unlink()
    assert put(registry, scope, source).restored


def test_a_folder_that_is_swapped_for_a_link_meanwhile(
    registry: Registry,
    scope: Scope,
    source: Path,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files go into the folder that was there, and not where the link leads."""
    away, other = tmp_path / "away", tmp_path / "other"
    other.mkdir()
    place = artifacts.copy_files

    def swapped(*args: Any, **more: Any) -> Any:
        done = place(*args, **more)
        if "carried" in more:  # the copy that is mended from, the last one
            target.rename(away)
            target.symlink_to(other)
        return done

    monkeypatch.setattr(artifacts, "copy_files", swapped)
    put(registry, scope, source)
    assert list(other.iterdir()) == []
    assert (away / CONFIG).read_bytes() == (source / CONFIG).read_bytes()


# -- several at once, and kills ------------------------------------------------------------------


def test_two_that_mend_at_once(
    registry: Registry, scope: Scope, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was told that it is whole; what the other writes, or is killed over, takes nothing from it."""
    read, acknowledged = artifacts._take, threading.Event()
    slow_began = threading.Event()

    class Killed(BaseException):
        pass

    def held(taker: Taker, file: Path, *args: Any, **more: Any) -> None:
        if threading.current_thread().name == "slow" and taker.folder is not None and slow_began.is_set():
            taker(file.name, memoryview(b"half"))
            assert acknowledged.wait(30)
            raise Killed
        read(taker, file, *args, **more)

    copy = artifacts.copy_files

    def copied(*args: Any, **more: Any) -> Any:
        if threading.current_thread().name == "slow" and more.get("carried") == ():  # what is mended from
            slow_began.set()
        return copy(*args, **more)

    monkeypatch.setattr(artifacts, "_take", held)
    monkeypatch.setattr(artifacts, "copy_files", copied)
    killed: list[bool] = []

    def slow() -> None:
        try:
            put(Registry(registry.layout.root), scope, source)
        except Killed:
            killed.append(True)

    other = threading.Thread(target=slow, name="slow")
    other.start()
    assert slow_began.wait(30)
    assert put(registry, scope, source).restored
    acknowledged.set()
    other.join(30)
    assert killed == [True]
    assert (target / CONFIG).read_bytes() == (source / CONFIG).read_bytes()


def test_what_a_killed_one_left_is_removed_by_gc(
    registry: Registry, scope: Scope, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies with the copies under way, and nothing of it in the adapter."""
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "discard", lambda _: None)
        put(registry, scope, source)
    assert sorted(path.name for path in target.iterdir()) == [CONFIG, WEIGHTS]
    left = set(registry.layout.incoming(scope).iterdir())
    assert left
    found = gc.find(registry, scope, frozenset(), 0.0)
    assert left <= {one.path for one in found}
    collect(found)
    assert list(registry.layout.incoming(scope).iterdir()) == []
