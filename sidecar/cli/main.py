"""The command group, its shared options, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli import listing, maintain, names, register, serve, status
from lora_fs.sidecar.cli.context import Context, exit_code
from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.settings import load_settings

INTERRUPTED = 130
UNBOUNDED = 100_000  # columns: what reads a pipe wants one line a row


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--root", type=click.Path(path_type=Path), help="Registry folder [LORA_FS_ROOT, DYNAMO_LORA_PATH]"
)
@click.option("--namespace", multiple=True, help="Tenant [LORA_FS_NAMESPACE; default: default]")
@click.option("--model", help="Base model: hub id, path or served name [LORA_FS_MODEL]")
@click.option("--base-config", type=click.Path(path_type=Path), help="The base model's config.json")
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
    6 timed out waiting, 130 interrupted.

    \b
    Shell completion: eval "$(_LORA_FS_COMPLETE=bash_source lora-fs)", or zsh_source; for fish:
      _LORA_FS_COMPLETE=fish_source lora-fs | source
    """
    if namespace:
        options |= {"namespace": namespace[0], "namespaces": namespace}
    try:
        width = None if sys.stdout.isatty() else UNBOUNDED
        context.obj = Context(load_settings(**options), Console(width=width, soft_wrap=True))
    except ValidationError as error:
        first = error.errors()[0]
        raise click.UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


for module in (register, names, listing, status, serve, maintain):
    for command in module.COMMANDS:
        cli.add_command(command)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; returns its documented exit code. Every known error is one sentence."""
    try:
        code = cli.main(arguments, prog_name="lora-fs", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("lora-fs: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes once more
        return 0
    except LoraFsError as error:
        click.echo(f"lora-fs: {error}", err=True)
        return exit_code(error)
    except OSError as error:
        click.echo(f"lora-fs: {error}", err=True)
        return 1


def main() -> None:
    """The script's entry."""
    sys.exit(run())
