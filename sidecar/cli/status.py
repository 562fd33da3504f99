"""status: adapters × replicas, with phase, reason and age."""

from __future__ import annotations

import time

import click
from rich.table import Table

from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.wait import LIVE_S, age_s, read_replicas
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.registry import operations
from lora_fs.sidecar.registry.layout import Layout


def _table(context: Context) -> Table:
    scope, registry = context.scope(), context.registry()
    replicas = [r for r in read_replicas(Layout(context.root())) if r.model == scope.model]
    table = Table(box=None, pad_edge=False)
    for column in ("ADAPTER", "SERVES", "REPLICA", "PHASE", "REASON", "SEEN"):
        table.add_column(column, overflow="fold")
    names = sorted(registry.scan(scope).pointers)
    for name in names:
        pointer = operations.active(registry, scope, name)
        if pointer is None or pointer.revision is None:
            continue
        for replica in replicas:
            public = name if len(replica.namespaces) == 1 else f"{scope.namespace}/{name}"
            status = replica.adapters.get(public)
            phase = status.phase if status is not None else Phase.EVICTED
            reason = (status.message or status.reason) if status is not None else "loads at first request"
            age = age_s(replica)
            seen = f"{age:.0f} s ago" + (" (stale)" if age > LIVE_S else "")
            table.add_row(name, pointer.revision, replica.replica, phase.value, reason, seen)
        if not replicas:
            table.add_row(name, pointer.revision, "-", "-", "no replica has reported", "-")
    for replica in replicas:
        for condition in replica.conditions:
            table.add_row("", "", replica.replica, "!", condition, "")
    return table


@click.command()
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@click.pass_obj
def status(context: Context, watch: bool, output: str) -> None:
    """Show every adapter on every replica.

    \b
    Example:
      lora-fs status --watch
    """
    while True:
        if output == "json":
            replicas = read_replicas(Layout(context.root()))
            context.emit({"replicas": [replica.model_dump(mode="json") for replica in replicas]})
        else:
            if watch:
                context.out.clear()
            context.out.print(_table(context))
        if not watch:
            return
        time.sleep(1)


COMMANDS = (status,)
