"""What a killed holder's lockfile may hold, and how soon another has the lease: LEASE_S + 2 s at most.

Short mode takes leases of 0.5 s, long mode the real ones. The holder's host is another one, so that
nobody can ask whether its process lives.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lora_fs.sidecar.registry import lock
from lora_fs.sidecar.registry.lock import lease
from tests.crash import tracing
from tests.crash.acts import SCOPE, stage
from tests.crash.tracing import Point

TAKEN_WITHIN_S = 2.0  # beyond the lease's own time


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


@pytest.mark.parametrize("lease_s", [0.5, pytest.param(lock.LEASE_S, marks=pytest.mark.long)])
@pytest.mark.parametrize("left", ["whole", "empty", "zeros", "cut"])
def test_a_dead_holders_lease_is_had_in_time(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, left: str, lease_s: float
) -> None:
    """Whatever lies there, who keeps asking has the lease within its time and 2 s."""
    text = left_behind(scratch, whole=left != "empty")
    assert bool(text) == (left != "empty")
    told = ["host=elsewhere" if line.startswith("host=") else line for line in text.splitlines()]
    told = [f"duration={lease_s}" if line.startswith("duration=") else line for line in told]
    content = "".join(f"{line}\n" for line in told)
    path = scratch / "a.lock"
    path.write_text({"zeros": "\0" * len(content), "cut": content[: len(content) // 2]}.get(left, content))
    monkeypatch.setattr(lock, "LEASE_S", lease_s)
    monkeypatch.setattr(lock, "ABANDONED_S", lease_s)
    started, had = time.monotonic(), False
    while not had and time.monotonic() - started < 10 * lease_s + 10:
        with lease(path, wait_s=0.1) as had:
            took_s = time.monotonic() - started
    assert had
    assert took_s <= lease_s + TAKEN_WITHIN_S
    print(f"{left}: taken over after {took_s:.2f} s of a lease of {lease_s} s")
