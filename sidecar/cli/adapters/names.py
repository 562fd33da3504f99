"""unregister, promote and rollback: what a name serves."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.waiting import follow
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.registry.lifecycle.acts import Done, Promote, Rollback, Unregister


@command()
@parameters.name
@parameters.revision_option(default="the only one there is")
@click.option("--all-revisions", is_flag=True, help="The name with everything it has")
@click.option("--keep-files", is_flag=True, help="gc never removes its files")
@click.option("--force", is_flag=True, help="Also the revision that NAME serves while others are registered")
@parameters.changes
@click.pass_obj
def unregister(
    context: Context,
    name: str,
    revision: str | None,
    all_revisions: bool,
    keep_files: bool,
    force: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Unregister NAME on every replica.

    \b
    Examples:
      lora-fs unregister support --wait 20
      lora-fs unregister support --revision v1
      lora-fs unregister support --all-revisions
    """
    if revision is not None and all_revisions:
        raise click.UsageError("--revision and --all-revisions exclude each other")
    scope = context.scope()
    act = Unregister(
        revision=revision, all_revisions=all_revisions, keep_files=keep_files, force=force, dry_run=dry_run
    )
    gone = context.backend.do(scope, name, act).records
    context.noted.update(revision=",".join(record.revision for record in gone))
    told = {"dry_run": dry_run, "records": [record.model_dump(mode="json") for record in gone]}
    if not context.printed(told, output, [f"{name}@{record.revision}" for record in gone]):
        did = "would unregister" if dry_run else "unregistered"
        context.say(f"{did} {name} ({', '.join(record.revision for record in gone)}) in {scope}")
    follow(context, scope, gone, dry_run=dry_run, gone={record.key for record in gone})


@command()
@parameters.name
@parameters.other_revision
@click.option(
    "--require-evaluation", is_flag=True, help="Exit 5 unless its newest evaluation passed its gate"
)
@click.option("--force", is_flag=True, help="Also one that the namespace's gate refuses; the audit tells")
@parameters.changes
@click.pass_obj
def promote(
    context: Context,
    name: str,
    revision: str | None,
    require_evaluation: bool,
    force: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Let NAME serve REVISION.

    \b
    Examples:
      lora-fs promote support v2 --wait 20
      lora-fs promote support@v2
    """
    if revision is None:
        raise click.UsageError(f"say which revision: lora-fs promote {name} REVISION")
    if force and require_evaluation:
        raise click.UsageError("--force and --require-evaluation exclude each other")
    act = Promote(revision=revision, require_evaluation=require_evaluation, force=force, dry_run=dry_run)
    done = context.backend.do(context.scope(), name, act)
    _tell(context, done, "promote", output)


@command()
@parameters.name
@parameters.revision_option(default="whichever it served before")
@parameters.changes
@click.pass_obj
def rollback(
    context: Context,
    name: str,
    revision: str | None,
    dry_run: bool,
    output: Format,
) -> None:
    """Let NAME serve the revision it served before.

    With NAME@R a second rollback changes nothing; exit 4 if it served another one before.

    \b
    Examples:
      lora-fs rollback support --wait 20
      lora-fs rollback support@v1
    """
    done = context.backend.do(context.scope(), name, Rollback(revision=revision, dry_run=dry_run))
    _tell(context, done, "roll back", output)


def _tell(context: Context, done: Done, verb: str, output: Format) -> None:
    pointer, dry_run = done.pointer, done.dry_run
    assert pointer is not None  # both acts move it
    context.noted.update(revision=pointer.revision)
    told = {"dry_run": dry_run, "pointer": pointer.model_dump(mode="json")}
    if not context.printed(told, output, [f"{pointer.name}@{pointer.revision}"]):
        did = f"would {verb}" if dry_run else {"promote": "promoted", "roll back": "rolled back"}[verb]
        context.say(f"{did} {pointer.name}: serves {pointer.revision}")
    if pointer.revision is not None:
        scope = context.scope()
        loads = AdapterKey(*scope, pointer.revision, pointer.name)
        follow(context, scope, [pointer], dry_run=dry_run, loads=loads)


COMMANDS = (unregister, promote, rollback)
