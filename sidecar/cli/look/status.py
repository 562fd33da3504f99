"""status: adapters × replicas, with phase, reason and age."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import click

from lora_fs.sidecar.cli.look.listing import check_registered
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.waiting import not_seen, public_name
from lora_fs.sidecar.cli.output import Format, complain
from lora_fs.sidecar.errors import OperatorError, TemporaryError
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, Phase, ReplicaStatus, Scope
from lora_fs.sidecar.registry.view.reports import LIVE_S, Reports, age_s
from lora_fs.sidecar.registry.view.snapshot import Desired

if TYPE_CHECKING:
    from lora_fs.sidecar.cli.backends.port import Backend
    from lora_fs.sidecar.server.bodies import FleetBody, FleetReplica

WATCH_S = 1.0
NOT_SEEN = "this replica has not seen it yet"
CLOSED = "has no token file (LORA_FS_TOKEN_FILE): it refuses calls over HTTP that change adapters"
COLUMNS = ("ADAPTER", "SERVES", "REPLICA", "PHASE", "REASON", "SEEN")
FLEET = (
    "REPLICA",
    "GATEWAY",
    "WHY",
    "LOADED",
    "LOADING",
    "IN FLIGHT",
    "QUEUE",
    "LORA-FS",
    "ENGINE",
    "ANSWERED",
    "URL",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter on one replica.

    ``replica`` and ``phase`` are None where none has reported; ``phase`` where it has not seen the adapter.
    """

    adapter: str
    revision: str
    replica: str | None
    phase: str | None
    reason: str
    seen_s: float | None
    live: bool
    namespace: str = ""

    def cells(self) -> tuple[str, ...]:
        seen = ago(self.seen_s) + ("" if self.live else " (stale)") if self.replica else "-"
        return (
            self.adapter,
            self.revision,
            self.replica or "-",
            self.phase or "-",
            one_line(self.reason),
            seen,
        )


def one_line(message: str) -> str:
    """A message that has a line for each finding, for a table."""
    return " ".join(message.split())


def said_once(condition: str) -> str:
    """A condition in one line. Names a refused folder at its beginning alone, and not its path again."""
    told = one_line(condition)
    kind, _, rest = told.partition(": ")
    where = re.escape(rest.partition(": ")[0])
    if kind == "NotAdopted" and where:
        told = re.sub(rf"(?<=: InvalidAdapter: )[^:]*{where} (?=cannot be served:)", "", told)
        told = re.sub(rf"looked in [^:;]*{where}; ", "", told)
    return told


def ago(seconds: float | None) -> str:
    """``4 s ago``, ``3 min ago``, ``5 h ago``, ``12 d ago``."""
    if seconds is None:
        return "at an unknown time"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def seen_s(replica: ReplicaStatus) -> float | None:
    """The age of a report, None if it lacks its time."""
    age = age_s(replica)
    return round(age, 1) if math.isfinite(age) else None


def _rows(scope: Scope, desired: Desired, replicas: list[ReplicaStatus]) -> Iterator[Row]:
    named = {name: record for of, name, record in desired.active() if of == scope}
    for name, record in sorted(named.items()):
        for replica in replicas:
            one = replica.adapters.get(public_name(replica, scope, name))
            row = _row(replica, name, one.key[2] if one else record.revision, one)
            if one is None and not_seen(replica, (desired.pointers[scope, name], record)) is not None:
                row = replace(row, phase=None, reason=NOT_SEEN)
            yield row
        if not replicas:
            yield Row(name, record.revision, None, None, "no replica has reported", None, False)
    for replica in replicas:
        prefix = f"{scope.namespace}/" if len(replica.namespaces) > 1 else ""
        for public, one in sorted(replica.adapters.items()):
            name = public.removeprefix(prefix)
            if public.startswith(prefix) and name not in named:
                yield _row(replica, name, one.key[2], one)


