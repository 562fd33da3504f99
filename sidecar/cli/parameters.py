"""The options and arguments that commands share: how they are parsed, and how they complete.

Completion never fails: where the registry cannot be read, there is nothing to propose.
"""

from __future__ import annotations

import re

import click
from click.shell_completion import CompletionItem

from lora_fs.sidecar.model import Scope, check_segment, model_slug
from lora_fs.sidecar.registry import operations
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.settings import load_settings

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(_: object, __: object, value: str | None) -> int | None:
    """Parse ``90``, ``90s``, ``15m``, ``1h`` or ``2d``."""
    if value is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd]?)", value)
    if match is None:
        raise click.BadParameter("write it as 90, 90s, 15m, 1h or 2d, and more than 0")
    return int(match[1]) * _UNITS[match[2] or "s"]


def labels(_: object, __: object, value: tuple[str, ...]) -> dict[str, str]:
    """Parse ``key=value``, any number of times."""
    pairs = [item.partition("=") for item in value]
    if any(not key or not equals for key, equals, _value in pairs):
        raise click.BadParameter("write it as key=value")
    return {key: text for key, _equals, text in pairs}


def _registry(context: click.Context) -> tuple[Registry, Scope]:
    given = {name: context.find_root().params.get(name) for name in ("root", "model")}
    namespaces = context.find_root().params.get("namespace") or ()
    settings = load_settings(**given, namespace=namespaces[0] if namespaces else None)
    if settings.root is None or settings.model is None:
        raise click.UsageError("no registry")
    scope = Scope(check_segment("namespace", settings.namespace), model_slug(settings.model))
    return Registry(settings.root), scope


def _names(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        registry, scope = _registry(context)
        found = sorted(registry.scan(scope).pointers)
    except Exception:
        return []
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def _revisions(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        registry, scope = _registry(context)
        found = operations.present_revisions(registry, scope, str(context.params.get("name")))
    except Exception:
        return []
    return [CompletionItem(revision) for revision in sorted(found) if revision.startswith(incomplete)]


output = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True
)
wait = click.option(
    "--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait until every live replica follows"
)
existing_name = click.argument("name", shell_complete=_names)
existing_revision = click.argument("revision", shell_complete=_revisions)
revision_option = click.option("--revision", help="This revision only", shell_complete=_revisions)
allow = click.option(
    "--allow", multiple=True, metavar="CODE", help="Accept this finding of `validate`; repeatable"
)
