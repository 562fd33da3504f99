"""The command group, its shared options, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli import (
    backup,
    doctor,
    install,
    listing,
    maintain,
    names,
    parameters,
    quota,
    register,
    serve,
    status,
    trail,
    validation,
)
from lora_fs.sidecar.cli.context import Context, complain, exit_code
from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.settings import load_settings

FAILED, USAGE, INTERRUPTED = 1, 2, 130
SENTENCE = 200
ENVIRONMENT = (
    "Which registry: --root, --namespace and --model before the command, "
    "or LORA_FS_ROOT, LORA_FS_NAMESPACE and LORA_FS_MODEL."
)


class Commands(click.Group):
    """The commands, listed in the order of their use, each with the whole of its first sentence."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _while_read():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _while_read():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(SENTENCE)) for name, command in self.commands.items()]
            )


@contextmanager
def _while_read() -> Iterator[None]:
    """A reader of the output that goes away, as ``head`` does, ends the command without a word."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes once more
        raise click.exceptions.Exit(0) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--root",
    type=parameters.Place(),
    metavar="DIR",
    help="The registry's folder [LORA_FS_ROOT, DYNAMO_LORA_PATH]",
)
@click.option(
    "--namespace", multiple=True, metavar="NAME", help="Tenant [LORA_FS_NAMESPACE; default: default]"
)
@click.option("--model", metavar="ID", help="Base model: hub id, path or served name [LORA_FS_MODEL]")
@click.option(
    "--base-config",
    type=parameters.Place(),
    metavar="PATH",
    help="The base model's config.json, or its folder [LORA_FS_BASE_CONFIG]",
)
@click.version_option(__version__, prog_name="lora-fs")
@click.pass_context
def cli(context: click.Context, /, namespace: tuple[str, ...], **options: Any) -> None:
    """Register LoRA adapters on a shared volume; every vLLM replica serves them.

    \b
    Examples:
      lora-fs --root /adapters --model Qwen/Qwen2.5-7B register support ./support-lora
      lora-fs status
      lora-fs unregister support

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict, 5 invalid adapter,
    6 timed out waiting, 7 over quota, 130 interrupted.

    \b
    Shell completion: eval "$(_LORA_FS_COMPLETE=bash_source lora-fs)", or zsh_source; for fish:
      _LORA_FS_COMPLETE=fish_source lora-fs | source
    """
    if namespace:
        options |= {"namespace": namespace[0], "namespaces": namespace}
    try:
        context.obj = Context(load_settings(**options), Console())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        variable = field if field.isupper() else f"LORA_FS_{field.upper()}"
        raise click.UsageError(f"{variable}={first['input']}: {first['msg']}") from error


for module in (register, validation, names, listing, status, quota, serve, doctor, maintain, backup, install):
    for command in module.COMMANDS:
        trail.follow(command)
        command.epilog = ENVIRONMENT if command.name != "demo" else None
        cli.add_command(command)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; returns its documented exit code. Every known error is one sentence."""
    try:
        code = cli.main(arguments, prog_name="lora-fs", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        told = _misplaced(error) if isinstance(error, click.NoSuchOption) else error
        with suppress(OSError):  # nobody reads why
            told.show()
        return told.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except LoraFsError as error:
        return _fail(str(error), exit_code(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}", FAILED)


def _misplaced(error: click.NoSuchOption) -> click.UsageError:
    """An option of the group that stands behind the command is almost right: say where it belongs."""
    if error.option_name not in {option for parameter in cli.params for option in parameter.opts}:
        return error
    where = f"write {error.option_name} before the command: lora-fs {error.option_name} … COMMAND"
    return click.UsageError(where, error.ctx)


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # nobody reads why
        complain(message)
    return code


def main() -> None:
    """The script's entry; a stream that was closed is one that nobody reads."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    sys.exit(run())
