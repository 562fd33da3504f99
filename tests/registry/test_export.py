"""An export is whole or refused, and a restore brings back what was exported and nothing over it."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import (
    Conflict,
    InputError,
    OperatorError,
    RegistryLost,
    RegistryMissing,
    TemporaryError,
)
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.backup import archive, export, restore
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.lifecycle import artifacts, release
from lora_fs.sidecar.registry.maintenance import fsck, gc, survey
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.faults import fail, without_links
from tests.registry.test_operations import put, served

V1 = AdapterKey("default", "tiny", "v1", "a1")
C1 = AdapterKey("default", "tiny", "v1", "c1")
D1 = AdapterKey("default", "tiny", "v1", "d1")


@pytest.fixture
def filled(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> Registry:
    """a1 with v1 and v2 (active), b1 withdrawn, c1 linked, and another tenant's d1."""
    put(registry, scope, make_adapter(), labels={"team": "care"})
    put(registry, scope, make_adapter(seed=1))
    put(registry, scope, make_adapter(seed=2), name="b1")
    release.unregister(registry, scope, "b1", writer="test")
    put(registry, scope, make_adapter("linked", seed=3), name="c1", link=True)
    put(registry, Scope("other", "tiny"), make_adapter(seed=4), name="d1")
    return registry


def exported(registry: Registry, target: Path, *, files: bool = True) -> Path:
    done = export.to_file(registry, registry.scopes(), target, artifacts=files)
    assert done.left_out == []
    return target


def state(registry: Registry) -> dict[str, object]:
    """Everything a fresh reader finds, in every scope, but what is each registry's own."""
    view = RegistryView(registry, tuple(registry.scopes()))
    view.refresh()
    desired = view.desired
    records = {
        str(key): (record.state, record.spec.digest, record.spec.policy, record.spec.labels)
        for key, record in desired.records.items()
        if record.present
    }
    pointers = {f"{s}/{name}": p.revision for (s, name), p in desired.pointers.items() if p.revision}
    whole = [
        artifacts.digest_of(
            artifacts.hash_files(registry.layout.resolve(r.spec.path), [f.path for f in r.spec.files])
        )
        == r.spec.digest
        for r in desired.records.values()
        if r.present
    ]
    return {"records": records, "pointers": pointers, "whole": all(whole), "problems": dict(desired.problems)}


def path_of(registry: Registry, key: AdapterKey = C1) -> Path:
    record = registry.latest(registry.records(key))[1]
    assert record is not None
    return registry.layout.resolve(record.spec.path)


# -- the archive ---------------------------------------------------------------------------------


def test_an_export_reads_back_whole(filled: Registry, tmp_path: Path) -> None:
    """Every newest record and pointer is in it, byte for byte, and the files of what is present."""
    contents = archive.read(exported(filled, tmp_path / "e.tar"))
    assert len(contents.records) == 5
    assert {str(key) for key in contents.files} == {str(k) for k, r in contents.records.items() if r.present}
    assert all(contents.has_files_of(r) for r in contents.records.values() if r.present)
    assert contents.raw[V1] in {
        path.read_bytes() for path in filled.layout.revision(Scope("default", "tiny"), "v1").glob("a1.@*")
    }
    assert contents.begin.registry_uuid == filled.marker.registry_uuid


def test_a_stream_is_the_same_archive(filled: Registry, tmp_path: Path) -> None:
    """What goes to a pipe, which cannot seek, is read as a file is."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: object, /) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(data)  # type: ignore[arg-type]

    pipe = Pipe()
    export.write(filled, filled.scopes(), pipe, artifacts=True)  # type: ignore[arg-type]
    (tmp_path / "p.tar").write_bytes(pipe.data)
    assert (
        archive.read(tmp_path / "p.tar").records == archive.read(exported(filled, tmp_path / "e.tar")).records
    )


def test_without_files(filled: Registry, tmp_path: Path) -> None:
    """Records alone are a few kilobytes and hold no adapter's file."""
    file = exported(filled, tmp_path / "e.tar", files=False)
    assert archive.read(file).files == {}


