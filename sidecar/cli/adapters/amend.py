"""pin, unpin and set: what is said of a registered name."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Count, Duration, labels_or_none
from lora_fs.sidecar.cli.options.waiting import follow
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.model import Pointer, PolicyKind, Record
from lora_fs.sidecar.registry.lifecycle.acts import Done, Pin, Set, Unpin


@command()
@parameters.name
@parameters.revision_option()
@click.option(
    "--priority",
    type=parameters.PRIORITY,
    metavar="N",
    help="Greater stays where not all pinned ones have room",
)
@parameters.changes
@click.pass_obj
def pin(
    context: Context,
    name: str,
    revision: str | None,
    priority: int | None,
    dry_run: bool,
    output: Format,
) -> None:
    """Never evict NAME.

    \b
    Examples:
      lora-fs pin support --wait 20
    """
    done = context.backend.do(
        context.scope(), name, Pin(revision=revision, priority=priority, dry_run=dry_run)
    )
    _tell(context, done, output)


@command()
@parameters.name
@parameters.revision_option()
@parameters.changes
@click.pass_obj
def unpin(
    context: Context,
    name: str,
    revision: str | None,
    dry_run: bool,
    output: Format,
) -> None:
    """Restore the policy that NAME had before its pin.

    \b
    Examples:
      lora-fs unpin support
    """
    done = context.backend.do(context.scope(), name, Unpin(revision=revision, dry_run=dry_run))
    _tell(context, done, output)


@command("set")
@parameters.name
@parameters.revision_option()
@click.option(
    "--policy",
    type=click.Choice([*(kind.value for kind in PolicyKind), "default"]),
    help="When it is in the engine; default: as each sidecar is set",
)
@click.option("--ttl", type=Duration(whole=True), help="Idle time of a lazy adapter: 90s, 15m, 1h")
@click.option(
    "--priority", type=parameters.PRIORITY, metavar="N", help="Eager and pinned: greater loads first"
)
@click.option(
    "--label",
    multiple=True,
    callback=labels_or_none,
    metavar="K=V",
    help="Set a label; K- takes it away; repeatable",
)
@click.option(
    "--keep-revisions",
    type=Count(least=1),
    metavar="N",
    help="gc keeps so many revisions of it; none: as the namespace says",
)
@click.option(
    "--if-generation",
    type=click.IntRange(1),
    metavar="G",
    help="Only if its record is of this generation still; exit 4 if not",
)
@parameters.changes
@click.pass_obj
def set_fields(
    context: Context,
    name: str,
    revision: str | None,
    policy: str | None,
    ttl: int | None,
    priority: int | None,
    label: dict[str, str | None],
    keep_revisions: int | str | None,
    if_generation: int | None,
    dry_run: bool,
    output: Format,
) -> None:
    """Change NAME's policy, labels or retention.

    \b
    Examples:
      lora-fs set support --policy eager --priority 10
      lora-fs set support --ttl 15m --label team=care --label old-
      lora-fs set support --keep-revisions 5
    """
    if policy == "default" and (ttl is not None or priority is not None):
        raise click.UsageError("--policy default leaves --ttl and --priority to each sidecar, too")
    if not label and (policy, ttl, priority, keep_revisions) == (None, None, None, None):
        raise click.UsageError("say what to change: --policy, --ttl, --priority, --label or --keep-revisions")
    said = {
        "revision": revision,
        "policy": policy,
        "ttl_s": ttl,
        "priority": priority,
        "labels": label,
        "keep_revisions": keep_revisions,
        "if_generation": if_generation,
        "dry_run": dry_run,
    }
    done = context.backend.do(context.scope(), name, Set.model_validate(said))
    _tell(context, done, output)


def _tell(context: Context, done: Done, output: Format) -> None:
    records, pointer, dry_run = done.records, done.pointer, done.dry_run
    context.noted.update(revision=",".join(record.revision for record in records))
    told = {
        "dry_run": dry_run,
        "records": [record.model_dump(mode="json") for record in records],
        "pointer": pointer.model_dump(mode="json") if pointer else None,
    }
    if not context.printed(told, output, [f"{record.name}@{record.revision}" for record in records]):
        would = "would be " if dry_run else ""
        for record in records:
            policy = record.spec.policy
            loaded = policy.kind.value if policy is not None else "policy as each sidecar is set"
            labels = "".join(f", {key}={value}" for key, value in record.spec.labels.items())
            what = f"{would}{loaded}{labels}, generation {record.generation}"
            context.say(f"{record.name}@{record.revision}: {what}")
        if pointer is not None:
            kept = pointer.keep_revisions or "as many as the namespace says"
            context.say(f"{pointer.name}: gc {'would keep' if dry_run else 'keeps'} {kept}")
    written: list[Record | Pointer] = [*records, *([pointer] if pointer is not None else [])]
    follow(context, context.scope(), written, dry_run=dry_run)


COMMANDS = (pin, unpin, set_fields)
