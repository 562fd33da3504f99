"""Five minutes of chaos on real vLLMs; `make chaos` runs an hour of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from tests.chaos import day, fleet
from tests.e2e import mounts

MINUTES = float(os.environ.get("CHAOS_MINUTES", "5"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.mark.engine
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_no_answer_is_wrong_and_nothing_acknowledged_is_lost(
    farm: EngineFarm, model_dir: Path, adapters: Callable[[int], Path], tmp_path: Path
) -> None:
    """Changes, faults and clients at once: each answer could be right, and the lists are equal at rest."""
    if not mounts.may_mount():
        pytest.skip("no mounts here: the volume needs a size of its own")
    room = tmp_path / "room"
    room.mkdir()
    with (
        mounts.sized(room, 64),
        fleet.started(farm, model_dir, adapters, room, tmp_path) as running,
    ):
        report = day.spend(running, MINUTES * 60, seed=SEED, rest_every_s=60, faults_every_s=(2, 8))
        assert running.ended() == [], "nobody killed them"
        logs = running.log_tails()
    print(report)
    print(*(f"{began:.2f} to {ended:.2f}: {what}" for began, ended, what in report.disturbed), sep="\n")
    if report.seen.failed:
        print(*logs, sep="\n")
    assert report.seen.wrong == []
    assert report.lost == []
    assert report.seen.failed == []
    assert sum(report.seen.right.values()) > 10 * MINUTES
