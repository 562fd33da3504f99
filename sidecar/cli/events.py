"""events: what happened lately on every replica, read from the volume."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context, complain
from lora_fs.sidecar.errors import CorruptRecord, TemporaryError
from lora_fs.sidecar.model import Event, EventList, Scope
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.volume import atomic

LOOK_S = 1.0
COLUMNS = ("LAST", "TYPE", "REASON", "ADAPTER", "REPLICA", "COUNT", "MESSAGE")


@dataclass(frozen=True, slots=True)
class Told:
    """An event and whose it is."""

    replica: str
    event: Event

    @property
    def identity(self) -> tuple[object, ...]:
        return self.replica, self.event.key, self.event.reason, self.event.message, self.event.first_at

    @property
    def adapter(self) -> str:
        return f"{self.event.key[3]}@{self.event.key[2]}" if self.event.key is not None else "-"

    def cells(self) -> tuple[str, ...]:
        event = self.event
        return (
            _local(event.last_at),
            event.type,
            event.reason,
            self.adapter,
            self.replica,
            str(event.count),
            " ".join(event.message.split()),
        )


def read_events(layout: Layout, scope: Scope, name: str | None) -> tuple[list[Told], dict[str, str]]:
    """Every replica's events of a scope in the order of their last time, and the files that cannot be read.

    Raises:
        VolumeUnavailable: they cannot be listed.
    """
    found, unreadable = [], {}
    for file in sorted(atomic.list_names(layout.events) or ()):
        if not file.endswith(".json") or file.startswith("."):
            continue
        try:
            data = atomic.read_bytes(layout.events / file)
            told = decode(EventList, data) if data is not None else None
        except (CorruptRecord, TemporaryError) as error:
            unreadable[file.removesuffix(".json")] = str(error)
            continue
        if told is not None and told.model == scope.model:
            found += [Told(told.replica, event) for event in told.events if _is_of(event, scope, name)]
    return sorted(found, key=lambda one: one.event.last_at), unreadable


def _is_of(event: Event, scope: Scope, name: str | None) -> bool:
    if event.key is None:
        return name is None
    return event.key[:2] == tuple(scope) and name in (None, event.key[3])


@click.command()
@parameters.name_or_all
@click.option("--follow", is_flag=True, help="Go on with what happens from now on, until Ctrl-C")
@parameters.output
@click.pass_obj
def events(context: Context, name: str | None, follow: bool, output: str) -> None:
    """Show what happened lately on every replica, to NAME or to all.

    \b
    Examples:
      lora-fs events
      lora-fs events support --follow
      lora-fs events -o json
    """
    scope, layout = context.scope(), Layout(context.root())
    context.registry()  # raises where the folder is none
    told, unreadable = read_events(layout, scope, name)
    for replica, why in unreadable.items():
        complain(f"the events of {replica} cannot be read: {why}")
    if output == "json" and not follow:
        context.emit({"events": [_plain(one) for one in told], "unreadable": unreadable})
        return
    if follow and output == "json":
        for one in told:
            click.echo(json.dumps(_plain(one)))
    else:
        context.table(COLUMNS, [one.cells() for one in told], folds="MESSAGE")
    if not told and not unreadable:
        complain(f"no replica of {scope} has written events{f' of {name}' if name else ''} here")
    seen = {one.identity: one.event.count for one in told}
    while follow:
        time.sleep(LOOK_S)
        for one in _news(layout, scope, name, seen):
            if output == "json":
                click.echo(json.dumps(_plain(one)))
            else:
                context.say("  ".join(one.cells()))


def _news(
    layout: Layout, scope: Scope, name: str | None, seen: dict[tuple[object, ...], int]
) -> Iterator[Told]:
    try:
        told, _ = read_events(layout, scope, name)
    except TemporaryError:
        return  # asked again in a moment
    for one in told:
        if seen.get(one.identity) != one.event.count:
            yield one
    seen.clear()
    seen.update({one.identity: one.event.count for one in told})


def _plain(one: Told) -> dict[str, object]:
    return {"replica": one.replica, **one.event.model_dump(mode="json")}


def _local(written: str) -> str:
    try:
        return datetime.datetime.fromisoformat(written).astimezone().strftime("%m-%d %H:%M:%S")
    except (ValueError, OverflowError):  # a zone may lead out of the years there are
        return written


COMMANDS = (events,)
