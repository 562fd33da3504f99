"""Staging against real files: what the engine is given is whole, and the stage keeps its bound."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lora_fs.sidecar.errors import InputError, InvalidAdapter, VolumeUnavailable
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.reconcile.stage import cache, looks
from lora_fs.sidecar.reconcile.stage.cache import GRACE_S
from lora_fs.sidecar.reconcile.stage.disk_errors import REREAD_S, StageFull
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.looks import Signature, copy_name
from lora_fs.sidecar.registry.lifecycle import artifacts, ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter
from tests.registry.faults import fail, full_below

pytestmark = pytest.mark.anyio

SCOPE = Scope("default", "tiny")
WEIGHTS = "adapter_model.safetensors"
Register = Callable[[str, int], Record]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "volume", create=True)


@pytest.fixture
def register(registry: Registry, tmp_path: Path) -> Register:
    """``register(name, seed)``: equal seeds are equal bytes."""

    def run(name: str, seed: int) -> Record:
        folder = write_adapter(tmp_path / f"source-{name}", seed)
        wanted = Registration(name, folder, folder.as_uri())
        return ingest.register(registry, SCOPE, wanted, Expectation(), writer="test").record

    return run


async def test_what_was_allowed_at_registration(registry: Registry, stager: Stager, tmp_path: Path) -> None:
    """A replica allows it, too, of that adapter alone; never what runs code: its operator decides that."""
    folder = write_adapter(tmp_path / "source")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    wanted = Registration("dora", folder, folder.as_uri())
    expectation = Expectation(allow=frozenset({"dora", "pickle"}))
    record = ingest.register(registry, SCOPE, wanted, expectation, writer="test").record
    assert record.spec.allowed == ("dora", "pickle")
    assert Path(await stager.stage(record)).is_dir()
    other = tmp_path / "other"
    bare = record.model_copy(update={"spec": record.spec.model_copy(update={"allowed": ("pickle", "odd")})})
    with pytest.raises(InvalidAdapter, match="dora"):
        await make_stager(registry, other).stage(bare)
    pickled = write_adapter(tmp_path / "pickled")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    wanted = Registration("pickled", pickled, pickled.as_uri())
    record = ingest.register(registry, SCOPE, wanted, expectation, writer="test").record
    with pytest.raises(InvalidAdapter, match="pickle"):
        await stager.stage(record)


def make_stager(registry: Registry, folder: Path, max_bytes: int = 1 << 30, timeout_s: float = 20) -> Stager:
    """A stager as the sidecar makes it."""
    stager = Stager(
        folder,
        lambda record: registry.layout.resolve(record.spec.path),
        Expectation(),
        max_bytes=max_bytes,
        timeout_s=timeout_s,
    )
    stager.prepare()
    return stager


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The cache's clock."""
    one = Clock()
    monkeypatch.setattr(cache, "time", one)
    return one


@pytest.fixture
def stager(registry: Registry, tmp_path: Path) -> Stager:
    return make_stager(registry, tmp_path / "stage")


def artifact(registry: Registry, record: Record) -> Path:
    """Where the adapter's own files lie on the volume."""
    return registry.layout.resolve(record.spec.path)


async def test_who_copies_steps_aside_before(stager: Stager, register: Register) -> None:
    """In the thread that copies, and while there is no copy yet."""
    record = register("a", 1)
    seen: list[tuple[bool, bool]] = []
    main = threading.get_ident()
    stager.aside = lambda: seen.append((threading.get_ident() != main, Path(stager.path(record)).exists()))
    await stager.stage(record)
    assert seen == [(True, False)]


async def test_the_copy_is_whole_and_named_by_its_content(
    stager: Stager, register: Register, registry: Registry
) -> None:
    """Same bytes, whatever happens to the volume afterwards."""
    record = register("a", 1)
    copy = Path(await stager.stage(record))
    assert record.spec.digest.removeprefix("sha256:") in copy.parts
    original = (artifact(registry, record) / WEIGHTS).read_bytes()
    shutil.rmtree(artifact(registry, record))
    assert (copy / WEIGHTS).read_bytes() == original
    assert await stager.stage(record) == str(copy)


