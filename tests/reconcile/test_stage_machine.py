"""Any order of what processes do in one stage folder: the bound is kept, and no copy goes that is in use."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.stage import cache
from lora_fs.sidecar.reconcile.stage.cache import GRACE_S, Copies
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull
from lora_fs.sidecar.reconcile.stage.lock import FILE
from lora_fs.sidecar.reconcile.stage.looks import copy_name
from tests.reconcile.test_plan import RECORD
from tests.reconcile.test_staging import Clock

OWNER = "us"
BOUND = 100
SIZES = (30, 40, 40, 60)  # the second and the third are names of the same bytes
PROCESSES = st.integers(0, 1)
NUMBERS = st.integers(0, len(SIZES) - 1)


def record(number: int) -> Record:
    digest = f"sha256:{SIZES[number]:064x}"
    spec = RECORD.spec.model_copy(update={"digest": digest, "size_bytes": SIZES[number]})
    return RECORD.model_copy(update={"name": f"a{number}", "spec": spec})


class _TakenError(Exception):
    pass


class Process:
    """One sidecar: its view of the folder, what its engine has, and the copies it makes."""

    def __init__(self, folder: Path) -> None:
        self.copies = Copies(folder, max_bytes=BOUND)
        self.copies.prepare(OWNER)
        self.used: set[int] = set()
        self.seen: set[int] = set()  # in use, and there
        self.makes: dict[int, tuple[ExitStack, Path]] = {}


class Folder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stage-"))
        self.clock, self._patch = Clock(), pytest.MonkeyPatch()
        self._patch.setattr(cache, "time", self.clock)
        self.processes = [Process(self.folder) for _ in range(2)]
        self.rubbish = itertools.count()

    def teardown(self) -> None:
        self._patch.undo()
        shutil.rmtree(self.folder)

    @rule(at=PROCESSES, number=NUMBERS, make_room=st.booleans())
    def begin(self, at: int, number: int, make_room: bool) -> None:
        """A load wants the copy: it is used, and made if nobody makes it and it is not there."""
        process, one = self.processes[at], record(number)
        process.used.add(number)
        self._note(process)
        if Path(process.copies.path(one)).is_dir():
            return
        stack = ExitStack()
        try:
            stack.enter_context(process.copies.making(one, _taken))
            assert not any(number in other.makes for other in self.processes)
            copying = stack.enter_context(process.copies.room_for(one, make_room=make_room))
            process.makes[number] = stack, copying
        except (_TakenError, StageFull):
            stack.close()

    @rule(at=PROCESSES, number=NUMBERS, whole=st.booleans())
    def end(self, at: int, number: int, whole: bool) -> None:
        process = self.processes[at]
        if number not in process.makes:
            return
        stack, copying = process.makes.pop(number)
        with stack:
            copying.mkdir()
            (copying / "file").write_bytes(bytes(SIZES[number]))
            if whole:
                process.copies.place(copying, record(number))

    @rule(at=PROCESSES, number=NUMBERS)
    def unload(self, at: int, number: int) -> None:
        process = self.processes[at]
        process.used.discard(number)
        self._note(process)

    @rule(at=PROCESSES, registered=st.sets(NUMBERS), passes_s=st.sampled_from([0.0, GRACE_S]))
    def sweep(self, at: int, registered: set[int], passes_s: float) -> None:
        self.clock.now += passes_s
        self.processes[at].copies.sweep({copy_name(record(number)) for number in registered})

    @precondition(lambda self: any(process.makes or process.used for process in self.processes))
    @rule(at=PROCESSES)
    def kill(self, at: int) -> None:
        """Its locks go with it; what it was making stays, and nobody removes it but the next who counts."""
        self.processes[at].copies.close()
        self.processes[at] = Process(self.folder)

    @rule(number=NUMBERS)
    def a_person_removes_a_copy(self, number: int) -> None:
        shutil.rmtree(self.processes[0].copies.path(record(number)), ignore_errors=True)
        for process in self.processes:
            process.seen.discard(number)

    @rule(cut=st.booleans())
    def the_generation_is_lost(self, cut: bool) -> None:
        """As an earlier version leaves the file; or something else writes into it, and no number twice."""
        with (self.folder / FILE).open("r+b") as file:
            file.truncate(len(OWNER))
            if not cut:
                file.seek(len(OWNER))
                file.write(b"\0" + next(self.rubbish).to_bytes(8))

    @invariant()
    def keeps_the_bound(self) -> None:
        placed = sum(file.stat().st_size for file in self.folder.glob("[0-9a-f]*/*/*"))
        reserved = sum(SIZES[number] for process in self.processes for number in process.makes)
        assert placed + reserved <= BOUND

    @invariant()
    def no_copy_in_use_is_gone(self) -> None:
        for process in self.processes:
            there = {number for number in process.used if Path(process.copies.path(record(number))).is_dir()}
            assert process.seen <= there
            process.seen = there

    def _note(self, process: Process) -> None:
        process.copies.use([process.copies.path(record(number)) for number in process.used])
        process.seen &= process.used


def _taken() -> None:
    raise _TakenError


TestFolder = Folder.TestCase
TestFolder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
