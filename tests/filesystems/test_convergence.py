"""Random operations with kills by processes on both mounts: one history, and all readers end in it.

Long mode makes 10,000 acknowledged appends on each filesystem, in rounds that each begin with another
seed and an empty registry. Where there are no hard links less is promised, and that is tried: one
writer is followed in its order; of many nothing acknowledged is lost and all readers end alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from lora_fs.sidecar.registry.store.writer import Registry
from tests.crash.convergence import Pace, Run, converge
from tests.filesystems import serve
from tests.filesystems.rigs import Mounted

NETWORK = Pace(poll_s=0.2, scan_s=1.0, lag_s=60.0, settle_s=1.0, quiet_s=9.0, within_s=30.0)
FOLLOWING = replace(NETWORK, quiet_s=4.0)  # nobody adopts


class Plan(NamedTuple):
    """One filesystem's share: how readers look, and acknowledged appends in short and in long mode."""

    name: str
    flavour: str
    pace: Pace
    short: int
    rounds: int
    each: int


WITHOUT_LINKS = Plan("s3fs", "plain", NETWORK, 8, 3, 100)
PLANS = [
    Plan("tmpfs", "plain", Pace(), 0, 10, 1_000),  # the short one is tests/crash's
    Plan("glusterfs", "plain", NETWORK, 20, 20, 500),
    Plan("sshfs", "tuned", NETWORK, 20, 20, 500),
    Plan("sshfs", "lagging", NETWORK, 0, 20, 500),
    Plan("nfs", "plain", NETWORK, 0, 20, 500),
]


def name_of(plan: Plan) -> str:
    return f"{plan.name}-{plan.flavour}"


def one_round(
    pair: tuple[Path, Path], local: Path, number: int, plan: Plan, appends: int, writers: int, adopting: bool
) -> Run:
    """In a registry of its own on both mounts; runs inside the rig."""
    name = f"converge-{writers}-{appends}-{number}"
    notes = local / f"{plan.flavour}-{name}"
    notes.mkdir(parents=True)
    here, there = (mount / name / "root" for mount in pair)
    here.parent.mkdir()
    Registry(here, create=True).close()
    serve.wait_for(f"the registry on {there}", there.is_dir, notes)
    return converge(
        (here, there),
        notes,
        writers=writers,
        readers=2,
        appends=appends,
        kills=max(3, appends * 3 // 100),
        pace=plan.pace,
        adopting=adopting,
        seed=1_000 * number,
    )


def run(
    volume: Mounted, plan: Plan, rounds: int, appends: int, writers: int = 2, adopting: bool = True
) -> None:
    """Round after round; the sums are printed."""
    runs = []
    for number in range(1, rounds + 1):
        pair, local = volume.pair(plan.flavour), volume.folder / "notes"
        done = volume.run(one_round, pair, local, number, plan, appends, writers, adopting)
        assert done.wrong == [], f"round {number} of {name_of(plan)}"
        assert done.appends >= appends
        runs.append(done)
    print(
        f"{name_of(plan)}, {writers} writers: {sum(run.appends for run in runs)} acknowledged appends, "
        f"{sum(run.generations for run in runs)} generations, {sum(run.kills for run in runs)} kills, "
        f"{sum(run.sights for run in runs)} sights, {sum(run.siblings for run in runs)} siblings, "
        f"{sum(run.halves for run in runs)} half records, settled at most "
        f"{max(run.settled_s for run in runs):.1f} s after the last write, 0 violations"
    )


def params(plans: list[Plan]) -> list[ParameterSet]:
    return [pytest.param(plan.name, plan, id=name_of(plan)) for plan in plans]


@pytest.mark.parametrize(("volume", "plan"), params([p for p in PLANS if p.short]), indirect=["volume"])
def test_processes_on_both_mounts_converge(volume: Mounted, plan: Plan) -> None:
    """Nothing acknowledged is lost, nobody goes back, no half record is read, and ids are unique."""
    run(volume, plan, 1, plan.short)


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("volume", "plan"), params(PLANS), indirect=["volume"])
def test_they_converge_for_long(volume: Mounted, plan: Plan) -> None:
    """The same over many rounds."""
    run(volume, plan, plan.rounds, plan.each)


modes = pytest.mark.parametrize(
    ("rounds", "each"),
    [
        (1, WITHOUT_LINKS.short),
        pytest.param(WITHOUT_LINKS.rounds, WITHOUT_LINKS.each, marks=pytest.mark.long),
    ],
    ids=["short", "long"],
)


@modes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("volume", ["s3fs"], indirect=True)
def test_one_writer_is_followed_without_links(volume: Mounted, rounds: int, each: int) -> None:
    """Killed and started again: what it was acknowledged is there, in its order, on the other mount, too."""
    run(volume, WITHOUT_LINKS._replace(pace=FOLLOWING), rounds, each, writers=1, adopting=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("volume", ["s3fs"], indirect=True)
def test_many_writers_end_alike_without_links(volume: Mounted) -> None:
    """All that was acknowledged lies there; of siblings all readers take the same one and never go back."""
    run(volume, WITHOUT_LINKS, WITHOUT_LINKS.rounds, WITHOUT_LINKS.each)
