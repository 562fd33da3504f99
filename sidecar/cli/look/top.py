"""top: replicas and the adapters that are busy or in trouble, again every second; with rates.

Rates are of the counters in two reports of one replica, so they are as old as its heartbeat.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import chain

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lora_fs.sidecar.cli.backends.port import Backend
from lora_fs.sidecar.cli.look.status import ago, seen_s
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.waiting import UNDER_WAY, public_name
from lora_fs.sidecar.cli.output import Format, complain
from lora_fs.sidecar.errors import TemporaryError
from lora_fs.sidecar.escaping import printable
from lora_fs.sidecar.model import Phase, ReplicaStatus, Scope
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s
from lora_fs.sidecar.registry.view.snapshot import Desired

EVERY_S = 1.0
MOST_ADAPTERS, MOST_TROUBLES = 30, 3
ORDER = (Phase.FAILED, *UNDER_WAY, Phase.DRAINING, Phase.READY, Phase.UNLOADED)
LETTERS = {
    Phase.FAILED: ("F", "bold red"),
    Phase.PENDING: ("p", "blue"),
    Phase.DOWNLOADING: ("d", "blue"),
    Phase.VALIDATING: ("v", "blue"),
    Phase.LOADING: ("l", "blue"),
    Phase.DRAINING: ("g", "yellow"),
    Phase.READY: ("R", "green"),
    Phase.UNLOADED: ("·", "dim"),
}
REPLICAS = (
    "REPLICA",
    "STATE",
    "LOADED",
    "FAILED",
    "GPU",
    "HOST",
    "DISK",
    "IN FLIGHT",
    "REQ/S",
    "HITS",
    "LOADS/S",
    "SEEN",
)
ADAPTERS = ("ADAPTER", "SERVES", "REPLICAS", "READY", "FAILED", "WHY")


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """One replica. What its report does not say is None; rates, until it reported twice."""

    replica: str
    state: str
    loaded: int
    failed: int
    gpu: float | None
    host: float | None
    disk: float | None
    in_flight: float | None
    requests_per_s: float | None
    hit_rate: float | None
    loads_per_s: float | None
    seen_s: float | None

    def cells(self) -> tuple[str, ...]:
        hits = "-" if self.hit_rate is None else f"{100 * self.hit_rate:.1f} %"
        whole = [_number(one, 0) for one in (self.gpu, self.host, self.disk, self.in_flight)]
        rates = _number(self.requests_per_s, 1), hits, _number(self.loads_per_s, 2)
        counted = str(self.loaded), str(self.failed), *whole
        return (self.replica, self.state, *counted, *rates, ago(self.seen_s))


@dataclass(frozen=True, slots=True)
class AdapterLine:
    """One adapter. ``phases``: on each replica, in their order; unloaded where there is none."""

    adapter: str
    revision: str
    phases: tuple[Phase, ...]
    why: str
    namespace: str = ""

    def cells(self) -> tuple[str, ...]:
        letters = "".join(LETTERS[phase][0] for phase in self.phases)
        counted = Counter(self.phases)
        return (
            self.adapter,
            self.revision,
            letters,
            str(counted[Phase.READY]),
            str(counted[Phase.FAILED]),
            self.why,
        )


class Rates:
    """The rates of counters between the last two reports of each replica."""

    def __init__(self) -> None:
        self._last: dict[str, ReplicaStatus] = {}
        self._rates: dict[str, dict[str, float]] = {}

    def note(self, replicas: Iterable[ReplicaStatus]) -> Mapping[str, Mapping[str, float]]:
        """Take over reports; replica → counter → events a second."""
        for status in replicas:
            last = self._last.get(status.replica)
            if last is not None and last.updated_at != status.updated_at:
                seconds = _between_s(last.updated_at, status.updated_at)
                if seconds > 0:
                    self._rates[status.replica] = {
                        name: max(0.0, value - last.figures.get(name, 0.0)) / seconds
                        for name, value in status.figures.items()
                    }
            self._last[status.replica] = status
        return self._rates


def replica_line(status: ReplicaStatus, rates: Mapping[str, float] | None) -> ReplicaLine:
    """A replica in numbers."""
    figures, phases = status.figures, Counter(one.phase for one in status.adapters.values())
    hits, misses = (figures.get(f"request_{kind}", 0.0) for kind in ("hits", "misses"))
    live = age_s(status) < LIVE_S
    asked = None if rates is None else rates.get("request_hits", 0.0) + rates.get("request_misses", 0.0)
    return ReplicaLine(
        status.replica,
        status.engine if live else "stale",
        phases[Phase.READY],
        phases[Phase.FAILED],
        figures.get("tier_gpu"),
        figures.get("tier_host"),
        figures.get("tier_disk"),
        figures.get("in_flight"),
        asked,
        hits / (hits + misses) if hits + misses else None,
        None if rates is None else rates.get("loads", 0.0),
        seen_s(status),
    )


def adapter_lines(
    desired: Desired, replicas: list[ReplicaStatus], *, all_namespaces: bool
) -> list[AdapterLine]:
    """Every adapter, those in trouble first, then those that are busy, then by name."""
    lines = []
    for scope, name, record in desired.active():
        told = [
            status.adapters.get(public_name(status, scope, name))
            if scope.namespace in status.namespaces
            else None
            for status in replicas
        ]
        phases = tuple(one.phase if one is not None else Phase.UNLOADED for one in told)
        failed = next((one for one in told if one is not None and one.phase is Phase.FAILED), None)
        why = "" if failed is None else " ".join((failed.message or failed.reason).split())
        called = f"{scope.namespace}/{name}" if all_namespaces else name
        lines.append(AdapterLine(called, record.revision, phases, why, scope.namespace))
    return sorted(lines, key=lambda line: (_rank(line), line.adapter))


def _rank(line: AdapterLine) -> tuple[int, int]:
    worst = min((ORDER.index(phase) for phase in line.phases), default=len(ORDER))
    return worst, -sum(phase is Phase.READY for phase in line.phases)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _between_s(before: str, after: str) -> float:
    try:
        return (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at the fleet. ``lost``: why it is an earlier one; None for a fresh one."""

    replicas: list[ReplicaLine]
    adapters: list[AdapterLine]
    unreadable: Mapping[str, str]
    lost: str | None = None

    def troubles(self) -> Iterator[str]:
        """The unreadable parts, in sentences."""
        if self.lost is not None:
            yield f"shown as it was before: {self.lost}"
        for replica, problem in self.unreadable.items():
            yield f"the report of {replica} cannot be read: {problem}"