@pytest.mark.parametrize("keep", [0, 511, 512, 5000, -10240 - 1, -1])
def test_a_cut_export_is_refused(filled: Registry, tmp_path: Path, keep: int) -> None:
    """Cut between two members or inside one, it is no smaller registry: it is refused."""
    file = exported(filled, tmp_path / "e.tar")
    data = file.read_bytes()
    with tarfile.open(file) as tar:
        last = tar.getmembers()[-1]
    cut = data[: last.offset] if keep == -1 else data[:keep]
    file.write_bytes(cut)
    with pytest.raises(InputError):
        archive.read(file)


def test_any_flipped_bit_is_found(filled: Registry, tmp_path: Path) -> None:
    """A bit that differs in a record, a file or the frame is not taken over."""
    file = exported(filled, tmp_path / "e.tar")
    data, read = file.read_bytes(), archive.read(file)
    for at in range(300, len(data) - 10240, len(data) // 97):
        flipped = bytearray(data)
        flipped[at] ^= 1
        file.write_bytes(flipped)
        try:
            found = archive.read(file)
        except InputError:
            continue
        assert (found.bodies, found.files) == (read.bodies, read.files), at


def rewritten(file: Path, change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]) -> Path:
    target = file.with_name("rewritten.tar")
    with tarfile.open(file) as old, tarfile.open(target, "w") as new:
        for member in old:
            data = old.extractfile(member)
            assert data is not None
            info, content = change(member, data.read())
            info.size = len(content) if info.isreg() else 0
            new.addfile(info, io.BytesIO(content))
    return target


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "default/tiny/v1/../x", "a/b/c/d/e/f", "x"]
)
def test_a_name_that_leaves_its_folder_is_refused(filled: Registry, tmp_path: Path, name: str) -> None:
    """No member's name becomes a path; what is not of the export's form refuses the export."""

    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(".safetensors"):
            info.name = name
        return info, data

    with pytest.raises(InputError, match="no place in an export"):
        archive.read(rewritten(exported(filled, tmp_path / "e.tar"), change))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_regular_files_are_taken(filled: Registry, tmp_path: Path, kind: bytes) -> None:
    """A link, a FIFO or a device in an export refuses it."""

    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name.endswith(".safetensors"):
            info.type, info.linkname = kind, "/etc/passwd"
        return info, data

    with pytest.raises(InputError):
        archive.read(rewritten(exported(filled, tmp_path / "e.tar"), change))


def test_what_a_newer_version_wrote_asks_for_that_not_for_another_copy(
    filled: Registry, tmp_path: Path
) -> None:
    """A whole export that this version does not read, each copy of it being the same."""

    def change(info: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if info.name == archive.BEGIN:
            data = seal({**unseal(data), "apiVersion": "lora-fs/v2"})
        return info, data

    with pytest.raises(InputError, match=r"needs another lora-fs$"):
        archive.read(rewritten(exported(filled, tmp_path / "e.tar"), change))


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    """Text, and a tar of other things, are told to be no export."""
    (tmp_path / "text").write_text("hello")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "text", "default/tiny/v1/a1/config.json")
    for name in ("text", "other.tar"):
        with pytest.raises(InputError, match="no export"):
            archive.read(tmp_path / name)


def test_damaged_files_are_told_and_the_export_stays_readable(filled: Registry, tmp_path: Path) -> None:
    """A file that is shorter, other or gone is named; all others are in the export, which is whole."""
    layout, scope = filled.layout, Scope("default", "tiny")
    (layout.artifact(V1) / "adapter_model.safetensors").write_bytes(b"short")
    shutil.rmtree(layout.artifact(AdapterKey(*scope, "v2", "a1")))
    file = tmp_path / "e.tar"
    done = export.to_file(filled, filled.scopes(), file, artifacts=True)
    assert len(done.left_out) == 3
    contents = archive.read(file)
    assert not contents.has_files_of(contents.records[V1])
    assert contents.end.left_out == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("file", ["adapter_config.json", "README.md"])
def test_a_file_that_cannot_be_read_is_left_out_alone(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, file: str
) -> None:
    """One folder that this user may not search, or a disk that fails, fails no backup of the others."""
    closed = filled.layout.resolve(filled.latest(filled.records(C1))[1].spec.path)  # type: ignore[union-attr]
    for call in ("open", "stat", "lstat"):

        def reached(path: object, *_: object, **__: object) -> bool:
            return str(path) == str(closed / file)

        fail(monkeypatch, call, code, times=1 << 30, when=reached)
    done = export.to_file(filled, filled.scopes(), tmp_path / "out.tar", artifacts=True)
    assert [f"{C1}: {closed / file} is not there or cannot be read" in one for one in done.left_out] == [True]
    assert done.adapters == 3
    assert archive.read(tmp_path / "out.tar").end.left_out == 1


