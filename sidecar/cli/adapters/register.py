"""register: a folder, here or elsewhere, becomes a revision that every replica serves."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration, labels, text
from lora_fs.sidecar.cli.options.waiting import follow
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.model import Pointer, PolicyKind, Record
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs


@command()
@parameters.name
@parameters.source
@click.option(
    "--revision", metavar="R", callback=parameters.segment("revision"), help="[default: the next vN]"
)
@click.option(
    "--base-model", metavar="ID", callback=text, help="What it was made for, when its config does not say"
)
@click.option(
    "--policy",
    type=click.Choice([kind.value for kind in PolicyKind]),
    help="When it is in the engine [default: as what NAME serves, else as each sidecar is set]",
)
@click.option(
    "--ttl",
    type=Duration(whole=True),
    help="Evict a lazy adapter after this idle time: 90s, 15m, 1h, 2d; a bare number is seconds "
    "[default: LORA_FS_DEFAULT_TTL_S, 1h]",
)
@click.option(
    "--priority",
    type=parameters.PRIORITY,
    metavar="N",
    help="Eager and pinned: greater loads first [default: 0]",
)
@click.option("--label", multiple=True, callback=labels, metavar="K=V", help="Repeatable")
@click.option(
    "--link",
    is_flag=True,
    help="Refer to the folder where it is, under the root or LORA_FS_ALLOWED_SOURCES; do not copy it",
)
@click.option(
    "--lora-downloader-plugin",
    "plugin",
    metavar="CLASS",
    help="my.module.Class that downloads SOURCE [LORA_FS_LORA_DOWNLOADER_PLUGIN]",
)
@click.option("--activate/--no-activate", default=True, help="Let the plain name serve it [default: yes]")
@parameters.allow
@parameters.force
@parameters.create
@parameters.changes
@click.pass_obj
def register(
    context: Context,
    name: str,
    source: str,
    revision: str | None,
    base_model: str | None,
    policy: str | None,
    ttl: int | None,
    priority: int | None,
    label: dict[str, str],
    link: bool,
    plugin: str | None,
    activate: bool,
    allow: tuple[str, ...],
    force: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Register the adapter in SOURCE under NAME: a folder, or hf://, oci://, s3://, gs://, https:// or pvc://.

    \b
    Examples:
      lora-fs register support ./support-lora --wait 20
      lora-fs register support hf://acme/support-lora@v2
      lora-fs register support ./support-lora-2 --no-activate
      lora-fs register billing ./billing-lora --policy eager --priority 10 --label team=finance
    """
    scope = context.scope()
    said = {
        "revision": revision,
        "base_model": base_model,
        "policy": policy,
        "ttl_s": ttl,
        "priority": priority,
        "labels": label,
        "activate": activate,
        "allow": allow,
        "force": force,
        "dry_run": dry_run,
    }
    how = RegisterAs.model_validate(said)
    done = context.backend.register(scope, name, source, how, link=link, plugin=plugin)
    context.noted.update(done.record.told)
    _tell(context, done, activate, output)
    moved = [done.pointer] if activate and done.pointer is not None else []
    written: list[Record | Pointer] = [done.record, *moved]
    follow(context, scope, written, dry_run=dry_run, loads=done.record.key)


def _tell(context: Context, done: Outcome, activate: bool, output: Format) -> None:
    record, dry_run = done.record, done.dry_run
    before, after = (pointer.revision if pointer else None for pointer in (done.before, done.pointer))
    moves = activate and before != record.revision
    told = {
        "changed": done.changed or done.amended or done.restored or moves,
        "dry_run": dry_run,
        "record": record.model_dump(mode="json"),
        "pointer": done.pointer.model_dump(mode="json") if done.pointer else None,
        "warnings": [finding.model_dump(mode="json") for finding in done.warnings],
    }
    if context.printed(told, output, [f"{record.name}@{record.revision}"]):
        return
    for finding in done.warnings:
        context.say(f"warning: {finding.render()}")
    what = f"{record.name}@{record.revision} in {record.key.scope}"
    if done.changed:
        serves = "" if activate else f" ({record.name} serves {after or 'nothing'})"
        context.say(f"{'would register' if dry_run else 'registered'} {what}{serves}")
        return
    serves = (
        f"; {record.name} {'would serve' if dry_run else 'serves'} {record.revision} now" if moves else ""
    )
    amended = ", with a new policy or labels" if done.amended else ""
    if done.restored:
        context.say(f"{'would restore' if dry_run else 'restored'} lost files of {what}{amended}{serves}")
        return
    if not done.amended and not moves:
        context.say(f"unchanged: the same bytes are registered as {what}")
        return
    context.say(f"the same bytes{amended}: {what}{serves}")


COMMANDS = (register,)
