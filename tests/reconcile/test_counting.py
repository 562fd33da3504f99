"""The bytes in use in a stage folder are known without a look, and never too few."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.stage.cache import GRACE_S, Copies
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull
from lora_fs.sidecar.reconcile.stage.looks import discard, signature
from tests.reconcile.test_plan import RECORD

SIZE = 10
CHANGES = ("mkdir", "rename", "pwrite", "chmod", "rmdir")


def record(number: int, name: str = "sql") -> Record:
    spec = RECORD.spec.model_copy(update={"digest": f"sha256:{number:064x}", "size_bytes": SIZE})
    return RECORD.model_copy(update={"name": name, "spec": spec})


class Process(Copies):
    """A process that uses every copy that it made."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__(folder, max_bytes=room * SIZE)
        self.prepare("us")


def make(copies: Process, one: Record) -> None:
    """Make a copy as a load does."""
    copies.use_also(copies.path(one))
    with copies.making(one, Mock()), copies.room_for(one, make_room=True) as copying:
        copying.mkdir()
        (copying / "weights").write_bytes(bytes(SIZE))
        copies.place(copying, one)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Another process that shares the folder: it has room for so many copies."""
    made: list[Process] = []

    def begin(room: int = 1000) -> Process:
        made.append(Process(tmp_path / "stage", room))
        return made[-1]

    yield begin
    for one in made:
        one.close()


@contextmanager
def calls() -> Iterator[dict[str, int]]:
    """Count the calls that look at what is there."""
    counts = dict.fromkeys(("listdir", "lstat", "stat", "scandir"), 0)
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            real = getattr(os, name)

            def counting(*args: object, name: str = name, real: Callable[..., object] = real, **more: object):  # type: ignore[no-untyped-def]
                counts[name] += 1
                return real(*args, **more)

            patch.setattr(os, name, counting)
        yield counts


def test_a_copy_costs_as_many_calls_whatever_lies_beside_it(process: Callable[..., Process]) -> None:
    """A fleet of n adapters that comes up in one folder would look at n * n copies else."""
    ours = process()
    seen = []
    for number in range(40):
        with calls() as counted:
            make(ours, record(number))
        seen.append(sum(counted.values()))
    assert seen[-1] == seen[1]


def test_nothing_is_kept_of_what_others_removed(process: Callable[..., Process]) -> None:
    """Of two processes either may remove a copy that nobody uses, whoever made it."""
    ours, theirs = process(), process()
    for number in range(3):
        make(ours, record(number))
    ours.use(())
    theirs.sweep()
    theirs.max_bytes = SIZE  # so that its next copy takes the room of all of these
    for path in theirs._unused_since:
        theirs._unused_since[path] -= GRACE_S
    make(theirs, record(3))
    ours.sweep()
    kept = (ours._copies, set(ours._unused_since), ours._known, set(map(str, ours._verified)))
    assert kept == ({ours.path(record(3))}, {ours.path(record(3))}, set(), set())


def test_a_copy_that_another_process_removes_is_not_taken(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is about to use it waits for the end of the removal, and makes it anew."""
    ours, theirs, one = process(), process(), record(1)
    make(theirs, one)
    theirs.use(())
    copy = Path(ours.path(one))
    ours._verified[copy] = signature(copy)
    with ExitStack() as removal:
        assert removal.enter_context(theirs._lock.removing(str(copy)))

        def end(_: float) -> None:
            discard(copy, copy.parent.parent)
            removal.close()

        monkeypatch.setattr(time, "sleep", end)
        ours.use_also(str(copy))
        assert ours.kept(one) is None


def test_what_another_process_adds_is_seen_at_once(process: Callable[..., Process]) -> None:
    """Neither asks the other, and neither exceeds the bound."""
    ours, theirs = process(room=3), process(room=3)
    make(ours, record(1))
    make(theirs, record(2))
    make(ours, record(3))
    for one in (ours, theirs):
        with pytest.raises(StageFull):
            make(one, record(4))


def test_a_second_name_of_the_same_bytes_is_counted(process: Callable[..., Process]) -> None:
    ours, theirs = process(room=3), process(room=3)
    make(ours, record(1))
    make(theirs, record(1, "other"))
    make(ours, record(1, "third"))
    with pytest.raises(StageFull):
        make(theirs, record(4))


def test_what_a_person_removes_is_free(process: Callable[..., Process]) -> None:
    """Nobody says so: it is found out before a load is refused."""
    ours = process(room=2)
    for number in range(2):
        make(ours, record(number))
    shutil.rmtree(Path(ours.path(record(0))).parent)
    make(ours, record(5))
    with pytest.raises(StageFull):
        make(ours, record(6))


def test_copies_that_fail_take_no_room(process: Callable[..., Process]) -> None:
    ours, theirs = process(room=1), process(room=1)
    for failing in (ours, theirs, ours):
        for number in range(3):
            one = record(number)
            with (
                pytest.raises(VolumeUnavailable),
                failing.making(one, Mock()),
                failing.room_for(one, make_room=False),
            ):
                raise VolumeUnavailable("gone")
    make(theirs, record(7))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", range(10))
def test_a_process_that_is_killed_at_a_call(
    process: Callable[..., Process], number: int, tmp_path: Path
) -> None:
    """Whatever it had done by then: who knew the bytes before keeps the bound, and gets all there is."""
    ours = process(room=3)
    make(ours, record(1))
    _killed_at(number, lambda: make(process(room=3), record(2)))
    there = _bytes_there(tmp_path / "stage")
    assert there in (SIZE, 2 * SIZE)
    more = 3 - there // SIZE
    for fresh in range(10, 10 + more):
        make(ours, record(fresh))
    assert _bytes_there(tmp_path / "stage") == 3 * SIZE
    with pytest.raises(StageFull):
        make(ours, record(99))


def _killed_at(number: int, act: Callable[[], object]) -> None:
    """Act in a process that ends at its ``number``-th call that changes the disk."""
    child = os.fork()
    if not child:
        left = number
        try:
            for name in CHANGES:
                real = getattr(os, name)

                def ending(*args: object, real: Callable[..., object] = real, **more: object):  # type: ignore[no-untyped-def]
                    nonlocal left
                    if not left:
                        os._exit(9)
                    left -= 1
                    return real(*args, **more)

                setattr(os, name, ending)
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 9)


def _bytes_there(folder: Path) -> int:
    files = (path.lstat() for path in folder.glob("[0-9a-f]*/*/*"))
    return sum(status.st_size for status in files if stat.S_ISREG(status.st_mode))
