"""Random registers, withdrawals, promotes, drops and kills: one history, and all readers end in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lora_fs.sidecar.registry.store import Registry
from tests.crash.convergence import Run, converge, judge


def finds_what_is_lost(root: Path, notes: Path) -> None:
    """The judge sees one generation that is not there, and what was built on it."""
    path = next((root / "default/tiny/.active").glob("*.@00000002.json"))
    body = path.read_bytes()
    path.unlink()
    again = Run()
    judge(root, notes, again, time.monotonic(), 1e9)
    path.write_bytes(body)
    assert any("is lost" in found or "are missing" in found for found in again.wrong)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("appends", "kills"),
    [(150, 8), pytest.param(10_000, 300, marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_real_processes_converge(scratch: Path, appends: int, kills: int) -> None:
    """Nothing acknowledged is lost, nobody goes back, no half record is read, and ids are unique."""
    root, notes = scratch / "root", scratch / "notes"
    notes.mkdir()
    Registry(root, create=True).close()
    run = converge((root, root), notes, writers=2, readers=2, appends=appends, kills=kills)
    assert run.wrong == []
    finds_what_is_lost(root, notes)
    assert run.appends >= appends
    assert run.kills >= kills
    print(
        f"{run.appends} acknowledged appends, {run.generations} generations, {run.kills} kills, "
        f"{run.sights} sights, settled {run.settled_s:.1f} s after the last write, 0 violations"
    )
