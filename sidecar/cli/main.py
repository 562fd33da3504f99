"""The command group, its shared options, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli import adapters, maintain, serve, status
from lora_fs.sidecar.cli.context import Context, exit_code
from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.settings import load_settings


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
    6 timed out waiting. Shell completion: eval "$(_LORA_FS_COMPLETE=bash_source lora-fs)"
    """
    if namespace:
        options |= {"namespace": namespace[0], "namespaces": namespace}
    try:
        context.obj = Context(load_settings(**options), Console(soft_wrap=True))
    except ValidationError as error:
        first = error.errors()[0]
        raise click.UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


for command in (*adapters.COMMANDS, *status.COMMANDS, *serve.COMMANDS, *maintain.COMMANDS):
    cli.add_command(command)


def main() -> None:
    """Run the command line; every known error is one sentence and a documented code."""
    try:
        cli(standalone_mode=True)
    except LoraFsError as error:
        click.echo(f"lora-fs: {error}", err=True)
        sys.exit(exit_code(error))
