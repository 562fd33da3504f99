"""One copy under way per digest, whoever asks: slow, unwanted, hanging and killed ones."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.reconcile.stage.cache import GRACE_S
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.looks import copy_name
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.test_staging import Clock, clock, make_stager
from tests.registry.conftest import write_adapter

pytestmark = pytest.mark.anyio
__all__ = ["clock"]

COPY = "adapter_config.json"
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
        scope = Scope("default", "tiny")
        return ingest.register(registry, scope, wanted, Expectation(), writer="test").record

    return run


class Gate:
    """A volume that answers when it is let to; ``reads``: of each adapter."""

    def __init__(self, registry: Registry, stager: Stager, *closed: str) -> None:
        self.reads: Counter[str] = Counter()
        self.opened, self.begun = threading.Event(), threading.Event()
        self._registry, self._closed, self._stager = registry, closed, stager
        stager._locate = self.locate

    def locate(self, record: Record) -> Path:
        self.reads[record.name] += 1
        if record.name not in self._closed:  # that one has begun when it has its room
            self.begun.set()
        return self._registry.layout.resolve(record.spec.path)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Copies of closed ones hang where room is taken for them already."""
        copy = self._stager._copy

        def hangs(record: Record, *args: object) -> None:
            if record.name in self._closed:
                self.begun.set()
                self.opened.wait(60)
            copy(record, *args)  # type: ignore[arg-type]

        self._stager._copy = hangs  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            self.opened.set()


def under_way(stager: Stager) -> list[Path]:
    return list(stager._folder.glob(".copying-*"))


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.wait, 20)


async def settled(stager: Stager) -> None:
    """All jobs have ended."""
    async with asyncio.timeout(20):
        await asyncio.gather(*(job.result for job in stager._jobs.values()), return_exceptions=True)


async def test_a_slow_copy_is_made_once(registry: Registry, register: Register, tmp_path: Path) -> None:
    """It takes longer than any of eight requests waits: it is one copy, and the ninth is given it."""
    record = register("slow", 1)
    stager = make_stager(registry, tmp_path / "stage", timeout_s=0.05)
    gate = Gate(registry, stager, "slow")
    with gate.hanging():
        for _ in range(8):
            with pytest.raises(VolumeUnavailable, match="it goes on"):
                await stager.stage(record)
        assert len(under_way(stager)) == 1
        assert gate.reads == {"slow": 1}
        stager._timeout_s = 20
        ninth = asyncio.ensure_future(stager.stage(record))
        gate.opened.set()
        assert Path(await ninth, COPY).is_file()
    assert gate.reads == {"slow": 1}
    assert under_way(stager) == []


