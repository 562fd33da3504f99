"""apply: adapters as documents say them, and nothing else of what they do not say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from lora_fs.sidecar.cli.exit_codes import DIFFERS
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, complain
from lora_fs.sidecar.errors import InputError, OperatorError

if TYPE_CHECKING:
    from lora_fs.sidecar.cli.declared.carrying import Row
    from lora_fs.sidecar.cli.declared.reading import Problem
    from lora_fs.sidecar.model import Scope

MARKS: Final = {"created": "+", "changed": "~", "removed": "-", "kept": "=", "failed": "!", "unchanged": " "}


@command()
@click.option(
    "-f",
    "--filename",
    "files",
    multiple=True,
    required=True,
    metavar="PATH",
    help="A file, a folder, or -; repeatable",
)
@click.option(
    "--owner",
    default="apply",
    show_default=True,
    metavar="NAME",
    callback=parameters.segment("owner"),
    help="Whose documents these are",
)
@click.option(
    "--prune", is_flag=True, help="Unregister what an apply of this owner registered and no document names"
)
@parameters.changes
@click.pass_obj
def apply(
    context: Context,
    files: tuple[str, ...],
    owner: str,
    prune: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Register and change adapters as documents in YAML say; one that cannot be stops no other.

    Exit 1 if one cannot be. With --dry-run exit 8 if something differs.

    \b
    Examples:
      lora-fs apply -f adapters.yaml --dry-run
      lora-fs apply -f adapters.yaml --wait 20
      lora-fs apply -f adapters.yaml --prune --owner team-a
    """
    from lora_fs.sidecar.cli.declared.carrying import Carrying
    from lora_fs.sidecar.cli.declared.documents import OWNER
    from lora_fs.sidecar.cli.declared.reading import read

    default = _scope(context)
    namespace = default.namespace if default is not None else context.settings.namespace
    found = read(files, namespace, default.model if default is not None else None)
    if not found.declared and not found.problems:
        raise InputError(f"no document in {', '.join(files)}")
    carrying = Carrying(context, owner, dry_run=dry_run)
    scopes = {one.scope for one in found.declared} | ({default} if default is not None else set())
    elsewhere = sorted(set(context.backend.scopes()) - scopes) if prune else []
    if found.declared:
        carrying.look(scopes)
    whole = not found.problems and not carrying.unreadable
    with context.kept_open():
        rows = [carrying.apply(one) for one in found.declared]
        if prune and whole:
            rows += carrying.prune({one.key for one in found.declared})
    problems = [*found.problems, *(row.problem for row in rows if row.problem is not None)]
    _tell(context, rows, problems, output, dry_run=dry_run)
    for why in carrying.unreadable:
        complain(f"unreadable: {why}")
    for problem in problems:
        complain(str(problem))
    if prune and not whole:
        complain("nothing was pruned: not every document, or not every record, could be read")
    elif elsewhere:
        places = ", ".join(map(str, elsewhere[:5])) + " …" * (len(elsewhere) > 5)
        complain(
            f"--prune did not look in {places}, for which there is no document: "
            f"`lora-fs list -A -l {OWNER}={owner}` shows what is left there"
        )
    if context.wait_s is not None and not dry_run:
        _wait(context, rows, context.wait_s)
    if problems or carrying.unreadable:
        raise OperatorError(f"{len(problems)} of {len(rows) + len(found.problems)} could not be applied")
    if dry_run and any(row.outcome in ("created", "changed", "removed") for row in rows):
        raise click.exceptions.Exit(DIFFERS)


def _scope(context: Context) -> Scope | None:
    """The run's scope; None where nothing says the base model: each document has to."""
    try:
        return context.scope()
    except click.UsageError:
        context.backend.scopes()  # raises as ever if nobody named a registry
        return None


def _tell(
    context: Context, rows: Sequence[Row], problems: Sequence[Problem], output: Format, *, dry_run: bool
) -> None:
    told = {
        "dry_run": dry_run,
        "items": [_item(row) for row in rows],
        "problems": [
            {"file": one.file, "line": one.line, "field": one.field, "why": one.why} for one in problems
        ],
    }
    changed = [row for row in rows if row.differences]
    if context.printed(told, output, [f"{row.scope.namespace}/{row.name}" for row in changed]):
        return
    for row in rows:
        if row.outcome == "unchanged":
            continue
        would = "would be " if dry_run and row.outcome not in ("failed", "kept") else ""
        why = ": others registered revisions of it, too" if row.outcome == "kept" else ""
        context.say(f"{MARKS[row.outcome]} {row.scope}: {row.name} {would}{row.outcome}{why}")
        for one in row.differences:
            context.say(f"    {one.field}: {_shown(one.before)} → {_shown(one.after)}")
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in MARKS}
    counts["failed"] = len(problems)
    context.say(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing")


def _item(row: Row) -> dict[str, Any]:
    declared = row.declared
    return {
        "namespace": row.scope.namespace,
        "model": row.scope.model,
        "name": row.name,
        "outcome": row.outcome,
        "file": declared.file if declared is not None else None,
        "line": declared.line if declared is not None else None,
        "differences": [
            {"field": one.field, "before": one.before, "after": one.after} for one in row.differences
        ],
    }


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _wait(context: Context, rows: Sequence[Row], timeout_s: float) -> None:
    """Until every live replica follows all writes, within one deadline."""
    from lora_fs.sidecar.cli.options.waiting import wait_for

    until = time.monotonic() + timeout_s
    for row in rows:
        if not row.written:
            continue
        asked = row.declared.document.spec.replicas if row.declared is not None else None
        wait_for(
            context,
            row.scope,
            list(row.written.values()),
            timeout_s,
            until=until,
            loads=row.record.key if row.record is not None else None,
            min_replicas=context.min_replicas if asked is None else asked,
        )


COMMANDS = (apply,)
