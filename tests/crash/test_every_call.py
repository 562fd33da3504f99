"""A writer killed at every system call it makes on the volume, and each of those calls failing.

After each: a fresh reader finds the old state or the new one, what was acknowledged is there, the
next one to come completes it without a human, and gc removes whatever else lies there. Short mode
takes evenly spaced points of each act, and one error at each; long mode takes all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import tracing
from tests.crash.acts import ACTS, Stage, check, stage
from tests.crash.tracing import Point

ERRORS = ["EIO", "ENOSPC", "EDQUOT", "ESTALE", "EROFS", "EACCES", "EINTR"]
SHORT = 8  # points of an act in short mode

pytestmark = pytest.mark.usefixtures("at_once")
modes = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["short", "long"]
)


@pytest.fixture(scope="module", params=ACTS)
def staged(request: pytest.FixtureRequest, folder: Path) -> Stage:
    return stage(Path(tempfile.mkdtemp(dir=folder)), request.param)


def every_point(staged: Stage, folder: Path) -> list[Point]:
    """The calls that an undisturbed run makes on the volume."""
    root = staged.copy(folder / "undisturbed")
    outcome = tracing.run(root, staged.act, folder, ["-e", f"trace={tracing.TRACED}"])
    assert outcome.raised is None
    check(staged, root, outcome.acknowledged, ended=True)
    shutil.rmtree(root)
    return tracing.points(root, outcome.trace)


def chosen(points: list[Point], every: bool) -> list[Point]:
    """All of them, or some evenly spaced, the last one included."""
    if every or len(points) <= SHORT:
        return points
    return [points[(number + 1) * len(points) // SHORT - 1] for number in range(SHORT)]


def tamper(staged: Stage, folder: Path, point: Point, how: str) -> tracing.Outcome:
    """Run the act on a fresh volume with one call tampered with, and check what must hold."""
    root = staged.copy(folder / f"{point}-{how.partition('=')[2]}")
    options = ["-e", f"trace={point.call}", "-e", f"inject={point.call}:{how}:when={point.number}"]
    outcome = tracing.run(root, staged.act, folder, options)
    assert outcome.tampered, "the call was not reached"
    try:
        check(staged, root, outcome.acknowledged, ended=not outcome.killed and outcome.raised is None)
    except Exception as error:
        error.add_note(f"{how} at {point}: {point.text.replace(str(root.parent), '')[:300]}")
        error.add_note(f"raised: {outcome.raised}; acknowledged: {outcome.acknowledged}")
        raise
    shutil.rmtree(root)
    return outcome


@modes
def test_killed_at_every_call(staged: Stage, scratch: Path, every: bool) -> None:
    """Killed before any of them: old or new, nothing acknowledged lost, completed by who comes next."""
    points = every_point(staged, scratch)
    killed = 0
    for point in chosen(points, every):
        assert tamper(staged, scratch, point, "signal=KILL").killed
        killed += 1
    print(f"killed at {killed} of {len(points)} calls, 0 acknowledged lost")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ACTS)
def test_killed_at_every_call_without_links(what: str, scratch: Path) -> None:
    """Where link() is missing a half record may lie there: it is never read, and the next is above it."""
    staged = stage(scratch, what, tier="lww")
    points = every_point(staged, scratch)
    for point in points:
        assert tamper(staged, scratch, point, "signal=KILL").killed
    print(f"without links: killed at {len(points)} calls, 0 acknowledged lost")


def faults(points: list[Point], every: bool) -> Iterator[tuple[Point, str]]:
    for at, point in enumerate(chosen(points, every)):
        for error in ERRORS if every else [ERRORS[at % len(ERRORS)]]:
            yield point, error


@modes
@pytest.mark.timeout(3600)
def test_failing_at_every_call(staged: Stage, scratch: Path, every: bool) -> None:
    """Failed with any error: as when killed, and it raises an error of lora-fs's tree or none."""
    fail_each(staged, scratch, every)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("what", "every"),
    [("register", False), *(pytest.param(what, True, marks=pytest.mark.long) for what in ACTS)],
)
def test_failing_at_every_call_without_links(what: str, every: bool, scratch: Path) -> None:
    """Where link() is missing a file that could not be written whole is taken back, or never read."""
    fail_each(stage(scratch, what, tier="lww"), scratch, every)


def fail_each(staged: Stage, scratch: Path, every: bool) -> None:
    points = every_point(staged, scratch)
    refused, failed = 0, 0
    for point, error in faults(points, every):
        refused += tamper(staged, scratch, point, f"error={error}").raised is not None
        failed += 1
    print(f"{staged.tier}: {failed} failures of {len(points)} calls, {refused} told, 0 acknowledged lost")
