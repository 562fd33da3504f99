"""quota: what a namespace may register, and what it has."""

from __future__ import annotations

import datetime
from typing import Any

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import NONE, Count, Size
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.errors import NewerRecord, OperatorError
from lora_fs.sidecar.model import Quota, check_segment
from lora_fs.sidecar.model.gates import parse
from lora_fs.sidecar.registry.store.quota import Usage
from lora_fs.sidecar.settings import writer_id

WHOLE = frozenset({"adapters", "size_bytes", "registrations_per_minute", "require_evaluation"})
COLUMNS = ("NAMESPACE", "WHAT", "USED", "ALLOWED")


@command()
@click.option(
    "--adapters", type=Count(), metavar="N", help="At most so many names, of all models together, or none"
)
@click.option(
    "--bytes",
    "size_bytes",
    type=Size(or_none=True),
    help="Of all revisions: 50Gi, 500M, 1000, or none",
)
@click.option("--per-minute", type=Count(), metavar="N", help="Registrations in a minute, or none")
@click.option(
    "--keep-revisions",
    type=Count(least=1),
    metavar="N",
    help="gc keeps so many revisions of each name that says nothing itself, or none: all",
)
@click.option(
    "--require-evaluation",
    metavar="GATE",
    help="What an evaluation must show before a revision serves a plain name, or none",
)
@click.option("--remove", is_flag=True, help="Remove all quotas of the namespace")
@click.option("-A", "--all-namespaces", is_flag=True, help="Show every namespace, one after the other")
@parameters.dry_run
@parameters.create
@parameters.no_headers
@parameters.output
@click.pass_obj
def quota(
    context: Context,
    adapters: int | str | None,
    size_bytes: int | str | None,
    per_minute: int | str | None,
    keep_revisions: int | str | None,
    require_evaluation: str | None,
    remove: bool,
    all_namespaces: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Show the namespace's quota and what it uses; with options, set the quota.

    \b
    Examples:
      lora-fs quota
      lora-fs quota -A
      lora-fs quota --adapters 100 --bytes 50Gi --per-minute 30
      lora-fs quota --bytes none
      lora-fs quota --keep-revisions 5
    """
    given: dict[str, int | str | None] = {
        "adapters": adapters,
        "size_bytes": size_bytes,
        "registrations_per_minute": per_minute,
    }
    if require_evaluation not in (None, NONE):
        parse(str(require_evaluation))
    given |= {"keep_revisions": keep_revisions, "require_evaluation": require_evaluation}
    said = {name: None if value == NONE else value for name, value in given.items() if value is not None}
    if remove and said:
        raise click.UsageError("--remove and a bound exclude each other")
    if all_namespaces and (remove or said):
        raise click.UsageError("--all-namespaces only shows: set the quota of one namespace with -n")
    if all_namespaces:
        _show_all(context, output)
        return
    namespace = check_segment("namespace", context.settings.namespace)
    with context.opened(create=bool(said) and not dry_run) as registry:
        accounts = registry.accounts
        changed: Quota | None = None
        if said or remove:
            registry.check_writable()
        if remove and not dry_run:
            accounts.remove(namespace)
            context.noted.update(remove=True)
        elif said:
            before: dict[str, Any] = {}
            try:
                known = accounts.quota(namespace)
                before = known.model_dump(mode="json") if known is not None else {}
            except OperatorError as error:
                if isinstance(error.__cause__, NewerRecord) or not said.keys() >= WHOLE:
                    raise
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            who = {"namespace": namespace, "writer": writer_id(), "updated_at": now}
            changed = Quota.model_validate({**before, **who, **said})
            if not dry_run:
                accounts.write(changed)
                context.noted.update(updated_at=now)
        bounds = changed if dry_run and (said or remove) else accounts.quota(namespace)
        usage = accounts.usage(namespace)
    if not context.printed(_told(namespace, bounds, usage, dry_run=dry_run), output, [namespace]):
        context.table(COLUMNS, _rows(namespace, bounds, usage))


def _show_all(context: Context, output: Format) -> None:
    registry = context.registry()
    found = [
        (namespace, registry.accounts.quota(namespace), registry.accounts.usage(namespace))
        for namespace in registry.namespaces()
    ]
    told = [_told(*one, dry_run=False) for one in found]
    if not context.printed(told, output, [namespace for namespace, _, _ in found]):
        context.table(COLUMNS, [row for one in found for row in _rows(*one)])


def _told(namespace: str, bounds: Quota | None, usage: Usage, *, dry_run: bool) -> dict[str, Any]:
    used = {"adapters": len(usage.names), "size_bytes": usage.size_bytes}
    return {
        "dry_run": dry_run,
        "namespace": namespace,
        "used": {**used, "registrations_per_minute": len(usage.recent)},
        "quota": bounds.model_dump(mode="json") if bounds is not None else None,
    }


def _rows(namespace: str, bounds: Quota | None, usage: Usage) -> list[tuple[str, ...]]:
    fields = ("adapters", "size_bytes", "registrations_per_minute", "keep_revisions", "require_evaluation")
    allowed = [getattr(bounds, field, None) for field in fields]
    used = (len(usage.names), usage.size_bytes, len(usage.recent), "-", "-")
    whats = (
        "adapters",
        "bytes",
        "registrations in the last minute",
        "revisions of a name that gc keeps",
        "evaluation of what a name serves",
    )
    return [
        (namespace, what, str(has), "any" if may is None else str(may))
        for what, has, may in zip(whats, used, allowed, strict=True)
    ]


COMMANDS = (quota,)
