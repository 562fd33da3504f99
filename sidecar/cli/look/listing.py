"""list: the registered adapters; and what other commands that look share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, complain, counted, shown_bytes, shown_time
from lora_fs.sidecar.errors import NotFound, OperatorError
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.registry.lifecycle.selectors import Selection
from lora_fs.sidecar.registry.view.snapshot import Desired


@contextmanager
def read(context: Context, scopes: Sequence[Scope], name: str | None = None) -> Iterator[Desired]:
    """The registered adapters, or those of one name. Shows what is readable; fails if something is not."""
    desired = context.backend.desired(scopes, name)
    for problem in desired.problems.values():
        complain(f"unreadable, left out or shown as it was before: {problem}")
    yield desired
    if desired.problems:
        raise OperatorError("not everything could be read: something that is registered may be missing here")


def rows_of(desired: Desired, name: str | None = None) -> list[tuple[Record, bool]]:
    """Every present record, with whether the plain name serves it."""
    records = (record for record in desired.records.values() if record.present)
    chosen = sorted((r for r in records if name in (None, r.name)), key=_order)
    return [(record, _serves(desired, record)) for record in chosen]


def check_registered(desired: Desired, scopes: Sequence[Scope], name: str, revision: str | None) -> None:
    """Raise NotFound for an unregistered name or revision; never where that is unknown."""
    if not desired.problems and all(
        revision not in (None, one.revision) for one, _ in rows_of(desired, name)
    ):
        what = name if revision is None else f"{name}@{revision}"
        where = ", ".join(map(str, scopes))
        raise NotFound(f"{what} is not registered in {where}: `lora-fs list` shows what is")


def _serves(desired: Desired, record: Record) -> bool:
    pointer = desired.pointers.get((record.key.scope, record.name))
    return pointer is not None and pointer.revision == record.revision


selector_option = click.option(
    "-l", "--selector", metavar="K=V,…", help="By labels: k=v, k!=v, k or !k, commas between"
)


@command("list")
@parameters.pattern
@parameters.revision_option()
@selector_option
@parameters.all_namespaces
@parameters.no_headers
@parameters.output
@click.pass_obj
def list_adapters(
    context: Context,
    name: str | None,
    revision: str | None,
    selector: str | None,
    all_namespaces: bool,
    output: Format,
) -> None:
    """List the registered adapters; * marks the revision that the plain name serves.

    PATTERN is of the name, as in a shell: quote it.

    \b
    Examples:
      lora-fs list -o wide
      lora-fs list 'support-*' -l team=sql
      lora-fs list 'support-*@v2'
      lora-fs list -A -o name
    """
    selection = Selection.parse(name, selector)
    scopes = context.scopes(all_namespaces=all_namespaces)
    with read(context, scopes) as desired:
        _list(context, desired, scopes, selection, revision, output, all_namespaces=all_namespaces)


def _list(
    context: Context,
    desired: Desired,
    scopes: Sequence[Scope],
    selection: Selection,
    revision: str | None,
    output: Format,
    *,
    all_namespaces: bool,
) -> None:
    everything = rows_of(desired)
    rows = [
        (record, active)
        for record, active in everything
        if selection.covers(record.name, record) and revision in (None, record.revision)
    ]
    if not output.for_people:
        told = [{**record.model_dump(mode="json"), "active": active} for record, active in rows]
        names = {f"{r.namespace}/{r.name}" if all_namespaces else r.name for r, _ in rows}
        context.printed(told, output, sorted(names))
        return
    shares = {
        (scope, name, pointer.canary.revision): f"{pointer.canary.percent} %"
        for (scope, name), pointer in desired.pointers.items()
        if pointer.canary is not None
    }
    columns = [*(["NAMESPACE"] if all_namespaces else []), "NAME", "REVISION", "ACTIVE", "RANK", "SIZE"]
    columns += ["DIGEST", "ORIGIN", "POLICY", "UPDATED"] if output is Format.WIDE else []
    cells = []
    for record, active in rows:
        trial = shares.get((record.key.scope, record.name, record.revision), "")
        row = [record.namespace] if all_namespaces else []
        row += [record.name, record.revision, "*" if active else trial]
        row += [str(record.spec.lora.rank), shown_bytes(record.spec.size_bytes)]
        if output is Format.WIDE:
            policy = record.spec.policy.kind.value if record.spec.policy else "default"
            row += [record.spec.digest[7:19], record.origin, policy, shown_time(record.updated_at)]
        cells.append(row)
    context.table(columns, cells)
    if not everything and not desired.problems:
        context.nothing_in(scopes)
    elif not rows:
        where = ", ".join(map(str, scopes))
        complain(f"no adapter matches (in {where}: {counted(len(everything), 'revision')})")


def _order(record: Record) -> tuple[str, str, list[tuple[int, str]]]:
    """By namespace and name, and v2 before v10."""
    parts = re.split(r"([0-9]+)", record.revision)
    return record.namespace, record.name, [(int(part), "") if part.isdigit() else (0, part) for part in parts]


COMMANDS = (list_adapters,)
