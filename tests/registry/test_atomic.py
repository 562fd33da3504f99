"""The file operations under faults: who won is read back, and a refusal leaves nothing visible."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import CorruptRecord, InputError, UnknownOutcome, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.format.layout import Generation, generation_name
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import Ambiguous, LinkUnsupported, NotRegular, TemporaryNames
from lora_fs.sidecar.registry.volume.folders import make_folder
from tests.registry.conftest import Clock, MakeAdapter
from tests.registry.faults import fail
from tests.registry.test_operations import put, served

REFUSALS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]
DATA = b'{"mine": true}\n'


@pytest.fixture
def names() -> TemporaryNames:
    return TemporaryNames()


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.ESTALE, errno.EPERM])
def test_a_lost_reply_does_not_lose_the_race(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A link that landed and answered an error is ours: the bytes read back are our own."""
    fail(monkeypatch, "link", code, after=True)
    assert atomic.publish(tmp_path / "a", DATA, names)
    names.sweep(wait=True)
    assert left_in(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.EPERM])
def test_the_loser_is_told_whatever_the_error(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Another's bytes under the name are a lost race; some volumes answer EPERM for it."""
    (tmp_path / "a").write_bytes(b"another's")
    fail(monkeypatch, "link", code)
    assert not atomic.publish(tmp_path / "a", DATA, names)
    assert (tmp_path / "a").read_bytes() == b"another's"


def test_a_link_that_did_nothing_is_ambiguous(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error and no name: the write may still land, so it is neither a win nor a loss."""
    monkeypatch.setattr(atomic, "READ_BACK_S", (0.0, 0.0))
    fail(monkeypatch, "link", errno.EIO)
    with pytest.raises(Ambiguous):
        atomic.publish(tmp_path / "a", DATA, names)


def test_no_links_is_said(tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that refuses link() and shows no name has none."""
    fail(monkeypatch, "link", errno.EPERM)
    with pytest.raises(LinkUnsupported):
        atomic.publish(tmp_path / "a", DATA, names)
    names.sweep(wait=True)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link"])
def test_a_refusal_leaves_nothing_visible(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Full, over quota, read-only or forbidden: VolumeUnavailable, and the folder is as it was."""
    with monkeypatch.context() as patch:
        fail(patch, call, code)
        with pytest.raises(VolumeUnavailable, match=os.strerror(code)):
            atomic.publish(tmp_path / "a", DATA, names)
    names.sweep(wait=True)
    assert left_in(tmp_path) == []
    assert atomic.publish(tmp_path / "a", DATA, names)


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_refused_unique_file_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Where link() is missing, a file that could not be written whole does not stay under its name."""
    fail(monkeypatch, call, errno.ENOSPC)
    with pytest.raises(VolumeUnavailable, match="full"):
        atomic.create_unique(tmp_path / "a", DATA)
    assert left_in(tmp_path) == []


def test_a_unique_file_that_cannot_be_taken_back_is_ambiguous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not known to be gone is not gone."""
    fail(monkeypatch, "fsync", errno.EIO)
    fail(monkeypatch, "unlink", errno.EIO)
    with pytest.raises(Ambiguous):
        atomic.create_unique(tmp_path / "a", DATA)


def test_a_refused_hint_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that cannot be replaced stays as it was, without a temporary name beside it."""
    atomic.replace(tmp_path / "HEAD", b"old")
    fail(monkeypatch, "replace", errno.EROFS)
    with pytest.raises(VolumeUnavailable):
        atomic.replace(tmp_path / "HEAD", b"new")
    assert left_in(tmp_path) == ["HEAD"]
    assert atomic.read_bytes(tmp_path / "HEAD") == b"old"


def test_short_writes_and_reads_are_gone_on_with(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that took three bytes, and a read that gave two, lose nothing."""
    write, read = os.write, os.read
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:3]))
    monkeypatch.setattr(os, "read", lambda handle, count: read(handle, min(count, 2)))
    assert atomic.publish(tmp_path / "a", DATA, names)
    assert (tmp_path / "a").read_bytes() == DATA


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_stale_handle_is_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """ESTALE twice and then success reads the file; thrice is VolumeUnavailable, not absence."""
    (tmp_path / "a").write_bytes(DATA)
    with monkeypatch.context() as patch:
        fail(patch, call, errno.ESTALE, times=2)
        assert atomic.read_bytes(tmp_path / "a") == DATA
    fail(monkeypatch, call, errno.ESTALE, times=3)
    with pytest.raises(VolumeUnavailable):
        atomic.read_bytes(tmp_path / "a")


def test_a_stale_folder_is_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ESTALE twice and then success lists it; an error that stays is not an empty folder."""
    (tmp_path / "a").touch()
    with monkeypatch.context() as patch:
        fail(patch, "listdir", errno.ESTALE, times=2)
        assert atomic.list_names(tmp_path) == ["a"]
    fail(monkeypatch, "listdir", errno.EIO)
    with pytest.raises(VolumeUnavailable):
        atomic.list_names(tmp_path)
    assert atomic.list_names(tmp_path / "missing") is None


def look_at_file(path: Path) -> object:
    return atomic.read_bytes(path / "file")


@pytest.mark.parametrize(
    ("call", "look"),
    [
        ("open", look_at_file),
        ("fstat", look_at_file),
        ("listdir", atomic.list_names),
        ("stat", atomic.is_folder),
    ],
)
def test_a_handle_that_stays_stale_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, look: Callable[[Path], object]
) -> None:
    """ESTALE without end is a volume that did not answer: neither absence nor an endless loop."""
    (tmp_path / "file").write_bytes(DATA)
    with monkeypatch.context() as patch:
        calls = fail(patch, call, errno.ESTALE, times=1 << 30)
        with pytest.raises(VolumeUnavailable, match=os.strerror(errno.ESTALE)):
            look(tmp_path)
    assert 1 <= len(calls) <= atomic.TRIES


def test_a_name_that_changes_is_followed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link gone between the look at it and the reading of it says nothing: it is looked at anew."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    real, failures = os.path.realpath, 2

    def changing(path: Path) -> str:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return str(real(path))

    monkeypatch.setattr(os.path, "realpath", changing)
    assert atomic.real_path(tmp_path / "a") == tmp_path / "b"
    failures = 3
    with pytest.raises(VolumeUnavailable, match="cannot tell where"):
        atomic.real_path(tmp_path / "a")


@pytest.mark.parametrize("kind", ["fifo", "socket", "symlink", "folder"])
def test_what_is_no_file_never_blocks(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, kind: str
) -> None:
    """A FIFO, socket, symlink or folder in a record's place is damage, and the one before it serves."""
    put(registry, scope, make_adapter())
    folder = registry.layout.revision(scope, "v1")
    path = folder / generation_name("a1", 2)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(folder, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "symlink":
        path.symlink_to(folder / generation_name("a1", 1))
    else:
        path.mkdir()
    key = AdapterKey(*scope, "v1", "a1")
    with pytest.raises(CorruptRecord):
        registry.read(registry.records(key), Generation(2, ""))
    assert served(registry, scope) == {"a1": "v1"}
    assert registry.latest(registry.records(key))[0].generation == 2


def test_temporary_names_outlive_the_link_by_50_ms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are unlinked no sooner than 50 ms after link() returned, however long it took."""
    clock = Clock()
    names = TemporaryNames(clock)
    link = os.link

    def slow(*args: Any) -> None:
        link(*args)
        clock.now += 10

    monkeypatch.setattr(os, "link", slow)
    assert atomic.publish(tmp_path / "a", DATA, names)
    names.sweep()
    assert len(left_in(tmp_path)) == 2
    clock.now += 0.049
    names.sweep()
    assert len(left_in(tmp_path)) == 2
    clock.now += 0.002
    names.sweep()
    assert left_in(tmp_path) == ["a"]


def test_names_expected_absent_are_never_opened(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look-up fails: on NFS a name that was missed once stays hidden for half a minute."""
    source = make_adapter()
    misses: list[str] = []

    def recorded(call: str) -> None:
        real = getattr(os, call)

        def recording(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return real(path, *args, **kwargs)
            except FileNotFoundError:
                if str(path).startswith(str(registry.layout.root)):
                    misses.append(f"{call} {path}")
                raise

        monkeypatch.setattr(os, call, recording)

    for call in ("open", "stat", "lstat"):
        recorded(call)
    put(registry, scope, source)
    put(registry, scope, source, name="a2")
    served(registry, scope)
    monkeypatch.undo()
    # Lockfiles are taken by look-up, and a copy's random name is used once.
    assert [miss for miss in misses if ".lock" not in miss and ".incoming/" not in miss] == []


def test_a_promote_repeated_after_an_unknown_outcome_writes_nothing(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write landed and was not acknowledged: the same call again returns it, and writes nothing."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter("second", seed=1))
    series = registry.pointers(scope, "a1")
    written = registry.latest(series)[0].generation + 1
    with monkeypatch.context() as patch:
        opened = generation_name("a1", written)
        fail(patch, "open", errno.EIO, when=lambda path, *_, **__: str(path).endswith(opened))
        with pytest.raises(UnknownOutcome, match="may have been written; look with `lora-fs list`"):
            release.promote(registry, scope, "a1", "v1", writer="first")
    again = release.promote(registry, scope, "a1", "v1", writer="second")
    assert (again.generation, again.writer) == (written, "first")
    assert registry.latest(series)[0].generation == written


def test_more_than_readers_read_is_refused(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A record of more than 4 MiB would never be read back: it is refused, and nothing is written."""
    put(registry, scope, make_adapter())
    with pytest.raises(InputError, match="4194304"):
        put(registry, scope, make_adapter(seed=1), labels={"k": "v" * (5 << 20)})
    assert served(registry, scope) == {"a1": "v1"}


def test_new_folders_survive_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of every folder that is made is synced."""
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "sync_folder", synced.append)
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


@pytest.mark.parametrize("there", ["no folders", "file", "broken link"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    """It is one sentence, also where the parent is there and mkdir says that it is not, as in /proc."""
    place = tmp_path / "place"
    if there == "no folders":
        place.mkdir()
        fail(
            monkeypatch,
            "mkdir",
            errno.ENOENT,
            times=1 << 30,
            when=lambda path, **_: Path(path) == place / "a",
        )
    elif there == "file":
        place.write_bytes(b"")
    else:
        place.symlink_to("nowhere")
    why = "No such file" if there == "no folders" else "a file or a broken link is in the way"
    with pytest.raises(VolumeUnavailable, match=why):
        make_folder(place / "a" / "b")


def test_whoever_looks_sweeps(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """The last write's temporary names do not wait for the next write: a poll removes what is due."""
    clock = registry_clock(registry)
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    folders = [registry.layout.revision(scope, "v1"), registry.layout.active(scope)]
    assert any(name.startswith(".tmp-") for folder in folders for name in left_in(folder))
    clock.now += 1
    view.refresh()
    assert not [name for folder in folders for name in left_in(folder) if name.startswith(".tmp-")]
    assert left_in(registry.layout.leases) == []


def registry_clock(registry: Registry) -> Clock:
    """Let the registry's temporary names fall due by a clock the test moves."""
    clock = Clock()
    registry._temporary = TemporaryNames(clock)
    return clock


def test_a_name_that_shows_empty_at_first_is_looked_at_again(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that shows the new name before its bytes does not turn a win into a loss."""
    read, answers = os.read, [b"", b""]
    monkeypatch.setattr(os, "read", lambda *args: answers.pop() if answers else read(*args))
    assert atomic.publish(tmp_path / "a", DATA, names)


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A symlink to a good file is no file."""
    (tmp_path / "good").write_bytes(DATA)
    (tmp_path / "link").symlink_to(tmp_path / "good")
    with pytest.raises(NotRegular):
        atomic.read_bytes(tmp_path / "link")


def test_acknowledged_is_synced(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are synced before the link, the folder after it; if that fails nobody is told it is done."""
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def recorded_fsync(handle: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        fsync(handle)

    def recorded_link(*args: Any) -> None:
        done.append("link")
        link(*args)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    assert atomic.publish(tmp_path / "a", DATA, names)
    assert done == ["sync file", "link", "sync folder"]
    fail(monkeypatch, "fsync", errno.EIO, when=lambda handle: stat.S_ISDIR(os.fstat(handle).st_mode))
    with pytest.raises(Ambiguous, match="synced"):
        atomic.publish(tmp_path / "b", DATA, names)


def test_the_folders_of_a_first_generation_are_synced_before_it(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made them may have died before they were synced: each is, up to the root, before the link."""
    record = put(registry, scope, make_adapter()).record
    series = registry.pointers(scope, "b1")
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def recorded_fsync(handle: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def recorded_link(*args: Any) -> None:
        done.append("link")
        link(*args)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    root = registry.layout.root
    Registry(root).append(series, lambda _: {"revision": record.revision}, writer="test")
    above = {str(folder) for folder in series.folder.parents if folder.is_relative_to(root)}
    assert len(above) == 3
    assert above <= {*done[: done.index("link")]}


def test_what_was_never_synced_is_not_acknowledged_twice(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Its writer was not told that it is done; who comes upon it syncs it first, or says it is unknown."""
    put(registry, scope, make_adapter())
    series = registry.pointers(scope, "a1")
    active = series.folder

    def folder(handle: int) -> bool:
        return os.readlink(f"/proc/self/fd/{handle}") == str(active)

    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "fsync", errno.EIO, times=1 << 30, when=folder)
        with pytest.raises(UnknownOutcome):
            registry.append(series, lambda _: {"canary": None}, writer="test")
        with pytest.raises(VolumeUnavailable):
            release.promote(registry, scope, "a1", "v1", writer="test")
        with pytest.raises(VolumeUnavailable):
            put(registry, scope, make_adapter())
    done = release.promote(registry, scope, "a1", "v1", writer="test")
    assert done.generation == 2


def test_a_copy_that_is_not_synced_is_not_registered(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A folder whose name may not survive a power loss is no reason to acknowledge its record."""
    revision = registry.layout.revision(scope, "v1")

    def folder(handle: int) -> bool:
        return os.readlink(f"/proc/self/fd/{handle}") == str(revision)

    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "fsync", errno.EIO, when=folder)
        with pytest.raises(VolumeUnavailable, match="sync"):
            put(registry, scope, make_adapter())
    assert served(registry, scope) == {}
    put(registry, scope, make_adapter())
    assert served(registry, scope) == {"a1": "v1"}


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EIO])
def test_a_volume_without_modes(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """One that refuses chmod keeps what it has, and nothing fails for it."""
    tmp_path.chmod(0o755)
    before = os.umask(0o077)
    try:
        fail(monkeypatch, "chmod", code, times=1 << 30)
        make_folder(tmp_path / "a")
        assert atomic.publish(tmp_path / "a/b", DATA, names)
        atomic.replace(tmp_path / "HEAD", DATA)
    finally:
        os.umask(before)
    assert (tmp_path / "a/b").read_bytes() == (tmp_path / "HEAD").read_bytes() == DATA


def test_a_mode_that_is_right_costs_nothing(
    tmp_path: Path, names: TemporaryNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a common umask no mode is changed, and no folder is looked at for a file."""
    tmp_path.chmod(0o755)
    changed = fail(monkeypatch, "chmod", errno.EIO, times=1 << 30)
    make_folder(tmp_path / "a")
    looked = fail(monkeypatch, "stat", errno.EIO, when=lambda at, **_: at == tmp_path)
    assert atomic.publish(tmp_path / "b", DATA, names)
    assert changed == []
    assert (tmp_path,) not in looked


def test_users_are_not_let_into_each_other_s_folders(tmp_path: Path) -> None:
    """A folder made in one like /tmp may be read as that may, and written by its owner."""
    tmp_path.chmod(0o1777)
    before = os.umask(0o077)
    try:
        make_folder(tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
