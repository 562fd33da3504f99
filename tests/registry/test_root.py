"""The marker: what is a registry, whose it is, and what an empty or foreign folder is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from pyfakefs.fake_filesystem import FakeFilesystem

from lora_fs.sidecar.errors import FormatTooNew, RegistryLost, RegistryMissing, VolumeUnavailable
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.store import head, marker
from lora_fs.sidecar.registry.store.marker import Marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import mounts
from tests.registry.conftest import Clock, MakeAdapter
from tests.registry.faults import fail, without_links
from tests.registry.test_operations import put, served
from tests.registry.test_races import FORK

VOLUME = Path("/volume")


def change_marker(path: Path, **fields: object) -> None:
    """What another lora-fs, or another volume, would have there."""
    marker = Layout(path).marker
    marker.write_bytes(seal({**unseal(marker.read_bytes()), **fields}))


@pytest.mark.parametrize("folder", ["/volume", "/volume/a/b"])
def test_created_once(fs: FakeFilesystem, folder: str) -> None:
    """Creating makes the folders, the marker and HEAD; creating again finds them, whole and the same."""
    first, made = marker.create(Path(folder))
    assert made
    assert marker.create(Path(folder)) == (first, False)
    assert marker.read_marker(Path(folder)) == first
    assert set(os.listdir(folder)) == {"lora-fs.json", "HEAD", ".events", ".leases", ".replicas"}


def test_a_volume_that_does_not_take_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full, and that is said; once it has room the same call makes the registry."""
    fail(monkeypatch, "link", errno.ENOSPC, when=lambda _, target, **__: target.name == "lora-fs.json")
    with pytest.raises(VolumeUnavailable, match="full"):
        marker.create(tmp_path)
    assert marker.create(tmp_path).made


def test_nothing_is_no_registry(fs: FakeFilesystem) -> None:
    """A missing and an empty folder hold none, and are not made one by opening it."""
    fs.create_dir(VOLUME)
    for folder in (VOLUME, VOLUME / "missing"):
        with pytest.raises(RegistryMissing, match="mounted"):
            Registry(folder)
    assert os.listdir(VOLUME) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"garbage", b"\x00" * 500])
