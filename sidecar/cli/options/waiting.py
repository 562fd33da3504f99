"""``--wait``: until every live replica of the scope reports the write.

A replica with an unreadable report is neither fine nor absent: wait for it while the
file is young, and say so. Ask a volume again that does not answer for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import complain
from lora_fs.sidecar.errors import OperatorError, TemporaryError, WaitTimeout
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, Phase, Pointer, Record, ReplicaStatus, Scope
from lora_fs.sidecar.model.status import RECENT
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s, since_s

LOOK_S, LOOK_MOST_S = 0.05, 0.5
FORGOTTEN_S = 60  # what a full `recent` does not have a replica forgot, or did not see within this time
UNREADABLE = "Unreadable: "
UNDER_WAY = (Phase.PENDING, Phase.DOWNLOADING, Phase.VALIDATING, Phase.LOADING)


def public_name(status: ReplicaStatus, scope: Scope, name: str) -> str:
    """What a replica calls an adapter of a scope."""
    return name if len(status.namespaces) == 1 else f"{scope.namespace}/{name}"


def follow(
    context: Context,
    scope: Scope,
    written: Sequence[Record | Pointer],
    *,
    dry_run: bool,
    loads: AdapterKey | None = None,
    gone: Collection[AdapterKey] = (),
) -> None:
    """Wait as ``--wait`` and ``--min-replicas`` say, if they do and something is written."""
    if context.wait_s is not None and not dry_run:
        least = context.min_replicas
        wait_for(context, scope, written, context.wait_s, loads=loads, gone=gone, min_replicas=least)


def wait_for(
    context: Context,
    scope: Scope,
    written: Sequence[Record | Pointer],
    timeout_s: float,
    *,
    until: float | None = None,
    min_replicas: int,
    loads: AdapterKey | None = None,
    gone: Collection[AdapterKey] = (),
) -> None:
    """Wait until every live replica has seen ``written``.

    Args:
        until: when the time ends, on the monotonic clock; None: ``timeout_s`` from now.
        loads: adapters that must not fail to load. gone: adapters that must have left the engines.
        min_replicas: how many live replicas there must be; 0: none.
    Raises:
        WaitTimeout: names the replicas that lag. OperatorError: a replica cannot load ``loads``.
    """
    pause_s = LOOK_S
    until = time.monotonic() + timeout_s if until is None else until
    while True:
        try:
            reports = context.backend.reports()
        except TemporaryError as error:
            lagging = [f"replicas whose reports cannot be read ({error})"]
        else:
            live = [status for status in reports.of(scope) if age_s(status) < LIVE_S]
            lagging = [f"{replica} (its report cannot be read)" for replica in reports.young]
            if len(live) < min_replicas:
                lagging.append(f"any replica: {len(live)} of {scope} are live, {min_replicas} are needed")
            elif not live and not lagging:
                complain(f"written; no live replica of {scope} has reported, none to wait for")
                return
            for status in live:
                lagging += [f"{status.replica}{why}" for why in _lags(status, written, loads, gone)]
            if not lagging:
                return
        remaining = until - time.monotonic()
        if remaining <= 0:
            raise WaitTimeout(
                f"written, and after {timeout_s:g} s not followed by {', '.join(lagging)}: "
                "`lora-fs status` shows where they stand"
            )
        time.sleep(min(pause_s, remaining))
        pause_s = min(1.5 * pause_s, LOOK_MOST_S)


def _lags(
    status: ReplicaStatus,
    written: Sequence[Record | Pointer],
    loads: AdapterKey | None,
    gone: Collection[AdapterKey],
) -> Iterator[str]:
    """Why a replica does not follow yet; nothing if it does."""
    unseen = not_seen(status, written)
    if unseen is not None:
        yield unseen
        return
    told = [one for one in status.adapters.values() if AdapterKey(*one.key) in gone]
    for one in told[:1]:
        yield f" ({one.phase.value})"
    generation = max((body.generation for body in written if isinstance(body, Record)), default=0)
    for one in status.adapters.values():
        if loads is None or AdapterKey(*one.key) != loads or one.generation < generation:
            continue
        if one.phase is Phase.FAILED:
            raise OperatorError(f"written; {status.replica} cannot load {loads.name}: {_why(one)}")
        if one.phase in UNDER_WAY:
            yield f" ({one.phase.value})"
            return


def _why(one: AdapterStatus) -> str:
    return one.message or one.reason or "it does not say why"


def not_seen(status: ReplicaStatus, written: Sequence[Record | Pointer]) -> str | None:
    """What a replica that does not know of the write reports, empty if nothing; None if it knows."""
    unseen = [body for body in written if not has_seen(status, body)]
    if not unseen:
        return None
    for condition in status.conditions:
        if condition.startswith(UNREADABLE) and any(_names(condition, _series(body)) for body in unseen):
            return f" ({' '.join(condition.split())})"
    return ""


def _names(condition: str, series: str) -> bool:
    """Whether a condition is of a series or of its folder, wherever the replica mounts the volume."""
    return f"/{series}.@" in condition or f"/{series.rpartition('/')[0]}: " in condition


def has_seen(status: ReplicaStatus, body: Record | Pointer) -> bool:
    """Whether a replica knows of the write, or of a later one.

    It lists all that it has seen, until that is more than a report holds.
    """
    seen = status.recent.get(_series(body))
    if seen is not None:
        return seen >= body.generation
    return len(status.recent) >= RECENT and since_s(body.updated_at) > FORGOTTEN_S


def _series(body: Record | Pointer) -> str:
    """Its key in ``recent``."""
    if isinstance(body, Record):
        return str(body.key)
    return f"{Scope(body.namespace, body.model)}/.active/{body.name}"
