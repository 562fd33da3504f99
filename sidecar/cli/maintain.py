"""gc: what an operator runs when the volume is full."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.errors import LoraFsError, OperatorError
from lora_fs.sidecar.registry import gc
from lora_fs.sidecar.registry.lock import lease


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Say what would go, remove nothing")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    callback=parameters.finite,
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Leave what is younger than so many hours",
)
@parameters.output
@click.pass_obj
def collect_garbage(context: Context, dry_run: bool, older_than: float, output: str) -> None:
    """Remove the files of adapters unregistered long ago, and what dead writers left.

    \b
    Examples:
      lora-fs gc --dry-run
      lora-fs gc --older-than 48
    """
    scope, registry = context.scope(), context.registry()
    unknown: LoraFsError | None = None
    with lease(registry.layout.lease("gc"), wait_s=0) as had:
        if not had and not dry_run:
            raise OperatorError("another gc is at work on this volume, or it cannot be written")
        try:
            in_use = gc.in_use(registry)
        except LoraFsError as error:
            in_use, unknown = None, error
        found = gc.find(registry, scope, in_use, older_than * 3600)
        if not dry_run:
            gc.collect(found)
    if output == "json":
        items = [{"path": str(item.path), "why": item.why} for item in found]
        context.emit({"dry_run": dry_run, "removed": items, "kept": str(unknown) if unknown else None})
    else:
        for item in found:
            context.say(f"{'would remove' if dry_run else 'removed'} {item.path}: {item.why}")
        context.say(f"{len(found)} {'thing' if len(found) == 1 else 'things'}")
    if unknown is not None:
        raise OperatorError(f"every adapter's files are kept: {unknown}")


COMMANDS = (collect_garbage,)
