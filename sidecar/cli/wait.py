"""``--wait``: until every live replica of the scope reports what was written."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.errors import CorruptRecord, OperatorError, TemporaryError, WaitTimeout
from lora_fs.sidecar.model import Phase, Pointer, Record, ReplicaStatus, Scope
from lora_fs.sidecar.registry import atomic
from lora_fs.sidecar.registry.codec import decode
from lora_fs.sidecar.registry.layout import Layout

LIVE_S = 60
LOOK_S = 0.05
FORGOTTEN_S = 60  # a replica tells of the last 512 changes; older ones it has seen unless it says so


@dataclass(frozen=True, slots=True)
class Reports:
    """What replicas wrote, and the files that cannot be read."""

    replicas: tuple[ReplicaStatus, ...]
    unreadable: dict[str, str]

    def of(self, scope: Scope) -> list[ReplicaStatus]:
        """The replicas that serve a scope."""
        return [r for r in self.replicas if r.model == scope.model and scope.namespace in r.namespaces]


def read_reports(layout: Layout) -> Reports:
    """Read every status file."""
    found, unreadable = [], {}
    for name in sorted(atomic.list_names(layout.replicas) or ()):
        if name.endswith(".json") and not name.startswith("."):
            try:
                data = atomic.read_bytes(layout.replicas / name)
                if data is not None:
                    found.append(decode(ReplicaStatus, data))
            except (CorruptRecord, TemporaryError) as error:
                unreadable[name.removesuffix(".json")] = str(error)
    return Reports(tuple(found), unreadable)


def age_s(status: ReplicaStatus) -> float:
    """Seconds since a replica last wrote, by the clocks of both; for people and waits only."""
    return _since(status.updated_at)


def _since(written: str) -> float:
    at = datetime.datetime.fromisoformat(written)
    return (datetime.datetime.now(datetime.UTC) - at).total_seconds()


def public_name(status: ReplicaStatus, scope: Scope, name: str) -> str:
    """What a replica calls an adapter of a scope."""
    return name if len(status.namespaces) == 1 else f"{scope.namespace}/{name}"


def wait_for(
    context: Context,
    scope: Scope,
    written: Sequence[Record | Pointer],
    timeout_s: float,
    *,
    fail_on: str | None = None,
    absent: str | None = None,
) -> None:
    """Wait until every live replica has seen ``written``; with none, say so and return.

    Args:
        fail_on: a name that must not fail to load. absent: one that must be gone from the engines.
    Raises:
        WaitTimeout: names the replicas that lag. OperatorError: a replica failed on the name.
    """
    layout = Layout(context.root())
    deadline = time.monotonic() + timeout_s
    while True:
        live = [status for status in read_reports(layout).of(scope) if age_s(status) < LIVE_S]
        if not live:
            click.echo(
                f"lora-fs: written; no live replica of {scope} has reported, none to wait for", err=True
            )
            return
        for status in live if fail_on is not None else ():
            one = status.adapters.get(public_name(status, scope, fail_on or ""))
            if one is not None and one.phase is Phase.FAILED:
                raise OperatorError(f"written; {status.replica} cannot load {fail_on}: {one.message}")
        lagging = [s.replica for s in live if not _follows(s, scope, written, absent)]
        if not lagging:
            return
        if time.monotonic() > deadline:
            raise WaitTimeout(f"written, and not yet seen by {', '.join(lagging)} after {timeout_s:g} s")
        time.sleep(LOOK_S)


def _follows(
    status: ReplicaStatus, scope: Scope, written: Sequence[Record | Pointer], absent: str | None
) -> bool:
    if absent is not None and public_name(status, scope, absent) in status.adapters:
        return False
    return all(_has_seen(status, body) for body in written)


def _has_seen(status: ReplicaStatus, body: Record | Pointer) -> bool:
    scope = Scope(body.namespace, body.model)
    series = str(body.key) if isinstance(body, Record) else f"{scope}/.active/{body.name}"
    if series in status.recent:
        return status.recent[series] >= body.generation
    return _since(body.updated_at) > FORGOTTEN_S