@pytest.mark.parametrize("damage", ["truncate", "overwrite", "remove file", "remove folder", "fifo"])
async def test_bytes_that_are_not_the_registered_ones(
    stager: Stager, register: Register, registry: Registry, damage: str
) -> None:
    """Whatever was done to the volume's files, the engine is given nothing, and is told why."""
    record = register("a", 1)
    weights = artifact(registry, record) / WEIGHTS
    match damage:
        case "truncate":
            os.truncate(weights, weights.stat().st_size - 7)
        case "overwrite":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "remove file":
            weights.unlink()
        case "remove folder":
            shutil.rmtree(weights.parent)
        case "fifo":
            weights.unlink()
            os.mkfifo(weights)
    with pytest.raises(InvalidAdapter):
        await stager.stage(record)
    assert [path.name for path in Path(stager.path(record)).parents[1].iterdir()] == [".lock"]


async def test_a_full_stage(registry: Registry, register: Register, tmp_path: Path) -> None:
    """Copies made at once keep the bound together, and one that has no room says what to do."""
    records = [register(f"a{n}", n) for n in range(4)]
    size = max(record.spec.size_bytes for record in records)
    stager = make_stager(registry, tmp_path / "stage", max_bytes=2 * size)
    stager.use(map(stager.path, records))
    results = await asyncio.gather(*(stager.stage(r) for r in records), return_exceptions=True)
    refused = [result for result in results if isinstance(result, VolumeUnavailable)]
    assert len(refused) == 2
    assert all("--stage-max-bytes" in str(error) for error in refused)
    assert sum(isinstance(result, str) for result in results) == 2


async def test_a_stage_that_is_gone(registry: Registry, register: Register, tmp_path: Path) -> None:
    """Told as what may be there again, and not as a defect of this program."""
    stager, record = make_stager(registry, tmp_path / "stage"), register("a", 0)
    shutil.rmtree(tmp_path / "stage")
    with pytest.raises(VolumeUnavailable, match="cannot stage"):
        await stager.stage(record)
    (tmp_path / "stage").mkdir()
    assert Path(await stager.stage(record)).is_dir()


