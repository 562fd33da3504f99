"""What every command has: the options that say which registry, and ``NAME@REVISION`` as a name.

The options stand before the command or behind it; behind it they win. Nothing here imports pydantic.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import click
from click.types import OptionHelpExtra

from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import FormatName, Place
from lora_fs.sidecar.shared_settings import SHARED, variables


class Setting(click.Option):
    """An option above a setting. Shows the setting's variable and default, which only the settings define."""

    def __init__(self, words: Sequence[str], shown_default: str = "", **attributes: Any) -> None:
        super().__init__(words, show_envvar=True, **attributes)
        self.shown_default = shown_default

    def resolve_envvar_value(self, ctx: click.Context) -> None:
        return None

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        return {**extra, "default": self.shown_default} if self.shown_default else extra


def _take(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    """Give the run an option, wherever it stands."""
    context = ctx.ensure_object(Context)
    if value in (None, ()):
        return value
    if option.name == "namespace":
        context.take(namespace=value[0], namespaces=value)
    elif option.name is not None:
        context.take(**{option.name: value})
    if option.name == "base_config":
        context.checks_base_config = True
    return value


def _shared(name: str, *words: str, **attributes: Any) -> Setting:
    """Make the option of a setting that every command takes: see ``setting``, which needs pydantic."""
    told = SHARED[name]
    return Setting(
        [*(words or (f"--{name.replace('_', '-')}",)), name],
        envvar=variables(name),
        help=told.help,
        shown_default=told.default,
        callback=_take,
        **attributes,
    )


OPTIONS: Final[tuple[Setting, ...]] = (
    _shared("root", type=Place(), metavar="DIR"),
    _shared("server", metavar="URL"),
    _shared("client_token_file", "--token-file", type=Place(), metavar="FILE"),
    _shared("namespace", "-n", "--namespace", multiple=True, metavar="NAME"),
    _shared("model", metavar="ID"),
    _shared("base_config", type=Place(), metavar="PATH"),
)


class Command(click.Command):
    """A command with the shared options; ``shared`` False: it needs no registry."""

    def __init__(self, *arguments: Any, shared: bool = True, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        taken = {word for parameter in self.params for word in parameter.opts}
        self.own = tuple(self.params)
        for option in OPTIONS if shared else ():
            if not taken & set(option.opts):
                hidden = copy.copy(option)
                hidden.expose_value = False
                self.params.append(hidden)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split ``NAME@REVISION``, if the command takes a revision."""
        rest = super().parse_args(ctx, args)
        named = ctx.params.get("name")
        if not ctx.resilient_parsing and isinstance(named, str) and "@" in named:
            ctx.params["name"], ctx.params["revision"] = self._revised(ctx, named)
        return rest

    def _revised(self, ctx: click.Context, named: str) -> tuple[str, str]:
        name, _, revision = named.partition("@")
        if not any(parameter.name == "revision" for parameter in self.params):
            ctx.fail(f"{self.name} takes a name without a revision: write {name}")
        also = ctx.params.get("revision")
        if also not in (None, revision):
            ctx.fail(f"{named} and revision {also} are two revisions: write one")
        return name, revision

    def invoke(self, ctx: click.Context) -> Any:
        if not gc.isenabled():  # main switched it off; frozen objects are not scanned again
            gc.freeze()
            gc.enable()
        context = ctx.ensure_object(Context)
        if self.name != "sidecar" and len(context.given.get("namespaces", ())) > 1:
            ctx.fail(f"{self.name} works in one namespace: give --namespace once")
        if context.checks_base_config:
            context.expectation()  # also if the command does not use it: reports a misspelt value
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in (("Options", self.own), ("Registry", self.params[len(self.own) :])):
            records = [record for one in options if (record := _record(one, ctx)) is not None]
            if title == "Options" and (help_option := self.get_help_option(ctx)) is not None:
                records += [record for record in (help_option.get_help_record(ctx),) if record]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _record(option: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    return option.get_help_record(ctx) if isinstance(option, click.Option) else None


command: Final = partial(click.command, cls=Command)
output_option: Final = click.option(
    "-o",
    "--output",
    type=FormatName(),
    default="text",
    show_default=True,
    help="For people, wide with more columns; for scripts; or names alone",
)
