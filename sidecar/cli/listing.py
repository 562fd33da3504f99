"""list and show: what is registered, read from the volume."""

from __future__ import annotations

import re

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context, complain
from lora_fs.sidecar.errors import NotFound
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.registry.view import Desired, RegistryView


def _read(context: Context) -> Desired:
    scope = context.scope()
    view = RegistryView(context.registry(), (scope,))
    view.refresh()
    for problem in view.desired.problems.values():
        complain(f"unreadable, left out or shown as it was before: {problem}")
    return view.desired


def _rows(desired: Desired, name: str | None = None) -> list[tuple[Record, bool]]:
    """Every present record, with whether the plain name serves it."""
    records = (record for record in desired.records.values() if record.present)
    chosen = sorted((r for r in records if name in (None, r.name)), key=_order)
    pointers = {
        key[1]: pointer.revision for key, pointer in desired.pointers.items() if name in (None, key[1])
    }
    return [(record, pointers.get(record.name) == record.revision) for record in chosen]


@click.command("list")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "wide", "json", "name"]),
    default="text",
    show_default=True,
    help="For people, with more columns, for scripts, or names only",
)
@click.pass_obj
def list_adapters(context: Context, output: str) -> None:
    """List what is registered; * marks the revision that the plain name serves.

    \b
    Examples:
      lora-fs list -o wide
      lora-fs list -o name
    """
    rows = _rows(_read(context))
    if output == "json":
        context.emit([{**record.model_dump(mode="json"), "active": active} for record, active in rows])
        return
    if output == "name":
        for name in sorted({record.name for record, _ in rows}):
            click.echo(name)
        return
    wide = ["DIGEST", "ORIGIN", "POLICY", "UPDATED"] if output == "wide" else []
    cells = []
    for record, active in rows:
        policy = record.spec.policy.kind.value if record.spec.policy else "default"
        more = [record.spec.digest[7:19], record.origin, policy, record.updated_at[:19]] if wide else []
        mark = "*" if active else ""
        cells.append((record.name, record.revision, mark, str(record.spec.lora.rank), _size(record), *more))
    context.table(("NAME", "REVISION", "ACTIVE", "RANK", "SIZE", *wide), cells)


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
    scope, desired = context.scope(), _read(context)
    rows = _rows(desired, name)
    if not rows:
        raise NotFound(f"{name} is not registered in {scope}: `lora-fs list` shows what is")
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
    context.say(f"{name} in {scope} serves {serves}" + (f", before that {before}" if before else ""))
    for record, _ in rows:
        spec = record.spec
        policy = spec.policy
        lines = {
            "base model": spec.base_model,
            "files": f"{spec.path} ({_size(record)})",
            "source": spec.source.uri,
            "digest": spec.digest,
            "lora": f"rank {spec.lora.rank}, alpha {spec.lora.alpha:g}, {spec.lora.dtype}, "
            f"{', '.join(spec.lora.target_modules)}",
            "policy": f"{policy.kind.value}, TTL {policy.ttl_s} s, priority {policy.priority}"
            if policy
            else "as each sidecar is set",
            "labels": ", ".join(f"{key}={value}" for key, value in spec.labels.items()) or "none",
            "written": f"{record.updated_at[:19]} by {record.writer}, generation {record.generation}",
        }
        context.say("")
        context.say(record.revision)
        for title, text in lines.items():
            context.say(f"  {title:<11}{text}")


def _order(record: Record) -> tuple[str, list[tuple[int, str]]]:
    """By name, and v2 before v10."""
    parts = re.split(r"([0-9]+)", record.revision)
    return record.name, [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _size(record: Record) -> str:
    size = record.spec.size_bytes
    unit, scale = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6) if size >= 100_000 else ("kB", 1e3)
    return f"{size / scale:.1f} {unit}"


COMMANDS = (list_adapters, show)