def _downloads(scope: Scope, replicas: list[ReplicaStatus]) -> Iterator[Row]:
    for replica in replicas:
        for one in replica.downloads.values():
            if one.namespace == scope.namespace:
                reason = f"{one.reason or 'fetching'} {one.source}: {one.progress()}"
                live = age_s(replica) < LIVE_S
                yield Row(one.name, "-", replica.replica, one.phase.value, reason, seen_s(replica), live)


def _row(replica: ReplicaStatus, name: str, revision: str, one: AdapterStatus | None) -> Row:
    phase = (one.phase if one is not None else Phase.UNLOADED).value
    reason = (one.message or one.reason) if one is not None else "loads at the first request"
    if one is not None and one.retry_in_s:
        reason += f"; again in {one.retry_in_s:.0f} s"
    seen = seen_s(replica)
    return Row(name, revision, replica.replica, phase, reason, seen, age_s(replica) < LIVE_S)


def _remarks(replicas: Sequence[ReplicaStatus], reports: Reports) -> Iterator[tuple[str, ...]]:
    for replica in replicas:
        for condition in replica.conditions:
            yield ("", "", replica.replica, "!", said_once(condition), ago(seen_s(replica)))
        if replica.changed_by == "nobody":  # as somebody may want it
            yield ("", "", replica.replica, "", CLOSED, ago(seen_s(replica)))
    for replica_id, problem in reports.unreadable.items():
        yield ("", "", replica_id, "!", f"its report cannot be read: {problem}", "-")


@command()
@parameters.name_or_all
@parameters.revision_option()
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C")
@click.option(
    "--exit-code",
    "tells",
    is_flag=True,
    help="Exit 1 if an adapter or a replica fails, is stale, or no replica has reported",
)
@parameters.all_namespaces
@parameters.no_headers
@parameters.output
@click.pass_obj
def status(
    context: Context,
    name: str | None,
    revision: str | None,
    watch: bool,
    tells: bool,
    all_namespaces: bool,
    output: Format,
) -> None:
    """Show every adapter on every replica; a line marked ! is a replica's problem.

    An unregistered NAME exits 3, unless a replica still reports it.

    \b
    Examples:
      lora-fs status
      lora-fs status support@v2
      lora-fs status --watch
      lora-fs status -A -o json
    """
    if watch and tells:
        raise click.UsageError("--watch and --exit-code exclude each other")
    scopes, backend = context.scopes(all_namespaces=all_namespaces), context.backend
    desired, reports, fleet = _look(backend, scopes, name)
    lost: TemporaryError | None = None
    is_checked = name is None
    while True:
        rows = [row for scope in scopes for row in _of(scope, desired, reports, name, revision)]
        if name is not None and not is_checked and not rows:
            check_registered(desired, scopes, name, revision)
        is_checked = True  # a withdrawal during the watch is no error
        replicas = list({one.replica: one for scope in scopes for one in reports.of(scope)}.values())
        if watch and output.for_people:
            context.out.clear()
        _show(context, rows, replicas, reports, fleet, output, all_namespaces=all_namespaces)
        if fleet is not None and name is None and output.for_people:
            context.say("")
            context.table(FLEET, map(_fleet_cells, fleet.replicas), folds="WHY")
        if not rows and output.for_people:
            if name is None and revision is None:
                context.nothing_in(scopes)
            else:
                what = "@".join(filter(None, (name or "*", revision)))
                complain(f"no replica of {', '.join(map(str, scopes))} says anything of {what}")
        for problem in desired.problems.values():
            complain(f"unreadable, left out or shown as it was before: {problem}")
        if lost is not None:
            complain(f"shown as it was before: {lost}")
        if tells and (why := _failing(rows, replicas, reports, desired, fleet)):
            raise OperatorError(", ".join(why))
        if not watch:
            return
        time.sleep(WATCH_S)
        try:
            desired, reports, fleet = _look(backend, scopes, name)
            lost = None
        except TemporaryError as error:
            lost = error


