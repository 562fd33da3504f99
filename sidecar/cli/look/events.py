"""events: what happened lately on every replica."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import click

from lora_fs.sidecar.cli.backends.port import Backend
from lora_fs.sidecar.cli.look.listing import check_registered
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, complain, put
from lora_fs.sidecar.errors import TemporaryError
from lora_fs.sidecar.model import Event, Scope

LOOK_S = 1.0
COLUMNS = ("LAST", "TYPE", "REASON", "ADAPTER", "REPLICA", "COUNT", "MESSAGE")


@dataclass(frozen=True, slots=True)
class Told:
    """An event and its subject. ``adapter``: the name to show here."""

    replica: str
    event: Event
    adapter: str

    @property
    def identity(self) -> tuple[object, ...]:
        return self.replica, self.event.key, self.event.reason, self.event.message, self.event.first_at

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events to show. ``name`` and ``revision`` None: any."""

    scopes: Collection[Scope]
    name: str | None
    revision: str | None
    all_namespaces: bool

    def covers(self, event: Event, model: str) -> bool:
        if all(scope.model != model for scope in self.scopes):
            return False
        if event.key is None:
            return self.name is None and self.revision is None
        *scope, revision, name = event.key
        is_named = self.name in (None, name) and self.revision in (None, revision)
        return is_named and Scope(*scope) in self.scopes

    def called(self, event: Event) -> str:
        """The adapter as ``NAME@REVISION``, with its namespace if the command shows all."""
        if event.key is None:
            return "-"
        namespace, _, revision, name = event.key
        return f"{namespace}/{name}@{revision}" if self.all_namespaces else f"{name}@{revision}"


def _read(backend: Backend, wanted: Wanted) -> tuple[list[Told], Mapping[str, str]]:
    """Every replica's events in the order of their last time, and the files that cannot be read."""
    happened = backend.happened()
    found = [
        Told(told.replica, one, wanted.called(one))
        for told in happened.lists
        for one in told.events
        if wanted.covers(one, told.model)
    ]
    return sorted(found, key=lambda one: one.event.last_at), happened.unreadable


@command()
@parameters.name_or_all
@parameters.revision_option()
@click.option("--follow", is_flag=True, help="Go on with new events, until Ctrl-C; -o json: one a line")
@parameters.all_namespaces
@parameters.no_headers
@parameters.output
@click.pass_obj
def events(
    context: Context,
    name: str | None,
    revision: str | None,
    follow: bool,
    all_namespaces: bool,
    output: Format,
) -> None:
    """Show recent events of every replica, of NAME or of all adapters.

    An unregistered NAME exits 3, unless it still has events.

    \b
    Examples:
      lora-fs events
      lora-fs events support@v2
      lora-fs events support --follow
      lora-fs events -o json
    """
    scopes, backend = context.scopes(all_namespaces=all_namespaces), context.backend
    wanted = Wanted(scopes, name, revision, all_namespaces)
    told, unreadable = _read(backend, wanted)
    if name is not None and not told and not unreadable:
        check_registered(backend.desired(scopes, name), scopes, name, revision)
    for replica, why in unreadable.items():
        complain(f"the events of {replica} cannot be read: {why}")
    if follow:
        _follow(context, backend, wanted, told, output)
    rows = {"events": [_plain(one) for one in told], "unreadable": unreadable}
    if context.printed(rows, output, dict.fromkeys(one.adapter for one in told)):
        return
    context.table(COLUMNS, [one.cells() for one in told], folds="MESSAGE")
    if not told and not unreadable:
        where = ", ".join(map(str, scopes))
        complain(f"no replica of {where} has written events{f' of {name}' if name else ''} here")


def _follow(context: Context, backend: Backend, wanted: Wanted, told: list[Told], output: Format) -> NoReturn:
    def show(one: Told) -> None:
        if output.for_people:
            context.say("  ".join(one.cells()))
        elif output is Format.JSON:
            put(json.dumps(_plain(one)))
        else:
            context.printed(_plain(one), output, [one.adapter])

    if output.for_people:
        context.table(COLUMNS, [one.cells() for one in told], folds="MESSAGE")
    else:
        for one in told:
            show(one)
    seen = {one.identity: one.event.count for one in told}
    while True:
        time.sleep(LOOK_S)
        for one in _news(backend, wanted, seen):
            show(one)


def _news(backend: Backend, wanted: Wanted, seen: dict[tuple[object, ...], int]) -> Iterator[Told]:
    try:
        told, _ = _read(backend, wanted)
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
