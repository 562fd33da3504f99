"""validate: whether a folder can be served; and the bar that shows how far its files are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.command import command
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.errors import InvalidAdapter
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.validate import validate


@contextmanager
def reading(folder: Path, *, times: int = 1) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, over so many reads of the weights; yields what moves it."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        size = sum(path.stat().st_size for path in folder.glob("adapter_model.*") if path.is_file())
        task = bar.add_task(f"reading {folder.name}", total=times * size)
        yield lambda count: bar.advance(task, count)


@command("validate")
@parameters.path
@parameters.allow
@parameters.output
@click.pass_obj
def validate_folder(context: Context, path: str, allow: tuple[str, ...], output: Format) -> None:
    """Check the adapter in PATH as register would; exit 5 if it cannot be served.

    Where the registry's folder and the base model are given, the live replicas' limits count, too.

    \b
    Examples:
      lora-fs validate ./support-lora
      lora-fs validate ./support-lora -o json
    """
    folder, expectation = resolve(path), context.expectation(allow=allow)
    if context.settings.root is not None and context.settings.model:
        expectation = with_fleet(expectation, Layout(context.root()), context.scope())
    with reading(folder) as advance:
        report = validate(folder, expectation, progress=advance)
    told = {"ok": report.ok, "findings": [f.model_dump(mode="json") for f in report.findings]}
    if context.printed(told, output, [f.code for f in report.findings]):
        if not report.ok:
            raise click.exceptions.Exit(5)
        return
    if not report.ok:
        raise InvalidAdapter(str(folder), report.findings)
    for finding in report.findings:
        context.say(f"warning: {finding.render()}")
    context.say(f"{path} can be served")


COMMANDS = (validate_folder,)