def _look(
    backend: Backend, scopes: Sequence[Scope], name: str | None
) -> tuple[Desired, Reports, FleetBody | None]:
    """Read the registry, the reports, and a gateway's view: it knows an adapter by its public name."""
    desired, reports = backend.desired(scopes, name), backend.reports()
    of_replicas = (public_name(one, scope, name) for scope in scopes for one in reports.of(scope) if name)
    return desired, reports, backend.fleet(next(of_replicas, name))


def _of(
    scope: Scope, desired: Desired, reports: Reports, name: str | None, revision: str | None
) -> Iterator[Row]:
    """The selected rows; of a name also those of its revisions, which have names of their own."""
    replicas = reports.of(scope)
    rows = [
        row
        for row in chain(_rows(scope, desired, replicas), _downloads(scope, replicas))
        if name in (None, row.adapter.partition("@")[0]) and revision in (None, row.revision)
    ]
    if name is not None and revision is not None:
        record = desired.records.get(AdapterKey(*scope, revision, name))
        silent = [] if record is None or not record.present else replicas
        have = {row.replica for row in rows}
        rows += [_row(one, f"{name}@{revision}", revision, None) for one in silent if one.replica not in have]
    for row in rows:
        yield replace(row, namespace=scope.namespace)


def _show(
    context: Context,
    rows: Sequence[Row],
    replicas: Sequence[ReplicaStatus],
    reports: Reports,
    fleet: FleetBody | None,
    output: Format,
    *,
    all_namespaces: bool,
) -> None:
    written = [replica.model_dump(mode="json") for replica in replicas]
    told = {
        "adapters": [asdict(row) for row in rows],
        "replicas": written,
        "unreadable": reports.unreadable,
        "fleet": None if fleet is None else fleet.model_dump(mode="json"),
    }
    names = (f"{row.namespace}/{row.adapter}" if all_namespaces else row.adapter for row in rows)
    if context.printed(told, output, dict.fromkeys(names)):
        return
    columns = ("NAMESPACE", *COLUMNS) if all_namespaces else COLUMNS
    lines = [(row.namespace, *row.cells()) if all_namespaces else row.cells() for row in rows]
    empty = ("",) if all_namespaces else ()
    lines += [(*empty, *trouble) for trouble in _remarks(replicas, reports)]
    context.table(columns, lines, folds="REASON")


def _fleet_cells(one: FleetReplica) -> tuple[str, ...]:
    loaded = f"{one.loaded}" if one.capacity is None else f"{one.loaded}/{one.capacity}"
    state = one.state if one.ejected_s is None else f"{one.state}, {one.ejected_s:.0f} s left"
    answered = "never" if one.seen_s is None else ago(one.seen_s)
    queue = "-" if one.queue is None else f"{one.queue.running}+{one.queue.waiting}"
    figures = (loaded, str(one.loading), str(one.in_flight), queue)
    versions = (one.version or "-", one.engine_version or "-")
    return (one.replica or "-", state, one_line(one.why), *figures, *versions, answered, one.url)


def _failing(
    rows: Sequence[Row],
    replicas: Sequence[ReplicaStatus],
    reports: Reports,
    desired: Desired,
    fleet: FleetBody | None,
) -> list[str]:
    """The reason why ``--exit-code`` exits 1, in words; empty if there is none."""
    failed = sum(row.phase == Phase.FAILED for row in rows)
    stale = sum(age_s(replica) >= LIVE_S for replica in replicas)
    down = sum(replica.engine != "ready" for replica in replicas)
    ailing = sum(bool(replica.conditions) for replica in replicas)
    counted = {
        "failed adapters": failed,
        "stale replicas": stale,
        "replicas without an engine that answers": down,
        "replicas with a condition": ailing,
        "reports that cannot be read": len(reports.unreadable),
        "records that cannot be read": len(desired.problems),
        "replicas that have reported: 0, needed": int(not replicas),
        "replicas that the gateway leaves out": sum(
            one.state != "ready" for one in (fleet.replicas if fleet is not None else ())
        ),
    }
    return [f"{what}: {count}" for what, count in counted.items() if count]


COMMANDS = (status,)