@pytest.mark.parametrize("what", ["token", "size", "pointer"])
def test_what_no_import_takes_is_left_out_and_told(filled: Registry, tmp_path: Path, what: str) -> None:
    """As other software may write it, and every reader reads it: what else there is can be imported."""
    folder = filled.layout.active(V1.scope) if what == "pointer" else filled.layout.revision(V1.scope, "v1")
    path = max(folder.glob("a1.@*"))
    body = unseal(path.read_bytes())
    if what == "size":
        body["spec"]["size_bytes"] += 1
    else:
        body["token"] = "writer-7"
    path.write_bytes(seal(body))
    file = tmp_path / "e.tar"
    done = export.to_file(filled, filled.scopes(), file, artifacts=True)
    (told,) = done.left_out
    assert told.startswith(f"{path} is left out, since no restore takes it: ")
    found = fsck.find(filled, survey.look(filled), older_than_s=60, hash_files=False)
    assert [(one.kind, one.path) for one in found] == [(fsck.Kind.NO_EXPORT, path)]
    contents = archive.read(file)
    assert (V1 in contents.records, len(contents.records)) == (what == "pointer", 5 - (what != "pointer"))
    assert contents.end.left_out == 1


def test_a_failed_export_leaves_the_last_one(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves no half file under the name of a good backup."""
    file = exported(filled, tmp_path / "e.tar")
    before = file.read_bytes()
    fail(monkeypatch, "fsync", 28)
    with pytest.raises(OperatorError, match="No space"):
        export.to_file(filled, filled.scopes(), file, artifacts=True)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.glob("e.tar*")] == ["e.tar"]


def test_a_killed_export_is_removed_by_the_next_one(filled: Registry, tmp_path: Path) -> None:
    """Its draft, which is as large as the export. One that was written to an hour ago may be under way."""
    names = {
        "e[1].tar.0123abcd.part": 3700,
        "e[1].tar.4567abcd.part": 3500,
        "e[1].tar.mine.part": 3700,
        "e1.tar.0123abcd.part": 3700,
    }
    now = time.time()
    for name, age_s in names.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    exported(filled, tmp_path / "e[1].tar")
    left = {path.name for path in tmp_path.glob("e*.tar*")}
    assert left == {"e[1].tar", *names} - {"e[1].tar.0123abcd.part"}


def test_two_exports_to_one_file_at_once(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two runs of a timer: each is whole, and the one that ends last is there."""
    file, write = tmp_path / "e.tar", export.write

    def overtaken(registry: Registry, scopes: Any, out: Any, *, artifacts: bool) -> export.Exported:
        monkeypatch.setattr(export, "write", write)
        exported(filled, file, files=False)
        return write(registry, scopes, out, artifacts=artifacts)

    monkeypatch.setattr(export, "write", overtaken)
    exported(filled, file)
    assert archive.read(file).begin.artifacts
    assert [path.name for path in tmp_path.glob("*e.tar*")] == ["e.tar"]


# -- restoring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["cas", "lww"])
def test_a_restored_registry_is_the_one_that_was(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The same uuid, another epoch, the same state; also where links work on one side alone."""
    file = exported(filled, tmp_path / "e.tar")
    if tier == "lww":
        without_links(monkeypatch)
    assert restore.restore(tmp_path / "new", file, archive.read(file)) == []
    again = Registry(tmp_path / "new")
    assert again.marker.registry_uuid == filled.marker.registry_uuid
    assert again.marker.epoch > filled.marker.epoch
    assert again.marker.tier == tier
    assert state(again) == state(filled)
    assert path_of(again) == path_of(filled), "what lies there as it was stays linked"
    release.promote(again, Scope("default", "tiny"), "a1", "v1", writer="test")
    assert served(again, Scope("default", "tiny"))["a1"] == "v1"


def test_a_registry_that_somebody_makes_meanwhile(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore raises Conflict if a sidecar makes the empty folder its registry meanwhile."""
    file, lay = exported(filled, tmp_path / "e.tar"), restore._lay

    def late(*arguments: Any) -> None:
        Registry(tmp_path / "new", create=True)
        lay(*arguments)

    monkeypatch.setattr(restore, "_lay", late)
    with pytest.raises(Conflict, match="a registry meanwhile"):
        restore.restore(tmp_path / "new", file, archive.read(file))


def test_a_running_reader_follows_a_restore(filled: Registry, tmp_path: Path) -> None:
    """A view of the lost volume believes the restored one, which is older, and goes on."""
    scope = Scope("default", "tiny")
    file = exported(filled, tmp_path / "e.tar")
    view = RegistryView(filled, (scope,))
    release.promote(filled, scope, "a1", "v1", writer="test")
    view.refresh()
    assert {name: r.revision for _, name, r in view.desired.active()}["a1"] == "v1"
    path = filled.layout.root
    shutil.rmtree(path)
    restore.restore(path, file, archive.read(file))
    view.refresh(force=True)
    assert {name: r.revision for _, name, r in view.desired.active()}["a1"] == "v2"
    assert view.desired.frozen is None


def test_a_killed_restore_is_completed_by_the_same_one(filled: Registry, tmp_path: Path) -> None:
    """Failed at every other write: what it left is no registry or the whole one, and again it is whole."""
    file = exported(filled, tmp_path / "e.tar")
    contents, want = archive.read(file), state(filled)
    number = 0
    while True:
        number += 2
        target = tmp_path / f"n{number}"
        with pytest.MonkeyPatch.context() as patch:
            left = [number]

            def when(*_: object, left: list[int] = left, **__: object) -> bool:
                left[0] -= 1
                return left[0] == 0

            fail(patch, "link", 5, when=when)
            fail(patch, "mkdir", 5, when=when)
            fail(patch, "fsync", 5, when=when)
            with suppress(TemporaryError):
                restore.restore(target, file, contents)
            if left[0] > 0:
                break
        if not (target / "lora-fs.json").exists():
            restore.restore(target, file, contents)
        assert state(Registry(target)) == want
    assert number > 30


class Killed(BaseException):
    """No cleanup of the registry's catches it."""


def test_a_restore_that_is_killed_at_a_write_is_completed_without_links(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the marker has its name before its bytes."""
    without_links(monkeypatch)
    file, want, write = exported(filled, tmp_path / "e.tar"), state(filled), os.write
    contents, number, left = archive.read(file), 0, 0

    def killed(handle: int, data: bytes) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return write(handle, data)

    monkeypatch.setattr(os, "write", killed)
    while left <= 0:
        number, target = number + 1, tmp_path / f"n{number}"
        left = number
        with suppress(Killed):
            restore.restore(target, file, contents)
        with suppress(RegistryLost, RegistryMissing):
            assert state(Registry(target)) == want
            continue  # it was killed at HEAD, or not at all
        assert restore.restore(target, file, contents) == []
        assert state(Registry(target)) == want
    assert number > 10


def test_a_marker_that_is_cut_beside_head_is_no_restores(filled: Registry, tmp_path: Path) -> None:
    """It may be damage: a person looks at it."""
    file = exported(filled, tmp_path / "e.tar")
    filled.layout.marker.write_bytes(b"")
    with pytest.raises(Conflict, match="is a registry already"):
        restore.restore(filled.layout.root, file, archive.read(file))


@pytest.mark.parametrize("as_new", [False, True])
def test_a_registry_refuses_an_archive(filled: Registry, tmp_path: Path, as_new: bool) -> None:
    """The error says what to do instead, and the registry is as before."""
    file, want = exported(filled, tmp_path / "e.tar"), state(filled)
    release.promote(filled, V1.scope, "a1", "v1", writer="test")
    with pytest.raises(Conflict, match=r"registry already.*--root EMPTY import archive.*lora-fs register"):
        restore.restore(filled.layout.root, file, archive.read(file), as_new=as_new)
    release.promote(filled, V1.scope, "a1", "v2", writer="test")
    assert state(filled) == want


def test_an_archive_restored_beside_gives_lost_files_back(filled: Registry, tmp_path: Path) -> None:
    """What the error above advises: register from the folder that was restored as another registry."""
    file, want = exported(filled, tmp_path / "e.tar"), state(filled)
    shutil.rmtree(filled.layout.artifact(V1))
    assert restore.restore(tmp_path / "beside", file, archive.read(file), as_new=True) == []
    beside = Registry(tmp_path / "beside")
    assert state(beside) == want
    assert beside.marker.registry_uuid != filled.marker.registry_uuid
    put(filled, V1.scope, beside.layout.artifact(V1), revision="v1", activate=False)
    assert state(filled) == want


def test_fields_of_a_later_version_are_restored(filled: Registry, tmp_path: Path) -> None:
    """A record keeps what this version does not know."""
    filled.append(filled.records(V1), lambda _: {"mood": "glad"}, writer="test")
    file = exported(filled, tmp_path / "e.tar")
    restore.restore(tmp_path / "new", file, archive.read(file))
    again = Registry(tmp_path / "new")
    record = again.latest(again.records(V1))[1]
    assert record is not None
    assert record.model_extra == {"mood": "glad"}


def test_a_restore_refuses_another_record(filled: Registry, tmp_path: Path) -> None:
    """A record that is not the export's is in the way and stays."""
    file = exported(filled, tmp_path / "e.tar")
    contents = archive.read(file)
    (tmp_path / "n/default/tiny/v1").mkdir(parents=True)
    (tmp_path / "n/default/tiny/v1/a1.@00000001.json").write_text("{}")
    with pytest.raises(Conflict, match="another one"):
        restore.restore(tmp_path / "n", file, contents)
    assert not (tmp_path / "n/lora-fs.json").exists()


@pytest.mark.parametrize("tier", ["cas", "lww"])
@pytest.mark.parametrize("left", ["a later pointer", "another adapter"])
def test_a_restore_refuses_what_a_registry_left(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, left: str
) -> None:
    """As ``rm *`` leaves it, without its marker and HEAD: what was newer would be in force again."""
    file = exported(filled, tmp_path / "e.tar")
    if tier == "lww":
        without_links(monkeypatch)
    restore.restore(tmp_path / "n", file, archive.read(file))
    other = Registry(tmp_path / "n")
    if left == "a later pointer":
        release.promote(other, V1.scope, "a1", "v1", writer="test")
    else:
        put(other, V1.scope, write_adapter(tmp_path / "z1", 9), name="z1")
    for name in ("lora-fs.json", "HEAD"):
        (tmp_path / "n" / name).unlink()
    with pytest.raises(Conflict, match=r"is not in the export: restore it into an empty folder"):
        restore.restore(tmp_path / "n", file, archive.read(file))
    assert not (tmp_path / "n/lora-fs.json").exists()


@pytest.mark.parametrize("tier", ["cas", "lww"])
@pytest.mark.parametrize("other_bytes", [False, True])
def test_a_linked_adapter_is_restored_with_its_own_copy(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, other_bytes: bool
) -> None:
    """Where its folder is not as it was; killed before the marker and repeated it is the same one."""
    file, want = exported(filled, tmp_path / "e.tar"), state(filled)
    if tier == "lww":
        without_links(monkeypatch)
    shutil.rmtree(tmp_path / "linked")
    if other_bytes:
        write_adapter(tmp_path / "linked", 9)
    contents = archive.read(file)
    assert restore.restore(tmp_path / "new", file, contents) == []
    (tmp_path / "new/lora-fs.json").unlink()
    (tmp_path / "new/HEAD").unlink()
    assert restore.restore(tmp_path / "new", file, contents) == []
    again = Registry(tmp_path / "new")
    assert path_of(again) == again.layout.artifact(C1)
    assert state(again) == want


def test_what_is_kept_beside_an_adapter_is_restored(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """It is no part of the digest."""
    source = make_adapter()
    (source / "README.md").write_text("by us")
    put(registry, scope, source)
    file = exported(registry, tmp_path / "e.tar")
    assert restore.restore(tmp_path / "new", file, archive.read(file)) == []
    assert (Registry(tmp_path / "new").layout.artifact(V1) / "README.md").read_text() == "by us"


def test_an_epoch_that_is_ahead_of_the_clock(filled: Registry, tmp_path: Path) -> None:
    """The restored one is greater all the same: no reader has seen it."""
    path = filled.layout.marker
    path.write_bytes(seal({**unseal(path.read_bytes()), "epoch": 1 << 40}))
    file = exported(Registry(filled.layout.root), tmp_path / "e.tar")
    restore.restore(tmp_path / "n", file, archive.read(file))
    assert marker.read_marker(tmp_path / "n").epoch == (1 << 40) + 1


def test_another_epoch_each_time(filled: Registry, tmp_path: Path) -> None:
    """Of two restores from one export neither has the epoch of what was exported."""
    file = exported(filled, tmp_path / "e.tar")
    restore.restore(tmp_path / "n", file, archive.read(file))
    assert marker.read_marker(tmp_path / "n").epoch not in (0, filled.marker.epoch, filled.marker.epoch + 1)


def test_a_volume_without_marker_whose_head_cannot_be_read(filled: Registry) -> None:
    """It may be a registry: nothing is restored over it, and none is made there."""
    filled.layout.marker.unlink()
    filled.layout.head.write_bytes(b"")
    with pytest.raises(Conflict, match="was a registry"):
        restore.check_empty(filled.layout.root)
    with pytest.raises(RegistryLost, match="cannot be read"):
        Registry(filled.layout.root, create=True)


def test_a_volume_that_lost_its_marker_gets_it_back(filled: Registry, tmp_path: Path) -> None:
    """Nothing is restored over it. A marker restored beside it makes it the same registry, as it was."""
    file = exported(filled, tmp_path / "e.tar", files=False)
    release.promote(filled, V1.scope, "a1", "v1", writer="test")
    view, want, root = RegistryView(filled, (V1.scope,)), state(filled), filled.layout.root
    view.refresh()
    filled.layout.marker.unlink()
    with pytest.raises(Conflict, match=r"was a registry.*--root EMPTY import archive.*copy lora-fs\.json"):
        restore.restore(root, file, archive.read(file))
    restore.restore(tmp_path / "beside", file, archive.read(file))
    shutil.copy(tmp_path / "beside/lora-fs.json", root)
    assert state(Registry(root)) == want
    view.refresh(force=True)
    assert view.desired.frozen is None
    assert served(Registry(root), V1.scope)["a1"] == "v1"


def test_a_restore_refuses_other_files(filled: Registry, tmp_path: Path) -> None:
    """A folder that is not the export's is in the way and stays."""
    file = exported(filled, tmp_path / "e.tar")
    theirs = write_adapter(tmp_path / "n/default/tiny/v1/a1", 9)
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    with pytest.raises(Conflict, match="holds other bytes"):
        restore.restore(tmp_path / "n", file, archive.read(file))
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
    assert not (tmp_path / "n/lora-fs.json").exists()


def compacted(registry: Registry, scope: Scope) -> None:
    registry.close()
    assert collect(gc.find(registry, scope, frozenset(), 0.0, history_s=0.0)) == {}


@pytest.mark.parametrize("at", ["listed", "read"])
@pytest.mark.parametrize("what", ["promoted", "forgotten"])
def test_an_export_reads_again_what_gc_removed(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, what: str
) -> None:
    """A generation is superseded and removed, or all of a name, behind the listing or behind the read."""
    scope, done = V1.scope, list[str]()
    other = Registry(filled.layout.root)
    if what == "forgotten":
        name = "b1"
        shutil.rmtree(filled.layout.artifact(AdapterKey(*scope, "v1", "b1")))
    else:
        name = "a1"

    def meanwhile() -> None:
        if not done:
            done.append(name)
            if what == "promoted":
                release.promote(other, scope, "a1", "v1", writer="test")
            for _ in range(3):
                compacted(other, scope)

    read, scan, scans = Registry.read, Registry.scan, list[Any]()

    def behind_the_listing(self: Registry, *args: Any, **kwargs: Any) -> Any:
        found = scan(self, *args, **kwargs)
        if self is filled:
            scans.append(found)
            if len(scans) == (1 if what == "promoted" else 2):  # of pointers, of records
                meanwhile()
        return found

    def behind_the_read(self: Registry, series: Any, *args: Any) -> Any:
        found = read(self, series, *args)
        if self is filled and series.name == name:
            meanwhile()
        return found

    if at == "listed":
        monkeypatch.setattr(Registry, "scan", behind_the_listing)
    else:
        monkeypatch.setattr(Registry, "read", behind_the_read)
    file = exported(filled, tmp_path / "e.tar")
    monkeypatch.undo()
    assert done == [name]
    assert restore.restore(tmp_path / "new", file, archive.read(file)) == []
    assert state(Registry(tmp_path / "new")) == state(filled)