def sights(scopes: Sequence[Scope], backend: Backend, *, all_namespaces: bool) -> Iterator[Sight]:
    """Yield a look now, then one every second.

    Raises:
        TemporaryError: the first look failed. A later failure repeats the last good look.
    """
    rates, sight = Rates(), None
    while True:
        try:
            desired, reports = backend.desired(scopes), backend.reports()
            replicas = list({one.replica: one for scope in scopes for one in reports.of(scope)}.values())
            of = rates.note(replicas)
            lines = [replica_line(status, of.get(status.replica)) for status in replicas]
            adapters = adapter_lines(desired, replicas, all_namespaces=all_namespaces)
            sight = Sight(lines, adapters, reports.unreadable)
        except TemporaryError as error:
            if sight is None:
                raise
            sight = replace(sight, lost=str(error))
        yield sight
        time.sleep(EVERY_S)


def screen(title: str, sight: Sight, height: int) -> Group:
    """Draw the screen: replicas have half its height, those in trouble first if that is short."""
    lines, adapters, troubles = sight.replicas, sight.adapters, list(sight.troubles())
    failing = sum(Phase.FAILED in line.phases for line in adapters)
    head = Text(f"{title}   {len(adapters)} adapters   {len(lines)} replicas   ", style="bold")
    head.append(f"{failing} failing", style="bold red" if failing else "dim")
    told = [
        Text(printable(" ".join(trouble.split())), style="yellow", no_wrap=True, overflow="ellipsis")
        for trouble in troubles[:MOST_TROUBLES]
    ]
    if len(troubles) > MOST_TROUBLES:
        told.append(_more(len(troubles) - MOST_TROUBLES))
    above, most = _table(REPLICAS), max(1, (height - 6 - len(told)) // 2)
    others = len(lines) - most
    for one in sorted(lines, key=lambda line: line.state == "ready")[:most] if others > 0 else lines:
        style = "" if one.state == "ready" else "red" if one.state != "stale" else "dim"
        above.add_row(*(printable(cell) for cell in one.cells()), style=style)
    below = _table(ADAPTERS)
    for line in adapters[:MOST_ADAPTERS]:
        name, revision, _, *rest = (printable(cell) for cell in line.cells())
        strip = Text.assemble(*(LETTERS[phase] for phase in line.phases))
        below.add_row(name, revision, strip, *rest)
    more = len(adapters) - MOST_ADAPTERS
    return Group(head, *told, "", above, _more(others), below, _more(more))


def _more(count: int) -> Text:
    return Text(f"and {count} more" if count > 0 else "", style="dim")


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand="WHY" in columns)
    words = {"REPLICA", "STATE", "ADAPTER", "SERVES", "REPLICAS", "WHY"}
    for name in columns:
        whole = name in words
        table.add_column(
            name,
            justify="left" if whole else "right",
            no_wrap=True,
            overflow="ellipsis" if whole else "fold",
            ratio=1 if name == "WHY" else None,  # it gets what the others leave
        )
    return table


@command()
@click.option("--once", is_flag=True, help="Print it once, plainly; as where stdout is no terminal")
@parameters.all_namespaces
@parameters.no_headers
@parameters.output
@click.pass_obj
def top(context: Context, once: bool, all_namespaces: bool, output: Format) -> None:
    """Watch replicas, loaded adapters, rates, and the adapters that fail or are busy.

    \b
    Examples:
      lora-fs top
      lora-fs top --once -A
    """
    context.root()  # no sidecar has to answer
    scopes = context.scopes(all_namespaces=all_namespaces)
    title = f"*/{context.scope().model}" if all_namespaces else str(context.scope())
    seen = sights(scopes, context.backend, all_namespaces=all_namespaces)
    first = next(seen)
    lines, adapters = ([asdict(one) for one in some] for some in (first.replicas, first.adapters))
    if context.printed(
        {"replicas": lines, "adapters": adapters}, output, [one.adapter for one in first.adapters]
    ):
        return
    if once or not context.out.is_terminal:
        _print(context, title, first)
        return
    if context.out.is_dumb_terminal:  # it has no cursor to move
        for sight in chain((first,), seen):
            _print(context, title, sight)
            context.say("")
        return

    def drawn(sight: Sight) -> Group:
        return screen(title, sight, context.out.size.height)

    live = Live(drawn(first), console=context.out, screen=True, auto_refresh=False)
    try:  # not as a context: Ctrl-C at its first frame would leave the terminal in its other screen
        live.start(refresh=True)
        for sight in seen:
            live.update(drawn(sight), refresh=True)
    finally:
        live.stop()


def _print(context: Context, title: str, sight: Sight) -> None:
    context.table(REPLICAS, [line.cells() for line in sight.replicas])
    context.say("")
    context.table(ADAPTERS, [line.cells() for line in sight.adapters], folds="WHY")
    if not sight.replicas:
        complain(f"no replica of {title} has reported")
    for trouble in sight.troubles():
        complain(trouble)


COMMANDS = (top,)