async def test_a_stage_that_is_gone_is_made_anew(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """By whoever comes by, as after a cleaner of temporary folders: a replica that loads nothing is ready."""
    stager, record = make_stager(registry, tmp_path / "stage"), register("a", 0)
    await stager.stage(record)
    shutil.rmtree(tmp_path / "stage")
    stager.sweep()
    assert not stager.has(record)
    assert Path(await stager.stage(record)).is_dir()


async def test_a_stage_that_changes_while_it_is_looked_through(
    registry: Registry, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes copies, and what it is copying goes away: the rest is seen."""
    stager, records = (
        make_stager(registry, tmp_path / "stage"),
        [register(name, n) for n, name in enumerate("abc")],
    )
    paths = [Path(await stager.stage(record)) for record in records]
    (tmp_path / "stage" / ".copying-1").mkdir()
    looked, gone = os.lstat, list[Path]()

    def looking(path: str | Path, **options: Any) -> os.stat_result:
        if Path(path) == paths[0].parent and not gone:
            gone.append(paths[0])
            shutil.rmtree(paths[0].parent)
        assert ".copying-" not in str(path)
        return looked(path, **options)

    monkeypatch.setattr(os, "lstat", looking)
    stager.use(map(str, paths))
    stager.sweep()
    assert [stager.has(record) for record in records] == [False, True, True]
    assert gone == paths[:1]


async def test_a_stage_that_may_not_be_looked_into(
    registry: Registry, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as the stage's, and tried again as anything that may pass."""
    stager, record = make_stager(registry, tmp_path / "stage"), register("a", 0)
    is_dir = Path.is_dir

    def refusing(path: Path) -> bool:
        if tmp_path / "stage" in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_dir(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", refusing)
        with pytest.raises(VolumeUnavailable, match="LORA_FS_STAGE_DIR"):
            await stager.stage(record)
    assert Path(await stager.stage(record)).is_dir()


@pytest.mark.parametrize("when", ["written", "placed"])
async def test_a_stage_s_disk_that_is_full(
    registry: Registry, register: Register, tmp_path: Path, when: str
) -> None:
    """The error blames the stage folder and says what to do; it names no path of either."""
    stager, record = make_stager(registry, tmp_path / "stage"), register("a", 0)
    with pytest.MonkeyPatch.context() as patch:
        if when == "written":
            full_below(patch, tmp_path / "stage")
        else:
            fail(patch, "rename", errno.ENOSPC, when=lambda path, *_: str(tmp_path / "stage") in str(path))
        with pytest.raises(VolumeUnavailable, match="--stage-max-bytes") as told:
            await stager.stage(record)
    assert type(told.value) is VolumeUnavailable
    assert "LORA_FS_STAGE_DIR" in str(told.value)
    assert str(tmp_path) not in str(told.value)
    assert "volume" not in str(told.value)
    assert [path.name for path in (tmp_path / "stage").iterdir() if path.name.startswith(".copying")] == []
    assert Path(await stager.stage(record)).is_dir()


async def test_a_volume_that_cannot_be_read_is_no_full_stage(
    registry: Registry, register: Register, stager: Stager
) -> None:
    """The source's trouble is told with the source's path."""
    record = register("a", 0)
    weights = artifact(registry, record) / WEIGHTS
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "open", errno.EIO, when=lambda path, *_, **__: path == WEIGHTS)
        with pytest.raises(VolumeUnavailable, match=re.escape(f"cannot copy {weights}: ")):
            await stager.stage(record)
    assert Path(await stager.stage(record)).is_dir()


async def test_it_begins_at_once(registry: Registry, register: Register, stager: Stager) -> None:
    """What the caller does before it waits is done beside the copying."""
    record, begun = register("one", 1), threading.Event()

    def locate(record: Record) -> Path:
        begun.set()
        return artifact(registry, record)

    stager._locate = locate
    staging = stager.stage(record)
    assert begun.wait(20)
    assert Path(await staging).is_dir()


async def test_a_volume_that_hangs(registry: Registry, register: Register, tmp_path: Path) -> None:
    """The wait is bounded, and adapters on a volume that answers are staged meanwhile."""
    stuck, good = register("stuck", 1), register("good", 2)
    stager = make_stager(registry, tmp_path / "stage", timeout_s=0.2)
    folder = artifact(registry, stuck)
    hang, ended = threading.Event(), threading.Event()

    def locate(record: Record) -> Path:
        if record.name == "stuck":
            hang.wait(20)
            ended.set()
        return folder

    stager._locate = locate
    with pytest.raises(VolumeUnavailable, match="stuck"):
        await stager.stage(stuck)
    folder = artifact(registry, good)
    stager._timeout_s = 20  # how soon a good one is copied is not the promise
    assert Path(await stager.stage(good)).is_dir()
    hang.set()
    assert await asyncio.to_thread(ended.wait, 20)


async def test_a_copy_ends_at_its_next_block(
    stager: Stager, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the replica ends; nothing of it is left, and no other begins."""
    record, read, written = register("one", 1), artifacts._parts, 0

    def parts(*args: Any) -> Iterator[memoryview]:
        nonlocal written
        for part in read(*args):
            written += 1
            stager.end()
            yield part

    monkeypatch.setattr(artifacts, "_parts", parts)
    for _ in range(2):
        with pytest.raises(VolumeUnavailable, match="this replica ends"):
            await stager.stage(record)
    assert written == 1
    assert not list(Path(stager._folder).glob(".copying-*"))


async def test_copies_are_removed_when_nobody_needs_them(
    stager: Stager, register: Register, clock: Clock
) -> None:
    """Not while they are in use, not at once, and not another adapter's."""
    one, two = register("one", 1), register("two", 2)
    paths = [await stager.stage(record) for record in (one, two)]
    one_unused = paths[1:]
    for used, later_s in (
        (paths, 10),
        (one_unused, GRACE_S - 1),
        (paths, GRACE_S),
        (one_unused, GRACE_S - 1),
    ):
        stager.use(used)
        stager.sweep()
        clock.now += later_s
        stager.sweep()
        assert Path(paths[0]).is_dir()
    clock.now += 1
    stager.sweep()
    assert not Path(paths[0]).exists()
    assert Path(paths[1]).is_dir()


async def test_copies_of_registered_adapters_stay(stager: Stager, register: Register, clock: Clock) -> None:
    """The next load of one that left the engine reads no volume."""
    record = register("one", 1)
    path = await stager.stage(record)
    assert stager.has(record)
    for _ in range(2):
        stager.sweep({copy_name(record)})
        clock.now += 10 * GRACE_S
    assert Path(path).is_dir()
    assert stager.has(record)
    stager.sweep()
    assert not stager.has(record)


async def test_an_idle_copy_makes_room(registry: Registry, tmp_path: Path, register: Register) -> None:
    """The one longest out of use goes, never one that is in use."""
    old, used, new = (register(name, seed) for seed, name in enumerate(("old", "used", "new")))
    stager = make_stager(registry, tmp_path / "small", max_bytes=2 * old.spec.size_bytes + 10)
    paths = {record.name: await stager.stage(record) for record in (old, used)}
    stager.use(paths.values())
    with pytest.raises(VolumeUnavailable, match="no room"):
        await stager.stage(new)
    stager.use([paths["used"]])
    await stager.stage(new)
    assert (stager.has(old), stager.has(used), stager.has(new)) == (False, True, True)


async def test_copies_under_way_keep_the_bound_together(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """There is room for one: while it is being copied a second finds none, and does when it is over."""
    first, second = register("a", 1), register("b", 2)
    stager = make_stager(registry, tmp_path / "stage", max_bytes=first.spec.size_bytes * 3 // 2)
    with (
        stager.making(first, Mock()),
        stager.room_for(first, make_room=True),
        pytest.raises(StageFull),
        stager.room_for(second, make_room=True),
    ):
        pass
    with stager.making(second, Mock()), stager.room_for(second, make_room=True):
        pass


async def test_two_processes_share_a_stage(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """Each counts what the other has put there, unannounced, and leaves it what it uses, however long."""
    old, new = register("old", 0), register("new", 1)
    bound = old.spec.size_bytes + 10
    first, second = (make_stager(registry, tmp_path / "stage", max_bytes=bound) for _ in range(2))
    copy = await first.stage(old)
    first.use([copy])
    for _ in range(3):
        second.sweep()
        clock.now += GRACE_S
        with pytest.raises(VolumeUnavailable, match="no room"):
            await second.stage(new)
    assert Path(copy).is_dir()
    first.close()  # as its process's end does
    clock.now += GRACE_S
    await second.stage(new)
    assert second.has(new)


async def test_another_name_of_bytes_in_use_keeps_no_copy(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """Bytes that are published under ever new names, while one stays loaded, do not fill the disk."""
    used, idle, withdrawn, new = (
        register(name, seed) for name, seed in (("used", 1), ("idle", 1), ("withdrawn", 1), ("new", 2))
    )
    stager = make_stager(registry, tmp_path / "small", max_bytes=3 * used.spec.size_bytes + 10)
    paths = [await stager.stage(record) for record in (used, idle, withdrawn)]
    stager.use(paths[:1])
    stager.sweep({copy_name(used), copy_name(idle)})
    clock.now += GRACE_S
    stager.sweep({copy_name(used), copy_name(idle)})
    assert [Path(path).is_dir() for path in paths] == [True, True, False]
    stager.use(paths[:2])
    stager.use(paths[:1])
    bigger = new.model_copy(
        update={"spec": new.spec.model_copy(update={"size_bytes": 2 * used.spec.size_bytes})}
    )
    with stager.making(bigger, Mock()), stager.room_for(bigger, make_room=True):
        assert [Path(path).is_dir() for path in paths] == [True, False, False]


async def test_a_copy_that_goes_before_the_clock_ticks(
    stager: Stager, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of its folder is that of the last look where the disk's clock ticks in milliseconds."""
    gone, stays = (register(name, 1) for name in ("gone", "stays"))
    for record in (gone, stays):
        await stager.stage(record)

    def discard(copy: Path, folder: Path) -> None:
        before = copy.parent.stat()
        looks.discard(copy, folder)
        os.utime(copy.parent, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(cache, "discard", discard)
    assert stager._remove(stager.path(gone)) == gone.spec.size_bytes
    assert stager._measure() == stays.spec.size_bytes
    stager.sweep()
    assert (stager.has(gone), stager.has(stays)) == (False, True)


async def test_no_empty_folder_stays(stager: Stager, register: Register) -> None:
    """A person removed the copy in it."""
    copy = Path(await stager.stage(register("one", 1)))
    copy.chmod(0o700)
    shutil.rmtree(copy)
    stager.sweep()
    assert not copy.parent.exists()


async def test_other_names_of_the_same_bytes_are_counted(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """Each copy takes its room, under one digest too, also where another process made one of them."""
    one, same, third = register("one", 1), register("same", 1), register("third", 1)
    assert one.spec.digest == same.spec.digest == third.spec.digest
    size = one.spec.size_bytes
    ours, theirs = (make_stager(registry, tmp_path / "stage", max_bytes=9 * size) for _ in range(2))
    await ours.stage(one)
    await ours.stage(same)
    assert ours._measure() == 2 * size
    await theirs.stage(third)
    await asyncio.gather(*(ours.stage(third), theirs.stage(same)))
    for stager in (ours, theirs):
        stager.sweep()
        assert stager._measure() == 3 * size


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
async def test_a_damaged_copy_is_made_anew(stager: Stager, register: Register, damage: str) -> None:
    """What was verified once is verified again before the engine reads it."""
    record = register("one", 1)
    weights = Path(await stager.stage(record)) / WEIGHTS
    whole = weights.read_bytes()
    if damage == "truncated":
        os.truncate(weights, 100)
    elif damage == "flipped":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        weights.unlink()
    assert Path(await stager.stage(record), WEIGHTS).read_bytes() == whole


@pytest.mark.parametrize("removed", ["file", "folder"])
async def test_a_copy_removed_before_its_config_is_read(
    stager: Stager, register: Register, removed: str
) -> None:
    """It is made anew: a request is not refused for what was whole a moment before."""
    record = register("one", 1)
    copy = Path(await stager.stage(record))
    whole = (copy / "adapter_config.json").read_bytes()
    copy.chmod(0o700)
    if removed == "file":
        (copy / "adapter_config.json").unlink()
    else:
        shutil.rmtree(copy)
    assert await stager.config(record) == whole


async def test_a_copy_that_this_process_cannot_open_is_not_damaged(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """However long it has too many files open: another process's engine may use that very copy."""
    record = register("one", 1)
    first, second = (make_stager(registry, tmp_path / "stage") for _ in range(2))
    copy = Path(await first.stage(record))
    seen = copy.stat().st_ino
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            fail(patch, "open", errno.EMFILE, when=lambda path, *_, **__: str(path) == str(copy / WEIGHTS))
            with pytest.raises(VolumeUnavailable, match="ulimit -n"):
                await second.stage(record)
        clock.now += GRACE_S
    assert copy.stat().st_ino == seen
    assert await second.stage(record) == str(copy)


async def test_a_copy_on_a_broken_sector_is_made_anew_elsewhere(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """One error of the disk may pass. An error that repeats for some seconds is the copy's end."""
    record = register("one", 1)
    copy = Path(await make_stager(registry, tmp_path / "stage").stage(record))
    stager, weights = make_stager(registry, tmp_path / "stage"), copy / WEIGHTS
    with pytest.MonkeyPatch.context() as patch, weights.open("rb") as held:  # nothing else has its inode
        broken = os.fstat(held.fileno()).st_ino

        def is_broken(path: object, *_: object, **__: object) -> bool:
            return str(path) == str(weights) and weights.stat().st_ino == broken

        fail(patch, "open", errno.EIO, times=9, when=is_broken)
        for _ in range(2):
            with pytest.raises(VolumeUnavailable, match="disk fails"):
                await stager.stage(record)
        assert weights.stat().st_ino == broken
        clock.now += REREAD_S
        assert await stager.stage(record) == str(copy)
        assert weights.stat().st_ino != broken


async def test_half_done_copies_of_an_earlier_process(stager: Stager, registry: Registry) -> None:
    """A start removes them, and no copy that a living process makes."""
    folder, digest = Path(stager._folder), "5" * 64
    draft = folder / f".copying-{digest}-100"
    assert stager._lock.make(digest)
    draft.mkdir()
    make_stager(registry, folder).close()
    assert draft.is_dir()
    stager.close()
    make_stager(registry, folder).close()
    assert not draft.exists()


async def test_what_else_lies_in_the_folder_stays(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """A stage folder that is set to one in use for something else costs nothing of that, nor any room."""
    folder = tmp_path / "data"
    (folder / "precious" / "thing").mkdir(parents=True)
    (folder / "precious" / "thing" / "file").write_bytes(bytes(1 << 20))
    record = register("a", 1)
    stager = make_stager(registry, folder, max_bytes=record.spec.size_bytes + 10)
    copy = Path(await stager.stage(record))
    for _ in range(2):
        stager.sweep()
        clock.now += GRACE_S
    assert (folder / "precious" / "thing" / "file").is_file()
    assert not copy.exists()


async def test_a_stage_of_another_owner(registry: Registry, tmp_path: Path) -> None:
    """Two registries' replicas would remove each other's copies: the later one is refused, and told why."""
    first, second = (make_stager(registry, tmp_path / "shared") for _ in range(2))
    for stager in (first, second):
        stager.close()
    first.prepare("registry 1")
    with pytest.raises(InputError, match="in use for registry 1, and this is registry 2"):
        second.prepare("registry 2")
    second.prepare("registry 1")
    second.close()
    first.close()
    second.prepare("registry 2")
    second.close()


async def test_what_is_staged_needs_no_volume(registry: Registry, register: Register, tmp_path: Path) -> None:
    """As many copies as there are threads hang, and a copy that is there is verified and given."""
    records = [register(f"a{n}", n) for n in range(9)]
    stager, begun, hang = make_stager(registry, tmp_path / "stage"), threading.Semaphore(0), threading.Event()
    copy = await stager.stage(records[0])

    def locate(record: Record) -> Path:
        begun.release()
        hang.wait(20)
        return artifact(registry, record)

    stager._locate = locate
    stuck = [asyncio.ensure_future(stager.stage(record)) for record in records[1:]]
    for _ in stuck:
        assert begun.acquire(timeout=20)
    seen: list[int] = []
    stager.aside = lambda: seen.append(threading.get_ident())
    try:
        async with asyncio.timeout(5):
            assert await stager.stage(records[0]) == copy
    finally:
        hang.set()
        await asyncio.gather(*stuck)
    assert threading.get_ident() not in seen
    assert len(seen) == 1


async def test_what_was_verified_is_noted_in_turn(stager: Stager, register: Register) -> None:
    """A sweep goes through it under the guard, so nothing is added meanwhile."""
    locked: list[bool] = []

    class Noted(dict[Path, Signature]):
        def __setitem__(self, copy: Path, seen: Signature) -> None:
            locked.append(stager._guard.locked())
            super().__setitem__(copy, seen)

    await stager.stage(register("a", 1))  # the first one looks through the folder
    record = register("b", 2)
    stager._verified = Noted()
    copy = Path(await stager.stage(record))
    os.utime(copy / WEIGHTS)
    assert await stager.stage(record) == str(copy)
    assert locked == [True, True]
