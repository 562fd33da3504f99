"""The power goes at any moment, and what was not synced may be gone: readers find old or new.

The calls are those of a real writer, seen by strace; the disk is a model (``power``). That the
model finds what it is for is tried with writers that forget a sync.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import LoraFsError
from tests.crash import tracing
from tests.crash.acts import ACTS, Stage, check, stage
from tests.crash.power import RECORDED, Loss, Recorder, Sync, losses, recorded

pytestmark = pytest.mark.usefixtures("at_once")
# All disks of gc are tried in every run: they take seconds, and the short form misses some that lost files.
LONG = {what: () if what == "gc" else pytest.mark.long for what in ACTS}


def record(staged: Stage, folder: Path) -> Recorder:
    root = staged.copy(folder / "recorded")
    outcome = tracing.run(root, staged.act, folder, RECORDED)
    assert outcome.raised is None
    shutil.rmtree(root)
    return recorded(root, staged.template, outcome.trace)


def survive(staged: Stage, recorder: Recorder, loss: Loss, folder: Path) -> None:
    """Write out what the disk holds, and check it."""
    root = loss.tree.write(folder / "after-power-loss", like=staged.template)
    try:
        check(staged, root, loss.acknowledged, ended=loss.at == len(recorder.steps))
    except Exception as error:
        last = recorder.steps[loss.at - 1] if loss.at else "the beginning"
        error.add_note(f"after {str(last)[:200]}, kept: {loss.kept[:200]}")
        raise
    finally:
        shutil.rmtree(root)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("what", "each"),
    [
        *((what, False) for what in ACTS),
        *(pytest.param(what, True, marks=LONG[what]) for what in ACTS),
    ],
)
def test_power_lost_at_every_step(what: str, scratch: Path, each: bool) -> None:
    """After every step, with the unsynced ones lost: old or new, and nothing acknowledged is gone."""
    survive_all(stage(scratch, what), scratch, each=each)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("what", "each"),
    [("register", False), *(pytest.param(what, True, marks=pytest.mark.long) for what in ACTS)],
)
def test_power_lost_without_links(what: str, each: bool, scratch: Path) -> None:
    """Where link() is missing a file has its name before its bytes: half ones are never read."""
    survive_all(stage(scratch, what, tier="lww"), scratch, each=each)


def survive_all(staged: Stage, scratch: Path, *, each: bool) -> None:
    recorder, tried = record(staged, scratch), 0
    for loss in losses(recorder, each=each):
        survive(staged, recorder, loss, scratch)
        tried += 1
    print(f"{staged.tier}: {len(recorder.steps)} steps, {tried} disks, 0 acknowledged lost")


FORGOTTEN: dict[str, Callable[[Sync], bool]] = {
    "a record's bytes": lambda sync: "/v1/.tmp-" not in sync.path,
    "a pointer's bytes": lambda sync: "/.active/.tmp-" not in sync.path,
    "a record's name": lambda sync: not sync.path.endswith("/v1"),
    "a pointer's name": lambda sync: not sync.path.endswith("/.active"),
    "a copy's bytes": lambda sync: not sync.path.endswith(".safetensors"),
    "a copy's names": lambda sync: ".incoming/" not in sync.path or sync.path.count("/") > 3,
    "an upload's names": lambda sync: not re.search(r"\.incoming/\w+(/adapter)?$", sync.path),
    "a scope's folders": lambda sync: sync.path not in (".", "default", "default/tiny"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_forgotten_sync_is_found(what: str, scratch: Path) -> None:
    """A writer that leaves one kind of sync out loses something on one of the disks."""
    staged = stage(scratch, "upload" if "upload" in what else "register")
    recorder = record(staged, scratch)
    assert any(isinstance(step, Sync) and not FORGOTTEN[what](step) for step in recorder.steps)

    def try_all() -> None:
        for loss in losses(recorder, each=False, synced=FORGOTTEN[what]):
            survive(staged, recorder, loss, scratch)

    with pytest.raises((AssertionError, LoraFsError, OSError)):
        try_all()
