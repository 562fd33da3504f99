"""unregister, promote and rollback: what a name serves."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.wait import wait_for
from lora_fs.sidecar.model import AdapterKey, Pointer
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.settings import writer_id


@click.command()
@parameters.name
@parameters.revision_option
@click.option("--all-revisions", is_flag=True, help="The name with everything it has")
@click.option("--keep-files", is_flag=True, help="gc never removes its files")
@parameters.wait
@parameters.output
@click.pass_obj
def unregister(
    context: Context,
    name: str,
    revision: str | None,
    all_revisions: bool,
    keep_files: bool,
    wait: float | None,
    output: str,
) -> None:
    """Take NAME away, everywhere.

    \b
    Examples:
      lora-fs unregister support --wait 20
      lora-fs unregister support --revision v1
      lora-fs unregister support --all-revisions
    """
    if revision is not None and all_revisions:
        raise click.UsageError("--revision and --all-revisions exclude each other")
    scope = context.scope()
    with context.opened() as registry:
        gone = release.unregister(
            registry,
            scope,
            name,
            revision=revision,
            all_revisions=all_revisions,
            keep_files=keep_files,
            writer=writer_id(),
        )
    context.noted.update(revision=",".join(record.revision for record in gone))
    if output == "json":
        context.emit({"records": [record.model_dump(mode="json") for record in gone]})
    else:
        context.say(f"unregistered {name} ({', '.join(record.revision for record in gone)}) in {scope}")
    if wait is not None:
        wait_for(context, scope, gone, wait, gone={record.key for record in gone})


@click.command()
@parameters.name
@parameters.revision
@parameters.wait
@parameters.output
@click.pass_obj
def promote(context: Context, name: str, revision: str, wait: float | None, output: str) -> None:
    """Let NAME serve REVISION.

    \b
    Examples:
      lora-fs promote support v2 --wait 20
    """
    with context.opened() as registry:
        pointer = release.promote(registry, context.scope(), name, revision, writer=writer_id())
    _follow(context, pointer, "promoted", wait, output)


@click.command()
@parameters.name
@parameters.wait
@parameters.output
@click.pass_obj
def rollback(context: Context, name: str, wait: float | None, output: str) -> None:
    """Let NAME serve the revision it served before.

    \b
    Examples:
      lora-fs rollback support --wait 20
    """
    with context.opened() as registry:
        pointer = release.rollback(registry, context.scope(), name, writer=writer_id())
    _follow(context, pointer, "rolled back", wait, output)


def _follow(context: Context, pointer: Pointer, verb: str, wait: float | None, output: str) -> None:
    context.noted.update(revision=pointer.revision)
    if output == "json":
        context.emit({"pointer": pointer.model_dump(mode="json")})
    else:
        context.say(f"{verb} {pointer.name}: serves {pointer.revision}")
    if wait is not None and pointer.revision is not None:
        scope = context.scope()
        loads = AdapterKey(*scope, pointer.revision, pointer.name)
        wait_for(context, scope, [pointer], wait, loads=loads)


COMMANDS = (unregister, promote, rollback)
