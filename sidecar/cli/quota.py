"""quota: what a namespace may register, and what it has."""

from __future__ import annotations

import datetime
import re
from typing import Any

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.errors import OperatorError
from lora_fs.sidecar.model import Quota, check_segment
from lora_fs.sidecar.registry.store.quota import Usage
from lora_fs.sidecar.settings import writer_id

UNBOUNDED = "none"
BOUNDS = 3
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(_: object, __: object, value: str | None) -> int | str | None:
    """Parse a count, or ``none``."""
    if value is None or value == UNBOUNDED:
        return value
    if not re.fullmatch(r"[0-9]{1,15}", value):
        raise click.BadParameter("write a number, or none to lift the bound")
    return int(value)


def size(_: object, __: object, value: str | None) -> int | str | None:
    """Parse bytes as Kubernetes writes them, ``50Gi``, ``500M`` or ``1000``; or ``none``."""
    if value is None or value == UNBOUNDED:
        return value
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]i?)?", value)
    if match is None:
        raise click.BadParameter("write it as 1000, 500M or 50Gi, or none to lift the bound")
    return int(match[1]) * _UNITS[match[2] or ""]


@click.command()
@click.option(
    "--adapters", callback=amount, metavar="N", help="At most so many names, of all models together, or none"
)
@click.option(
    "--bytes", "size_bytes", callback=size, metavar="SIZE", help="Of all revisions: 50Gi, 500M, 1000, or none"
)
@click.option("--per-minute", callback=amount, metavar="N", help="Registrations in a minute, or none")
@click.option(
    "--keep-revisions",
    callback=parameters.count_or_none,
    metavar="N",
    help="gc keeps so many revisions of each name that says nothing itself, or none: all",
)
@click.option("--remove", is_flag=True, help="Let nothing bound the namespace")
@parameters.create
@parameters.output
@click.pass_obj
def quota(
    context: Context,
    adapters: int | str | None,
    size_bytes: int | str | None,
    per_minute: int | str | None,
    keep_revisions: str | None,
    remove: bool,
    output: str,
) -> None:
    """Show what the namespace may register and what it has; with options, set it.

    \b
    Examples:
      lora-fs quota
      lora-fs quota --adapters 100 --bytes 50Gi --per-minute 30
      lora-fs quota --bytes none
      lora-fs quota --keep-revisions 5
    """
    given = {"adapters": adapters, "size_bytes": size_bytes, "registrations_per_minute": per_minute}
    bounding = sum(value is not None for value in given.values())
    given |= {"keep_revisions": keep_revisions}
    said = {name: None if value == UNBOUNDED else value for name, value in given.items() if value is not None}
    if remove and said:
        raise click.UsageError("--remove and a bound exclude each other")
    namespace = check_segment("namespace", context.settings.namespace)
    with context.opened(create=bool(said)) as registry:
        accounts = registry.accounts
        if said or remove:
            registry.check_writable()
        if remove:
            accounts.remove(namespace)
        elif said:
            before: dict[str, Any] = {}
            try:
                known = accounts.quota(namespace)
                before = known.model_dump(mode="json") if known is not None else {}
            except OperatorError:
                if bounding < BOUNDS:  # else what was there, damaged, is replaced whole
                    raise
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            who = {"namespace": namespace, "writer": writer_id(), "updated_at": now}
            accounts.write(Quota.model_validate({**before, **who, **said}))
        bounds, usage = accounts.quota(namespace), accounts.usage(namespace)
    if output == "json":
        used = {"adapters": len(usage.names), "size_bytes": usage.size_bytes}
        context.emit(
            {
                "namespace": namespace,
                "used": {**used, "registrations_per_minute": len(usage.recent)},
                "quota": bounds.model_dump(mode="json") if bounds is not None else None,
            }
        )
        return
    context.table(("NAMESPACE", "WHAT", "USED", "ALLOWED"), _rows(namespace, bounds, usage))


def _rows(namespace: str, bounds: Quota | None, usage: Usage) -> list[tuple[str, ...]]:
    allowed = (
        (None, None, None, None)
        if bounds is None
        else (bounds.adapters, bounds.size_bytes, bounds.registrations_per_minute, bounds.keep_revisions)
    )
    used = (len(usage.names), usage.size_bytes, len(usage.recent), "-")
    whats = ("adapters", "bytes", "registrations in the last minute", "revisions of a name that gc keeps")
    return [
        (namespace, what, str(has), "any" if may is None else str(may))
        for what, has, may in zip(whats, used, allowed, strict=True)
    ]


COMMANDS = (quota,)
