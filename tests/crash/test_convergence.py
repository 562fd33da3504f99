"""Random registers, withdrawals, promotes, drops and kills: one history, and all readers end in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lora_fs.sidecar.registry.store.writer import Registry
from tests.crash.convergence import Pace, Run, converge, judge
from tests.registry.faults import without_links


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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("appends", "kills"),
    [(60, 5), pytest.param(10_000, 300, marks=pytest.mark.long)],
    ids=["short", "long"],
)
@pytest.mark.parametrize("writers", [1, 2])
def test_they_converge_without_links(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, writers: int, appends: int, kills: int
) -> None:
    """There one writer is followed in its order; of many nothing acknowledged is lost, and all end alike."""
    without_links(monkeypatch)
    root, notes = scratch / "root", scratch / "notes"
    notes.mkdir()
    assert Registry(root, create=True).marker.tier == "lww"
    adopting = writers > 1
    pace = Pace() if adopting else Pace(quiet_s=2.0)
    pair = (root, root)
    run = converge(
        pair, notes, writers=writers, readers=2, appends=appends, kills=kills, pace=pace, adopting=adopting
    )
    assert run.wrong == []
    assert run.appends >= appends
    print(
        f"without links, {writers} writers: {run.appends} acknowledged appends, {run.siblings} siblings, "
        f"{run.halves} half records, {run.kills} kills, {run.sights} sights, 0 violations"
    )
