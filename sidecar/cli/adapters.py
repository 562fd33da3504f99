"""register, unregister, list, show, validate, promote, rollback."""

from __future__ import annotations

import re
from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.wait import wait_for
from lora_fs.sidecar.errors import InvalidAdapter, NotFound
from lora_fs.sidecar.model import Policy, PolicyKind, Record
from lora_fs.sidecar.registry import operations
from lora_fs.sidecar.registry.operations import Registration
from lora_fs.sidecar.settings import writer_id
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.validate import validate

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_output = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
_wait = click.option("--wait", type=float, metavar="SECONDS", help="Wait until every replica follows")


def _seconds(_: object, __: object, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]*)([smhd]?)", value)
    if match is None:
        raise click.BadParameter("write it as 90, 90s, 15m, 1h or 2d")
    return int(match[1]) * _UNITS[match[2] or "s"]


def _labels(_: object, __: object, value: tuple[str, ...]) -> dict[str, str]:
    pairs = [item.partition("=") for item in value]
    if any(not key or not equals for key, equals, _value in pairs):
        raise click.BadParameter("write it as key=value")
    return {key: text for key, _equals, text in pairs}


def describe(record: Record) -> dict[str, object]:
    """What scripts get of a record."""
    return record.model_dump(mode="json")


@click.command()
@click.argument("name")
@click.argument("source")
@click.option("--revision", help="Default: the next vN")
@click.option("--base-model", help="The base model it was made for, when its config does not say")
@click.option("--policy", type=click.Choice([kind.value for kind in PolicyKind]))
@click.option("--ttl", callback=_seconds, help="Evict a lazy adapter after this idle time, e.g. 1h")
@click.option("--priority", type=int, default=0)
@click.option("--label", multiple=True, callback=_labels, metavar="K=V")
@click.option("--link", is_flag=True, help="Refer to the folder where it is; do not copy")
@click.option("--activate/--no-activate", default=True, help="Let the plain name serve it")
@click.option("--allow", multiple=True, metavar="CODE", help="Accept a finding of `validate`")
@click.option("--dry-run", is_flag=True, help="Check and say, change nothing")
@_wait
@_output
@click.pass_obj
def register(
    context: Context,
    name: str,
    source: str,
    revision: str | None,
    base_model: str | None,
    policy: str | None,
    ttl: int | None,
    priority: int,
    label: dict[str, str],
    link: bool,
    activate: bool,
    allow: tuple[str, ...],
    dry_run: bool,
    wait: float | None,
    output: str,
) -> None:
    """Register the adapter in the folder SOURCE under NAME.

    \b
    Examples:
      lora-fs register support ./support-lora --wait 20
      lora-fs register support ./support-lora-2 --no-activate
    """
    folder = resolve(source)
    scope = context.scope()
    registry = context.registry(create=not dry_run)
    settings = context.settings
    chosen = None
    if policy or ttl or priority:
        kind = PolicyKind(policy or settings.default_policy)
        chosen = Policy(kind=kind, ttl_s=ttl or settings.default_ttl_s, priority=priority)
    wanted = Registration(name, folder, folder.as_uri(), revision, base_model, chosen, label, link, activate)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, transient=True, disable=output == "json" or not context.out.is_terminal) as bar:
        size = sum(path.stat().st_size for path in folder.glob("adapter_model.*"))
        task = bar.add_task(f"reading {folder.name}", total=3 * size)
        done = operations.register(
            registry,
            scope,
            wanted,
            context.expectation(base_model, allow),
            writer=writer_id(),
            dry_run=dry_run,
            progress=lambda count: bar.advance(task, count),
        )
    registry.close()
    if wait is not None and not dry_run:
        key = str(done.record.key)
        wait_for(context, scope, {key: done.record.generation}, wait, fail_on=name)
    if output == "json":
        context.emit({"changed": done.changed, "dry_run": dry_run, "record": describe(done.record)})
        return
    for finding in done.report.warnings:
        context.out.print(f"warning: {finding.render()}", markup=False)
    verb = "would register" if dry_run else "registered"
    if not done.changed:
        verb = "unchanged: the same bytes are registered as"
    context.out.print(f"{verb} {name}@{done.record.revision} in {scope}", markup=False)


@click.command()
@click.argument("name")
@click.option("--revision")
@click.option("--all-revisions", is_flag=True)
@click.option("--keep-files", is_flag=True, help="gc never removes its files")
@_wait
@click.pass_obj
def unregister(
    context: Context,
    name: str,
    revision: str | None,
    all_revisions: bool,
    keep_files: bool,
    wait: float | None,
) -> None:
    """Take NAME away, everywhere.

    \b
    Example:
      lora-fs unregister support --all-revisions --wait 20
    """
    scope, registry = context.scope(), context.registry()
    gone = operations.unregister(
        registry,
        scope,
        name,
        revision=revision,
        all_revisions=all_revisions,
        keep_files=keep_files,
        writer=writer_id(),
    )
    registry.close()
    if wait is not None:
        wait_for(context, scope, {str(r.key): r.generation for r in gone}, wait, absent=name)
    revisions = ", ".join(record.revision for record in gone)
    context.out.print(f"unregistered {name} ({revisions}) in {scope}", markup=False)


