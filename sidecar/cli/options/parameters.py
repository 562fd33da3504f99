"""The options and arguments that commands share: their parsing and their completion.

Completion never fails and never speaks: if the registry is unreadable, or its server does not answer
soon, it proposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from lora_fs.sidecar.cli.options.command import Setting, output_option
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration
from lora_fs.sidecar.model import MOST_PRIORITY, check_segment

if TYPE_CHECKING:
    from lora_fs.sidecar.cli.backends.port import Backend
    from lora_fs.sidecar.model import Scope

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def named(_: object, __: object, value: str | None) -> str | None:
    """Refuse what is no ``NAME`` and no ``NAME@REVISION``."""
    if value is not None:
        name, at, revision = value.partition("@")
        check_segment("name", name)
        if at:
            check_segment("revision", revision)
    return value


def segment(what: str) -> Callable[[object, object, str | None], str | None]:
    """Refuse a value that is no folder's name, before any look-up."""
    return lambda _, __, value: value if value is None else check_segment(what, value)


def _proposed(
    context: click.Context, incomplete: str, find: Callable[[Backend, Scope], Iterable[str]]
) -> list[CompletionItem]:
    """The finds of ``find`` that begin so; none if it fails."""
    run = context.ensure_object(Context)
    run.completes = True
    try:
        with context.scope():
            found = {one for one in find(run.backend, run.scope()) if one.startswith(incomplete)}
    except Exception:
        return []
    finally:
        context.find_root().close()
    return [CompletionItem(one) for one in sorted(found)]


def _names(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Propose names; behind ``NAME@`` its revisions, where the command takes one."""
    name, at, _revision = incomplete.partition("@")
    if not at:
        return _proposed(context, incomplete, lambda backend, scope: backend.names(scope, incomplete))
    if not any(one.name == "revision" for one in context.command.params):
        return []

    def of_name(backend: Backend, scope: Scope) -> Iterator[str]:
        return (f"{name}@{one.revision}" for one in backend.named(scope, name).revisions)

    return _proposed(context, incomplete, of_name)


def _revisions(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    def of_name(backend: Backend, scope: Scope) -> Iterator[str]:
        name = context.params.get("name") or context.args[0]  # unparsed where an option lacks its value
        return (one.revision for one in backend.named(scope, name).revisions)

    return _proposed(context, incomplete, of_name)


def _folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def _codes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from lora_fs.sidecar.validate.codes import CODES

    found = (code for code, entry in CODES.items() if entry.overridable)
    return [CompletionItem(code) for code in found if code.startswith(incomplete)]


def _create(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Context).take(create=True)


output = output_option
PRIORITY: Final = click.IntRange(-MOST_PRIORITY, MOST_PRIORITY)
create = click.option(
    "--create",
    cls=Setting,
    envvar="LORA_FS_CREATE",
    is_flag=True,
    expose_value=False,
    callback=_create,
    help="Make the registry if there is none, for demos and development",
)


def _headers(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Context).headers = False


def _wait(context: click.Context, _: click.Parameter, value: float | None) -> None:
    context.ensure_object(Context).wait_s = value


def _min_replicas(context: click.Context, _: click.Parameter, value: int) -> None:
    context.ensure_object(Context).min_replicas = value


no_headers = click.option(
    "--no-headers",
    is_flag=True,
    expose_value=False,
    callback=_headers,
    help="Print no line of column names",
)
all_namespaces = click.option(
    "-A", "--all-namespaces", is_flag=True, help="Of every namespace that has this base model"
)
wait = click.option(
    "--wait",
    type=Duration(),
    expose_value=False,
    callback=_wait,
    help="Wait so long until every live replica follows; exit 6 if one does not [default: do not wait]",
)
min_replicas = click.option(
    "--min-replicas",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    expose_value=False,
    callback=_min_replicas,
    help="With --wait: exit 6 where fewer live replicas follow; 0: none is needed",
)
force = click.option("--force", is_flag=True, help="Register also what no live replica can serve")
dry_run = click.option("--dry-run", is_flag=True, help="Check and say what would change; change nothing")


def changes(function: _Decorated) -> _Decorated:
    """Give a command that changes names --dry-run, --wait, --min-replicas and -o."""
    return dry_run(wait(min_replicas(output(function))))


name = click.argument("name", callback=named, shell_complete=_names)
name_or_all = click.argument("name", required=False, callback=named, shell_complete=_names)
name_or_pattern = click.argument("name", required=False, shell_complete=_names)
pattern = click.argument("name", required=False, metavar="[PATTERN]", shell_complete=_names)
revision = click.argument("revision", callback=segment("revision"), shell_complete=_revisions)
other_revision = click.argument(
    "revision", required=False, callback=segment("revision"), shell_complete=_revisions
)
source = click.argument("source", shell_complete=_folders)
path = click.argument("path", shell_complete=_folders)


def revision_option(default: str = "every one") -> Callable[[_Decorated], _Decorated]:
    """``--revision R``, the same as ``NAME@R``. ``default``: which are meant without it."""
    return click.option(
        "--revision",
        metavar="R",
        callback=segment("revision"),
        shell_complete=_revisions,
        help=f"This revision only, as NAME@R [default: {default}]",
    )


allow = click.option(
    "--allow",
    multiple=True,
    metavar="CODE",
    shell_complete=_codes,
    help="Take this finding as a warning; repeatable [more: LORA_FS_ALLOW]",
)
