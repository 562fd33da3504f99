"""The options and arguments that commands share: how they are parsed, and how they complete.

Completion never fails and never speaks: where the registry cannot be read, nothing is proposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import AdapterKey, Scope, check_segment, model_slug
from lora_fs.sidecar.settings import load_settings

if TYPE_CHECKING:
    from lora_fs.sidecar.registry.store.writer import Registry

MAX_LOOKED_AT = 200  # records read for one completion; beyond it withdrawn names are proposed, too
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Place(click.Path):
    """A path that was really given: an empty one would be the folder one happens to be in."""

    name = "path"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "" or "\0" in str(value):
            self.fail("the path is empty, or holds a NUL byte: is a variable unset?", param, ctx)
        return Path(str(value))


def seconds(_: object, __: object, value: str | None) -> int | None:
    """Parse ``90``, ``90s``, ``15m``, ``1h`` or ``2d``."""
    if value is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd]?)", value)
    if match is None:
        raise click.BadParameter("write it as 90, 90s, 15m, 1h or 2d, and more than 0")
    return int(match[1]) * _UNITS[match[2] or "s"]


def finite(_: object, __: object, value: float | None) -> float | None:
    """Refuse ``nan`` and ``inf``, which no wait would ever end by."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("write a number")
    return value


def labels(_: object, __: object, value: tuple[str, ...]) -> dict[str, str]:
    """Parse ``key=value``, any number of times."""
    pairs = [item.partition("=") for item in value]
    if any(not key or not equals for key, equals, _value in pairs):
        raise click.BadParameter("write it as key=value")
    return {key: text for key, _equals, text in pairs}


def labels_or_none(_: object, __: object, value: tuple[str, ...]) -> dict[str, str | None]:
    """Parse ``key=value``, and ``key-`` for a label that is to go, any number of times."""
    found: dict[str, str | None] = {}
    for item in value:
        key, equals, text = item.partition("=")
        if not equals and item.endswith("-"):
            key = item[:-1]
        elif not equals:
            key = ""
        if not key:
            raise click.BadParameter("write it as key=value, or key- to take it away")
        found[key] = text if equals else None
    return found


def count_or_none(_: object, __: object, value: str | None) -> str | None:
    """Check a number from 1 on, or ``none``."""
    if value not in (None, "none") and not re.fullmatch(r"[1-9][0-9]{0,8}", str(value)):
        raise click.BadParameter("write a whole number from 1 on, or none")
    return value


def segment(what: str) -> Callable[[object, object, str | None], str | None]:
    """Refuse what cannot be a folder's name, before anything is looked for."""
    return lambda _, __, value: value if value is None else check_segment(what, value)


def _registry(context: click.Context) -> tuple[Registry, Scope]:
    given = {name: context.find_root().params.get(name) for name in ("root", "model")}
    namespaces = context.find_root().params.get("namespace") or ()
    settings = load_settings(**given, namespace=namespaces[0] if namespaces else None)
    if settings.root is None or settings.model is None:
        raise click.UsageError("no registry")
    from lora_fs.sidecar.registry.store.writer import Registry

    scope = Scope(check_segment("namespace", settings.namespace), model_slug(settings.model))
    return Registry(settings.root), scope


def _registered(registry: Registry, scope: Scope, incomplete: str) -> Iterator[str]:
    looked_at = 0
    for revision, listing in registry.scan(scope).revisions.items():
        for name, generation in listing.records.items():
            if not name.startswith(incomplete):
                continue
            looked_at += 1
            try:
                known = looked_at > MAX_LOOKED_AT
                series = registry.records(AdapterKey(*scope, revision, name))
                if known or registry.read(series, generation).present:
                    yield name
            except LoraFsError:
                yield name


def _names(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        found = set(_registered(*_registry(context), incomplete))
    except Exception:
        return []
    return [CompletionItem(name) for name in sorted(found)]


def _revisions(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        from lora_fs.sidecar.registry.lifecycle import release

        registry, scope = _registry(context)
        named = context.params.get("name") or context.args[0]  # unparsed where an option lacks its value
        found = release.present_revisions(registry, scope, named)
    except Exception:
        return []
    return [CompletionItem(revision) for revision in sorted(found) if revision.startswith(incomplete)]


def _folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def _codes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from lora_fs.sidecar.validate.codes import CODES

    found = (code for code, entry in CODES.items() if entry.overridable)
    return [CompletionItem(code) for code in found if code.startswith(incomplete)]


def _create(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and context.obj is not None:
        settings = context.obj.settings.model_copy(update={"create": True})
        context.obj = replace(context.obj, settings=settings)


create = click.option(
    "--create",
    is_flag=True,
    expose_value=False,
    callback=_create,
    help="Make the registry if there is none, for demos and development [LORA_FS_CREATE]",
)
output = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For people, or for scripts",
)
wait = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    callback=finite,
    metavar="SECONDS",
    help="Wait so long until every live replica follows; exit 6 if one does not [default: do not wait]",
)
name = click.argument("name", callback=segment("name"), shell_complete=_names)
name_or_all = click.argument("name", required=False, callback=segment("name"), shell_complete=_names)
revision = click.argument("revision", callback=segment("revision"), shell_complete=_revisions)
other_revision = click.argument(
    "revision", required=False, callback=segment("revision"), shell_complete=_revisions
)
source = click.argument("source", shell_complete=_folders)
path = click.argument("path", shell_complete=_folders)
revision_option = click.option(
    "--revision",
    metavar="R",
    callback=segment("revision"),
    shell_complete=_revisions,
    help="This revision only [default: the only one there is]",
)
allow = click.option(
    "--allow",
    multiple=True,
    metavar="CODE",
    shell_complete=_codes,
    help="Take this finding as a warning; repeatable [more: LORA_FS_ALLOW]",
)