def _pointed(context: Context, name: str, verb: str, wait: float | None, revision: str | None) -> None:
    scope, registry = context.scope(), context.registry()
    if revision is None:
        pointer = operations.rollback(registry, scope, name, writer=writer_id())
    else:
        pointer = operations.promote(registry, scope, name, revision, writer=writer_id())
    registry.close()
    if wait is not None:
        wait_for(context, scope, {f"{scope}/.active/{name}": pointer.generation}, wait, fail_on=name)
    context.out.print(f"{verb} {name}: serves {pointer.revision}", markup=False)


@click.command()
@click.argument("name")
@click.argument("revision")
@_wait
@click.pass_obj
def promote(context: Context, name: str, revision: str, wait: float | None) -> None:
    """Let NAME serve REVISION.

    \b
    Example:
      lora-fs promote support v2
    """
    _pointed(context, name, "promoted", wait, revision)


@click.command()
@click.argument("name")
@_wait
@click.pass_obj
def rollback(context: Context, name: str, wait: float | None) -> None:
    """Let NAME serve the revision it served before.

    \b
    Example:
      lora-fs rollback support
    """
    _pointed(context, name, "rolled back", wait, None)


@click.command("list")
@click.option("-o", "--output", type=click.Choice(["text", "wide", "json", "name"]), default="text")
@click.pass_obj
def list_adapters(context: Context, output: str) -> None:
    """List what is registered.

    \b
    Example:
      lora-fs list -o wide
    """
    scope, registry = context.scope(), context.registry()
    rows = []
    listing = registry.scan(scope)
    names = sorted({name for entries in listing.revisions.values() for name in entries.records})
    for name in names:
        pointer = operations.active(registry, scope, name)
        serving = pointer.revision if pointer is not None else None
        for revision, record in sorted(operations.present_revisions(registry, scope, name).items()):
            rows.append((record, revision == serving))
    if output == "json":
        context.emit([{**describe(record), "active": active} for record, active in rows])
        return
    if output == "name":
        for name in sorted({record.name for record, _ in rows}):
            click.echo(name)
        return
    table = Table(box=None, pad_edge=False)
    wide = ["DIGEST", "ORIGIN", "POLICY", "UPDATED"] if output == "wide" else []
    for column in ("NAME", "REVISION", "ACTIVE", "RANK", "SIZE", *wide):
        table.add_column(column)
    for record, active in rows:
        policy = record.spec.policy.kind.value if record.spec.policy else "default"
        more = [record.spec.digest[7:19], record.origin, policy, record.updated_at] if wide else []
        size = f"{record.spec.size_bytes / 1e6:.1f} MB"
        mark = "*" if active else ""
        table.add_row(record.name, record.revision, mark, str(record.spec.lora.rank), size, *more)
    context.out.print(table)


@click.command()
@click.argument("name")
@click.pass_obj
def show(context: Context, name: str) -> None:
    """Show NAME's pointer and revisions as JSON.

    \b
    Example:
      lora-fs show support
    """
    scope, registry = context.scope(), context.registry()
    revisions = operations.present_revisions(registry, scope, name)
    if not revisions:
        raise NotFound(f"{name} is not registered in {scope}")
    pointer = operations.active(registry, scope, name)
    context.emit(
        {
            "pointer": pointer.model_dump(mode="json") if pointer else None,
            "revisions": [describe(record) for record in revisions.values()],
        }
    )


@click.command("validate")
@click.argument("path")
@click.option("--allow", multiple=True, metavar="CODE")
@_output
@click.pass_obj
def validate_folder(context: Context, path: str, allow: tuple[str, ...], output: str) -> None:
    """Check the adapter in PATH as register would; exit 5 if it cannot be served.

    \b
    Example:
      lora-fs validate ./support-lora
    """
    folder = Path(path)
    report = validate(folder, context.expectation(allow=allow))
    if output == "json":
        context.emit({"ok": report.ok, "findings": [f.model_dump(mode="json") for f in report.findings]})
        if not report.ok:
            raise SystemExit(5)
        return
    if not report.ok:
        raise InvalidAdapter(path, report.findings)
    for finding in report.findings:
        context.out.print(f"warning: {finding.render()}", markup=False)
    context.out.print(f"{path} can be served", markup=False)


COMMANDS = (register, unregister, list_adapters, show, validate_folder, promote, rollback)
