"""list and show: what is registered, read from the volume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context, complain, shown_bytes, shown_time
from lora_fs.sidecar.errors import NotFound, OperatorError
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.registry.lifecycle.selectors import Selection
from lora_fs.sidecar.registry.view.view import Desired, RegistryView


@contextmanager
def _read(context: Context) -> Iterator[Desired]:
    """What is registered. Where something cannot be read it is shown without, and that is a failure."""
    scope = context.scope()
    view = RegistryView(context.registry(), (scope,))
    view.refresh()
    for problem in view.desired.problems.values():
        complain(f"unreadable, left out or shown as it was before: {problem}")
    yield view.desired
    if view.desired.problems:
        raise OperatorError("not everything could be read: something that is registered may be missing here")


def _rows(desired: Desired, name: str | None = None) -> list[tuple[Record, bool]]:
    """Every present record, with whether the plain name serves it."""
    records = (record for record in desired.records.values() if record.present)
    chosen = sorted((r for r in records if name in (None, r.name)), key=_order)
    pointers = {
        key[1]: pointer.revision for key, pointer in desired.pointers.items() if name in (None, key[1])
    }
    return [(record, pointers.get(record.name) == record.revision) for record in chosen]


@click.command("list")
@click.argument("pattern", required=False)
@click.option("-l", "--selector", metavar="K=V,…", help="By labels: k=v, k!=v, k or !k, commas between")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "wide", "json", "name"]),
    default="text",
    show_default=True,
    help="For people, with more columns, for scripts, or names only",
)
@click.pass_obj
def list_adapters(context: Context, pattern: str | None, selector: str | None, output: str) -> None:
    """List what is registered; * marks the revision that the plain name serves.

    PATTERN is of the name, as in a shell: quote it.

    \b
    Examples:
      lora-fs list -o wide
      lora-fs list 'support-*' -l team=sql
      lora-fs list -o name
    """
    selection = Selection.parse(pattern, selector)
    with _read(context) as desired:
        _list(context, desired, selection, output)


def _list(context: Context, desired: Desired, selection: Selection, output: str) -> None:
    everything = _rows(desired)
    rows = [(record, active) for record, active in everything if selection.covers(record.name, record)]
    if output == "json":
        context.emit([{**record.model_dump(mode="json"), "active": active} for record, active in rows])
        return
    if output == "name":
        for name in sorted({record.name for record, _ in rows}):
            click.echo(name)
        return
    wide = ["DIGEST", "ORIGIN", "POLICY", "UPDATED"] if output == "wide" else []
    cells = []
    shares = {
        (name, pointer.canary.revision): f"{pointer.canary.percent} %"
        for (_, name), pointer in desired.pointers.items()
        if pointer.canary is not None
    }
    for record, active in rows:
        policy = record.spec.policy.kind.value if record.spec.policy else "default"
        more = (
            [record.spec.digest[7:19], record.origin, policy, shown_time(record.updated_at)] if wide else []
        )
        mark = "*" if active else shares.get((record.name, record.revision), "")
        cells.append(
            (
                record.name,
                record.revision,
                mark,
                str(record.spec.lora.rank),
                shown_bytes(record.spec.size_bytes),
                *more,
            )
        )
    context.table(("NAME", "REVISION", "ACTIVE", "RANK", "SIZE", *wide), cells)
    if not everything and not desired.problems:
        context.nothing_in(context.scope())
    elif not rows:
        complain(f"none of the {len(everything)} revisions in {context.scope()} is asked for by that")


@click.command()
@parameters.name
@parameters.output
@click.pass_obj
def show(context: Context, name: str, output: str) -> None:
    """Show NAME: what it serves, and each of its revisions.

    \b
    Examples:
      lora-fs show support
      lora-fs show support -o json
    """
    with _read(context) as desired:
        _show(context, desired, name, output)


def _show(context: Context, desired: Desired, name: str, output: str) -> None:
    scope, rows = context.scope(), _rows(desired, name)
    if not rows and not desired.problems:
        raise NotFound(f"{name} is not registered in {scope}: `lora-fs list` shows what is")
    if not rows:
        return  # it is not known that it is not there
    pointer = desired.pointers.get((scope, name))
    if output == "json":
        context.emit(
            {
                "pointer": pointer.model_dump(mode="json") if pointer else None,
                "revisions": [record.model_dump(mode="json") for record, _ in rows],
            }
        )
        return
    serves = pointer.revision if pointer is not None and pointer.revision else "nothing"
    before = pointer.previous_revision if pointer is not None else None
    trial = pointer.canary if pointer is not None else None
    canary = f"; {trial.revision} answers {trial.percent} % of the requests" if trial is not None else ""
    context.say(f"{name} in {scope} serves {serves}" + (f", before that {before}" if before else "") + canary)
    for record, _ in rows:
        spec = record.spec
        policy = spec.policy
        lines = {
            "base model": spec.base_model,
            "files": f"{spec.path} ({shown_bytes(record.spec.size_bytes)})",
            "source": spec.source.uri,
            "digest": spec.digest,
            "lora": f"rank {spec.lora.rank}, alpha {spec.lora.alpha:g}, {spec.lora.dtype}, "
            f"{', '.join(spec.lora.target_modules)}",
            "policy": f"{policy.kind.value}, TTL {policy.ttl_s} s, priority {policy.priority}"
            if policy
            else "as each sidecar is set",
            "labels": ", ".join(f"{key}={value}" for key, value in spec.labels.items()) or "none",
            "written": f"{shown_time(record.updated_at)} by {record.writer}, generation {record.generation}",
        }
        context.say("")
        context.say(record.revision)
        for title, text in lines.items():
            context.say(f"  {title:<11}{text}")


def _order(record: Record) -> tuple[str, list[tuple[int, str]]]:
    """By name, and v2 before v10."""
    parts = re.split(r"([0-9]+)", record.revision)
    return record.name, [(int(part), "") if part.isdigit() else (0, part) for part in parts]


COMMANDS = (list_adapters, show)
