"""What a killed holder's lockfile may hold, and how soon another has the lease: LEASE_S + 2 s at most.

Short mode moves the clock itself, long mode waits. The holder's host is another one, so that nobody can
ask whether its process lives.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.registry.volume.leases import lease
from tests.crash import tracing
from tests.crash.acts import SCOPE, stage
from tests.crash.tracing import Point
from tests.registry.conftest import Clock

TAKEN_WITHIN_S = 2.0  # beyond the lease's own time
ASK_AGAIN_S = 0.1


def left_behind(folder: Path, whole: bool) -> str:
    """The lockfile of a promote that was killed before it wrote its name into it, or soon after."""
    staged = stage(folder, "promote")
    task = f"{SCOPE.namespace}--{SCOPE.model}.lock"
    undisturbed = tracing.run(
        staged.copy(folder / "undisturbed"), staged.act, folder, ["-e", f"trace={tracing.TRACED}"]
    )
    points = tracing.points(folder / "undisturbed", undisturbed.trace)
    writes = next(at for at, point in enumerate(points) if point.call == "write" and task in point.text)
    link = next(point for point in points if point.call == "link")
    point: Point = link if whole else points[writes]
    root = staged.copy(folder / "killed")
    options = ["-e", f"trace={point.call}", "-e", f"inject={point.call}:signal=KILL:when={point.number}"]
    assert tracing.run(root, staged.act, folder, options).killed
    return (root / ".leases" / task).read_text()


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("left", ["whole", "empty", "zeros", "cut"])
def test_a_dead_holders_lease_is_had_in_time(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, left: str, waits: bool
) -> None:
    """Whatever lies there, who keeps asking has the lease within its time and 2 s."""
    text = left_behind(scratch, whole=left != "empty")
    assert bool(text) == (left != "empty")
    told = ["host=elsewhere" if line.startswith("host=") else line for line in text.splitlines()]
    content = "".join(f"{line}\n" for line in told)
    path = scratch / "a.lock"
    path.write_text({"zeros": "\0" * len(content), "cut": content[: len(content) // 2]}.get(left, content))
    clock = Clock()
    if not waits:
        monkeypatch.setattr(time, "monotonic", clock)
    started, had = time.monotonic(), False
    while not had and time.monotonic() - started < 10 * leases.LEASE_S:
        with lease(path, wait_s=ASK_AGAIN_S if waits else 0) as turn:
            had = bool(turn)
            took_s = time.monotonic() - started
        clock.sleep(ASK_AGAIN_S)
    assert had
    assert took_s <= leases.LEASE_S + TAKEN_WITHIN_S
    print(f"{left}: taken over after {took_s:.2f} s of a lease of {leases.LEASE_S} s")
