"""``--wait``: until every live replica of the scope reports what was written."""

from __future__ import annotations

import datetime
import time

from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.errors import CorruptRecord, OperatorError, WaitTimeout
from lora_fs.sidecar.model import Phase, ReplicaStatus, Scope
from lora_fs.sidecar.registry import atomic
from lora_fs.sidecar.registry.codec import decode
from lora_fs.sidecar.registry.layout import Layout

LIVE_S = 60


def read_replicas(layout: Layout) -> list[ReplicaStatus]:
    """Every status file that can be read."""
    found = []
    for name in sorted(atomic.list_names(layout.replicas) or ()):
        if name.endswith(".json") and not name.startswith("."):
            data = atomic.read_bytes(layout.replicas / name)
            try:
                if data is not None:
                    found.append(decode(ReplicaStatus, data))
            except CorruptRecord:
                continue  # being replaced, or damaged: `doctor` reports it
    return found


def age_s(status: ReplicaStatus) -> float:
    """Seconds since a replica last wrote, by the clocks of both; for people and waits only."""
    written = datetime.datetime.fromisoformat(status.updated_at)
    return (datetime.datetime.now(datetime.UTC) - written).total_seconds()


def wait_for(
    context: Context,
    scope: Scope,
    generations: dict[str, int],
    timeout_s: float,
    *,
    fail_on: str | None = None,
    absent: str | None = None,
) -> None:
    """Wait until every live replica has seen ``generations``.

    Raises:
        WaitTimeout: names the replicas that lag. OperatorError: a replica failed on the name.
    """
    layout = Layout(context.root())
    deadline = time.monotonic() + timeout_s
    while True:
        replicas = [
            status
            for status in read_replicas(layout)
            if status.model == scope.model and scope.namespace in status.namespaces
        ]
        lagging = []
        for status in (s for s in replicas if age_s(s) < LIVE_S):
            one = status.adapters.get(fail_on or "")
            if one is not None and one.phase is Phase.FAILED:
                raise OperatorError(f"{status.replica} cannot load {fail_on}: {one.message}")
            seen = all(status.recent.get(key, 0) >= wanted for key, wanted in generations.items())
            if not seen or (absent is not None and absent in status.adapters):
                lagging.append(status.replica)
        if not lagging:
            return
        if time.monotonic() > deadline:
            raise WaitTimeout(f"written, and not yet seen by {', '.join(lagging)} after {timeout_s:.0f} s")
        time.sleep(0.05)
