"""register and validate: what becomes of a folder."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.wait import wait_for
from lora_fs.sidecar.errors import InputError, InvalidAdapter
from lora_fs.sidecar.model import Policy, PolicyKind
from lora_fs.sidecar.registry import operations
from lora_fs.sidecar.registry.operations import Registered, Registration
from lora_fs.sidecar.settings import Settings, writer_id
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.validate import validate


@click.command()
@click.argument("name")
@click.argument("source")
@click.option("--revision", help="Default: the next vN")
@click.option("--base-model", metavar="ID", help="What it was made for, when its config does not say")
@click.option(
    "--policy",
    type=click.Choice([kind.value for kind in PolicyKind]),
    help="When it is in the engine [default: as each sidecar is set, lazy]",
)
@click.option(
    "--ttl",
    callback=parameters.seconds,
    metavar="TIME",
    help="Evict a lazy adapter after this idle time: 90s, 15m, 1h [default: LORA_FS_DEFAULT_TTL_S, 1h]",
)
@click.option("--priority", type=int, default=0, help="Eager and pinned: greater is loaded first")
@click.option("--label", multiple=True, callback=parameters.labels, metavar="K=V", help="Repeatable")
@click.option("--link", is_flag=True, help="Refer to the folder where it is, under an allowed source")
@click.option("--activate/--no-activate", default=True, help="Let the plain name serve it [default: yes]")
@parameters.allow
@click.option("--dry-run", is_flag=True, help="Check and say, change nothing")
@parameters.wait
@parameters.output
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
      lora-fs register billing ./billing-lora --policy eager --priority 10 --label team=finance
    """
    folder = resolve(source)
    scope, settings = context.scope(), context.settings
    if link:
        _check_linked(folder, context.root(), settings)
    registry = context.registry(create=not dry_run)
    chosen = _policy(settings, policy, ttl, priority)
    wanted = Registration(name, folder, folder.as_uri(), revision, base_model, chosen, label, link, activate)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    quiet = output == "json" or not context.out.is_terminal
    with Progress(*columns, transient=True, disable=quiet) as bar:
        size = sum(path.stat().st_size for path in folder.glob("adapter_model.*") if path.is_file())
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
        wait_for(context, scope, [done.record], wait, fail_on=name)
    _tell(context, done, dry_run, output)


def _policy(settings: Settings, policy: str | None, ttl: int | None, priority: int) -> Policy | None:
    if not (policy or ttl or priority):
        return None
    kind = PolicyKind(policy or settings.default_policy)
    return Policy(kind=kind, ttl_s=ttl or settings.default_ttl_s, priority=priority)


def _check_linked(folder: Path, root: Path, settings: Settings) -> None:
    """Every sidecar will read the folder where it is: only what was allowed may be referred to."""
    allowed = [root.resolve(), *(Path(source).resolve() for source in settings.allowed_sources)]
    if not any(folder.is_relative_to(place) for place in allowed):
        places = ", ".join(map(str, allowed))
        raise InputError(
            f"--link may refer to folders under {places}; {folder} is not: copy it (leave --link out), "
            "or name its folder in LORA_FS_ALLOWED_SOURCES"
        )


def _tell(context: Context, done: Registered, dry_run: bool, output: str) -> None:
    record = done.record.model_dump(mode="json")
    if output == "json":
        warnings = [finding.model_dump(mode="json") for finding in done.report.warnings]
        context.emit({"changed": done.changed, "dry_run": dry_run, "record": record, "warnings": warnings})
        return
    for finding in done.report.warnings:
        context.say(f"warning: {finding.render()}")
    verb = "would register" if dry_run else "registered"
    if not done.changed:
        verb = "unchanged: the same bytes are registered as"
    context.say(f"{verb} {done.record.name}@{done.record.revision} in {done.record.key.scope}")


@click.command("validate")
@click.argument("path")
@parameters.allow
@parameters.output
@click.pass_obj
def validate_folder(context: Context, path: str, allow: tuple[str, ...], output: str) -> None:
    """Check the adapter in PATH as register would; exit 5 if it cannot be served.

    \b
    Examples:
      lora-fs validate ./support-lora
      lora-fs validate ./support-lora -o json
    """
    report = validate(Path(path), context.expectation(allow=allow))
    if output == "json":
        context.emit({"ok": report.ok, "findings": [f.model_dump(mode="json") for f in report.findings]})
        if not report.ok:
            raise click.exceptions.Exit(5)
        return
    if not report.ok:
        raise InvalidAdapter(path, report.findings)
    for finding in report.findings:
        context.say(f"warning: {finding.render()}")
    context.say(f"{path} can be served")


COMMANDS = (register, validate_folder)