async def test_who_leaves_does_not_end_the_copy_of_the_others(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """A request that is cancelled leaves the job to who still waits."""
    record, stager = register("a", 1), make_stager(registry, tmp_path / "stage")
    gate = Gate(registry, stager, "a")
    with gate.hanging():
        leaver, stayer = (asyncio.ensure_future(stager.stage(record)) for _ in range(2))
        await begun(gate)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        stager.sweep()  # unregistered, and still wanted
        gate.opened.set()
        assert Path(await stayer).is_dir()


async def test_a_copy_that_nobody_wants_ends(registry: Registry, register: Register, tmp_path: Path) -> None:
    """Its adapter was unregistered, and no request waits: it ends at its next block, and leaves no bytes."""
    record, stager = register("a", 1), make_stager(registry, tmp_path / "stage", timeout_s=0.05)
    gate = Gate(registry, stager, "a")
    with gate.hanging():
        with pytest.raises(VolumeUnavailable):
            await stager.stage(record)
        stager.sweep({copy_name(record)})
        assert not stager._jobs[record.spec.digest].given_up.is_set()
        stager.sweep()
        gate.opened.set()
        await settled(stager)
    assert (under_way(stager), stager.has(record)) == ([], False)
    stager._timeout_s = 20
    assert Path(await stager.stage(record)).is_dir(), "who asks again begins anew"


async def test_a_copy_that_nobody_waits_for_gives_its_room_to_a_request(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """What is made ahead holds all the room: a request takes it, and is not refused."""
    ahead, wanted = register("ahead", 1), register("wanted", 2)
    stager = make_stager(registry, tmp_path / "stage", max_bytes=wanted.spec.size_bytes * 3 // 2)
    gate = Gate(registry, stager, "ahead")

    async def find_room(record: Record, lacks: int, since: float) -> bool:
        gate.opened.set()
        await settled(stager)
        return True

    stager.find_room = find_room
    with gate.hanging():
        making = asyncio.ensure_future(stager.stage(ahead, make_room=False))
        await begun(gate)
        assert Path(await stager.stage(wanted)).is_dir()
        with pytest.raises(VolumeUnavailable):
            await making


async def test_two_names_of_the_same_bytes_are_copied_one_after_the_other(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """The second waits for the first one's job, whatever becomes of that, and has a copy of its own name."""
    first, second = register("first", 1), register("second", 1)
    assert first.spec.digest == second.spec.digest
    stager = make_stager(registry, tmp_path / "stage")
    gate = Gate(registry, stager, "first")
    with gate.hanging():
        stagings = [asyncio.ensure_future(stager.stage(record)) for record in (first, second)]
        await begun(gate)
        assert len(under_way(stager)) == 1
        shutil.rmtree(registry.layout.resolve(first.spec.path))
        gate.opened.set()
        results = await asyncio.gather(*stagings, return_exceptions=True)
    assert "cannot be served" in str(results[0])
    assert results[1] == stager.path(second)


async def test_a_copy_that_comes_into_use_while_room_is_made(
    registry: Registry,
    register: Register,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was chosen to go, and a load took it before it went: it stays."""
    old, new = register("old", 1), register("new", 2)
    stager = make_stager(registry, tmp_path / "stage", max_bytes=old.spec.size_bytes * 3 // 2)
    copy = await stager.stage(old)
    removable = stager._removable

    def chosen() -> list[str]:
        names = removable()
        stager.use([copy])
        return names

    monkeypatch.setattr(stager, "_removable", chosen)
    with pytest.raises(StageFull):
        await stager.stage(new)
    assert Path(copy, COPY).is_file()


async def test_a_stage_folder_that_is_removed_and_made_anew(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """Both processes go on with the new one, and know of each other there, too."""
    record = register("a", 1)
    ours, theirs = (make_stager(registry, tmp_path / "stage") for _ in range(2))
    ours.use([ours.path(record)])
    shutil.rmtree(tmp_path / "stage")
    for stager in (ours, theirs):
        stager.sweep()
    copy = await ours.stage(record)
    for _ in range(3):
        theirs.sweep()
        clock.now += GRACE_S
    assert Path(copy, COPY).is_file()


async def test_staged_files_are_read_only(registry: Registry, register: Register, tmp_path: Path) -> None:
    """Nobody who opens one to write to it truncates what an engine reads; it can be removed all the same."""
    record, stager = register("a", 1), make_stager(registry, tmp_path / "stage")
    copy = Path(await stager.stage(record))
    assert all(not path.stat().st_mode & 0o222 for path in (copy, *copy.iterdir()))
    assert stager._remove(str(copy)) == record.spec.size_bytes
    assert not copy.exists()


OTHER = """
import asyncio, sys
from pathlib import Path
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation

async def main(root, stage, record, does):
    registry, record = Registry(Path(root)), Record.model_validate_json(record)
    locate = lambda one: registry.layout.resolve(one.spec.path)
    stager = Stager(Path(stage), locate, Expectation(), max_bytes=1 << 30, timeout_s=60)
    stager.prepare()
    stager.use([stager.path(record)])
    if does == "copies":
        def hang(*_): print("ready", flush=True); sys.stdin.read()
        stager._copy = hang
    await stager.stage(record)
    print("ready", flush=True)
    sys.stdin.read()

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def other_process(
    registry: Registry, stage: Path, record: Record, does: str
) -> Iterator[subprocess.Popen[str]]:
    """A sidecar beside this one that uses a copy, or hangs while it makes one."""
    command = [
        sys.executable,
        "-c",
        OTHER,
        str(registry.layout.root),
        str(stage),
        record.model_dump_json(),
        does,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


async def test_a_copy_that_another_process_uses(
    registry: Registry, register: Register, tmp_path: Path, clock: Clock
) -> None:
    """It stays for as long as that process lives, and for a while after its end: its engine may live."""
    old, new = register("old", 1), register("new", 2)
    stager = make_stager(registry, tmp_path / "stage", max_bytes=old.spec.size_bytes * 3 // 2)
    copy = Path(stager.path(old))
    with other_process(registry, tmp_path / "stage", old, "uses") as process:
        for _ in range(3):
            stager.sweep()
            clock.now += GRACE_S
            with pytest.raises(StageFull):
                await stager.stage(new)
        assert (copy / COPY).is_file()
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    stager.sweep()
    with pytest.raises(StageFull):
        await stager.stage(new)
    clock.now += GRACE_S
    assert Path(await stager.stage(new)).is_dir()
    assert not copy.exists()


async def test_a_copy_that_another_process_makes(
    registry: Registry, register: Register, tmp_path: Path
) -> None:
    """It is not made twice, and its room is counted; after a ``kill -9`` in the middle it is made here."""
    record, other = register("a", 1), register("b", 2)
    stager = make_stager(registry, tmp_path / "stage", max_bytes=other.spec.size_bytes * 3 // 2)
    with other_process(registry, tmp_path / "stage", record, "copies") as process:
        staging = asyncio.ensure_future(stager.stage(record))
        with pytest.raises(StageFull):
            await stager.stage(other)
        assert len(under_way(stager)) == 1
        assert not staging.done()
        process.send_signal(signal.SIGKILL)
        assert Path(await staging, COPY).is_file()
    assert under_way(stager) == []
