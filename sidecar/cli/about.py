"""version and help."""

from __future__ import annotations

import platform

import click

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli.options.command import command, output_option
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format


@command("version", shared=False)
@output_option
@click.pass_obj
def version(context: Context, output: Format) -> None:
    """Show the version of lora-fs and of Python.

    \b
    Examples:
      lora-fs version
      lora-fs version -o json
    """
    python = platform.python_version()
    if not context.printed({"lora_fs": __version__, "python": python}, output, [__version__]):
        context.say(f"lora-fs {__version__} (Python {python})")


@command("help", shared=False)
@click.argument("command", required=False)
@click.pass_context
def help_page(context: click.Context, command: str | None) -> None:
    """Show the page of COMMAND, or the list of commands.

    \b
    Examples:
      lora-fs help
      lora-fs help register
    """
    parent = context.find_root()
    group = parent.command
    assert isinstance(group, click.Group)
    if command is None:
        click.echo(group.get_help(parent))
        return
    found = group.get_command(parent, command)
    if found is None:
        raise click.UsageError(f"no such command {command!r}: `lora-fs help` lists them")
    click.echo(found.get_help(click.Context(found, info_name=command, parent=parent)))


COMMANDS = (version, help_page)