def test_a_damaged_marker_is_told_from_none(
    fs: FakeFilesystem, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """It is RegistryLost, and no new registry is made over it."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    marker.create(VOLUME)
    Layout(VOLUME).marker.write_bytes(content)
    for attempt in (marker.read_marker, marker.create):
        with pytest.raises(RegistryLost, match="damaged"):
            attempt(VOLUME)
    assert Layout(VOLUME).marker.read_bytes() == content


def test_a_lost_marker_is_not_replaced(fs: FakeFilesystem) -> None:
    """Once records were written a missing marker is RegistryLost; a new registry is made on demand only."""
    marker.create(VOLUME)
    head.advance_head(Layout(VOLUME), 1)
    Layout(VOLUME).marker.unlink()
    with pytest.raises(RegistryLost, match="backup"):
        marker.create(VOLUME)
    Layout(VOLUME).head.unlink()
    assert marker.create(VOLUME).marker.epoch == 1


def test_a_newer_reader_is_asked_for(fs: FakeFilesystem) -> None:
    """A format this one cannot read is FormatTooNew, even where its marker has another shape."""
    marker.create(VOLUME)
    change_marker(VOLUME, format=2, min_reader=2, tier="quorum", registry_uuid=7)
    with pytest.raises(FormatTooNew, match="upgrade"):
        Registry(VOLUME)


def test_a_newer_writer_is_asked_for(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """A format this one may only read is read and not written, from the moment the marker says so."""
    put(registry, scope, make_adapter())
    change_marker(registry.layout.root, format=2, min_writer=2, shiny="new")
    assert served(registry, scope) == {"a1": "v1"}
    with pytest.raises(FormatTooNew, match="upgrade"):
        put(registry, scope, make_adapter(seed=1))
    assert served(registry, scope) == {"a1": "v1"}
    assert not list(registry.layout.scope(scope).glob("v2/*"))


def test_another_registry_is_neither_read_nor_written(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Another uuid at the same place is RegistryLost, though its HEAD moves like any other."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    change_marker(registry.layout.root, registry_uuid="another")
    head.advance_head(registry.layout, 1)
    with pytest.raises(RegistryLost, match=r"another volume.* if this one is meant, restart this process$"):
        view.refresh()
    with pytest.raises(RegistryLost, match="another volume"):
        put(registry, scope, make_adapter(seed=1))
    assert [name for _, name, _ in view.desired.active()] == ["a1"]


def test_another_registry_is_noticed_though_its_head_is_the_same(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A scan that is due asks which registry it is: HEAD alone does not tell it."""
    put(registry, scope, make_adapter())
    clock = Clock()
    view = RegistryView(registry, (scope,), scan_s=60, clock=clock)
    view.refresh()
    clock.now += 30
    assert not view.refresh()
    change_marker(registry.layout.root, registry_uuid="another")
    clock.now += 60
    with pytest.raises(RegistryLost, match="another volume"):
        view.refresh()


def test_an_empty_mount_is_not_written_to(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Without the volume a write is refused, instead of landing in the folder it was mounted on."""
    root_folder = registry.layout.root
    root_folder.rename(root_folder.with_name("away"))
    root_folder.mkdir()
    with pytest.raises(RegistryLost):
        put(registry, scope, make_adapter())
    assert os.listdir(root_folder) == []


def test_a_volume_that_fails_is_not_a_lost_registry(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO on the marker is VolumeUnavailable: later it may answer."""
    fail(monkeypatch, "open", errno.EIO)
    with pytest.raises(VolumeUnavailable):
        registry.check_identity()
    registry.check_identity()


@pytest.mark.parametrize("make", ["mkdir", "fifo", "symlink", "garbage", "none"])
def test_head_in_any_form_stops_nobody(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, make: str
) -> None:
    """HEAD as a folder, a FIFO, a link, garbage or nothing: writes land and a scan finds them."""
    view = RegistryView(registry, (scope,))
    view.refresh()
    head = registry.layout.head
    head.unlink()
    if make == "mkdir":
        head.mkdir()
    elif make == "fifo":
        os.mkfifo(head)
    elif make == "symlink":
        head.symlink_to("/dev/zero")
    elif make == "garbage":
        head.write_bytes(b"\x00garbage")
    put(registry, scope, make_adapter())
    view.refresh(force=True)
    assert [name for _, name, _ in view.desired.active()] == ["a1"]


def _create(path: Path, start: object, tier: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tier == "lww":
            without_links(patch)
        start.wait()  # type: ignore[attr-defined]
        (path.parent / str(os.getpid())).write_text(marker.create(path).marker.registry_uuid)


@pytest.mark.parametrize("tier", ["cas", "lww"])
def test_two_creators_agree(tmp_path: Path, tier: str) -> None:
    """Processes that create one registry at the same moment have the same uuid, and it is the one there."""
    for attempt in range(5):
        path = tmp_path / str(attempt) / "root"
        path.parent.mkdir()
        start = FORK.Barrier(3)
        creators = [FORK.Process(target=_create, args=(path, start, tier), daemon=True) for _ in range(3)]
        for creator in creators:
            creator.start()
        for creator in creators:
            creator.join(60)
        told = {entry.read_text() for entry in path.parent.iterdir() if entry.is_file()}
        assert told == {marker.read_marker(path).registry_uuid}
        assert not list(path.glob(".tmp-*"))


def test_the_kind_of_a_mount(fs: FakeFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest mount point wins, spaces and umlauts in it are understood, and no /proc is unknown."""
    folder = Path("/mnt/données x/deep")
    fs.create_dir(folder)
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    line = f"1 1 {number} / /mnt/données\\040x rw - nfs4 server:/ rw\n"
    fs.create_file("/mounts", contents=f"1 1 {number} / / rw - ext4 /dev/a rw\n{line}")
    monkeypatch.setattr(mounts, "MOUNTS", Path("/mounts"))
    assert mounts.kind_of(folder) == "nfs4"
    assert mounts.kind_of(Path("/mnt")) == "ext4"
    assert mounts.timing_for("nfs4").settle_s > mounts.timing_for("ext4").settle_s
    monkeypatch.setattr(mounts, "MOUNTS", Path("/nowhere"))
    assert mounts.kind_of(folder) == "unknown"


def test_a_marker_keeps_what_it_does_not_know(fs: FakeFilesystem) -> None:
    """Unknown fields of a newer writer are read along."""
    marker.create(VOLUME)
    change_marker(VOLUME, shiny="new")
    assert marker.read_marker(VOLUME).model_dump()["shiny"] == "new"
    assert isinstance(marker.read_marker(VOLUME), Marker)


def test_two_writers_of_one_head_differ(fs: FakeFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the same HEAD: a reader that saw the first one's still sees that there is a second."""
    marker.create(VOLUME)
    before = head.read_head(Layout(VOLUME))
    seen = set()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(head, "read_head", lambda _: before)
            head.advance_head(Layout(VOLUME), 1)
        seen.add(head.read_head(Layout(VOLUME)))
    assert len(seen | {before}) == 3
