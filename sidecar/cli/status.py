"""status: adapters × replicas, with phase, reason and age."""

from __future__ import annotations

import time

import click
from rich.table import Table

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.wait import LIVE_S, Reports, age_s, public_name, read_reports
from lora_fs.sidecar.model import Phase, ReplicaStatus, Scope
from lora_fs.sidecar.registry.layout import Layout
from lora_fs.sidecar.registry.view import Desired, RegistryView


def _table(scope: Scope, desired: Desired, reports: Reports) -> Table:
    replicas = reports.of(scope)
    table = Table(box=None, pad_edge=False)
    for column in ("ADAPTER", "SERVES", "REPLICA", "PHASE", "REASON", "SEEN"):
        table.add_column(column, overflow="fold", no_wrap=column != "REASON")
    named = {name: record for _, name, record in desired.active()}
    for name, record in sorted(named.items()):
        for replica in replicas:
            table.add_row(name, record.revision, replica.replica, *_cells(replica, scope, name))
        if not replicas:
            table.add_row(name, record.revision, "-", "-", "no replica has reported", "-")
    for replica in replicas:
        prefix = f"{scope.namespace}/" if len(replica.namespaces) > 1 else ""
        for public, status in sorted(replica.adapters.items()):
            name = public.removeprefix(prefix)
            if public.startswith(prefix) and name not in named:
                cells = (status.phase.value, status.message or status.reason, _seen(replica))
                table.add_row(name, status.key[2], replica.replica, *cells)
        for condition in replica.conditions:
            table.add_row("", "", replica.replica, "!", condition, _seen(replica))
    for replica_id, problem in reports.unreadable.items():
        table.add_row("", "", replica_id, "!", f"its report cannot be read: {problem}", "-")
    return table


def _cells(replica: ReplicaStatus, scope: Scope, name: str) -> tuple[str, str, str]:
    status = replica.adapters.get(public_name(replica, scope, name))
    if status is None:
        return Phase.EVICTED.value, "loads at the first request", _seen(replica)
    retry = f"; again in {status.retry_in_s:.0f} s" if status.retry_in_s else ""
    return status.phase.value, (status.message or status.reason) + retry, _seen(replica)


def _seen(replica: ReplicaStatus) -> str:
    age = age_s(replica)
    return f"{age:.0f} s ago" + (" (stale)" if age > LIVE_S else "")


@click.command()
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C")
@parameters.output
@click.pass_obj
def status(context: Context, watch: bool, output: str) -> None:
    """Show every adapter on every replica; a line marked ! is a replica's trouble.

    \b
    Examples:
      lora-fs status
      lora-fs status --watch
    """
    scope, layout = context.scope(), Layout(context.root())
    view = RegistryView(context.registry(), (scope,))
    while True:
        reports = read_reports(layout)
        if output == "json":
            replicas = [replica.model_dump(mode="json") for replica in reports.of(scope)]
            context.emit({"replicas": replicas, "unreadable": reports.unreadable})
        else:
            view.refresh()
            table = _table(scope, view.desired, reports)
            if watch:
                context.out.clear()
            context.out.print(table)
        if not watch:
            return
        time.sleep(1)


COMMANDS = (status,)
