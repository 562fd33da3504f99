"""register: a folder, here or elsewhere, becomes a revision that every replica serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.command import command
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.downloading import downloading
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.cli.validation import reading
from lora_fs.sidecar.cli.values import Duration, labels
from lora_fs.sidecar.cli.wait import wait_for
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Pointer, Policy, PolicyKind, Record
from lora_fs.sidecar.reconcile.admin.fetching import Fetching, brought
from lora_fs.sidecar.reconcile.admin.fetching import register as fetching_register
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.revisions import revisions_of
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import Settings, writer_id
from lora_fs.sidecar.sources.allowed import Allowed
from lora_fs.sidecar.sources.known import is_remote
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.sources.uri import redacted
from lora_fs.sidecar.validate import Expectation


@command()
@parameters.name
@parameters.source
@click.option(
    "--revision", metavar="R", callback=parameters.segment("revision"), help="[default: the next vN]"
)
@click.option("--base-model", metavar="ID", help="What it was made for, when its config does not say")
@click.option(
    "--policy",
    type=click.Choice([kind.value for kind in PolicyKind]),
    help="When it is in the engine [default: as what NAME serves, else as each sidecar is set]",
)
@click.option(
    "--ttl",
    type=Duration(whole=True),
    metavar="TIME",
    help="Evict a lazy adapter after this idle time: 90s, 15m, 1h, 2d; a bare number is seconds "
    "[default: LORA_FS_DEFAULT_TTL_S, 1h]",
)
@click.option(
    "--priority",
    type=int,
    metavar="N",
    help="Eager and pinned: greater is loaded first [default: 0]",
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
@parameters.dry_run
@parameters.create
@parameters.wait
@parameters.min_replicas
@parameters.output
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
    dry_run: bool,
    wait: float | None,
    min_replicas: int,
    output: Format,
) -> None:
    """Register the adapter in SOURCE under NAME: a folder, or hf://, s3://, gs://, https:// or pvc://.

    \b
    Examples:
      lora-fs register support ./support-lora --wait 20
      lora-fs register support hf://acme/support-lora@v2
      lora-fs register support ./support-lora-2 --no-activate
      lora-fs register billing ./billing-lora --policy eager --priority 10 --label team=finance
    """
    scope, settings = context.scope(), context.settings
    plugin = plugin or settings.lora_downloader_plugin
    expectation = context.expectation(base_model, allow)
    wanted = Registration(name, Path(), "", revision, base_model, None, label, link, activate)
    if is_remote(source, plugin) and link:
        raise InputError(
            f"--link refers to a folder where it is, and {redacted(source)} is fetched: leave it out"
        )
    if not is_remote(source, plugin):
        folder = resolve(source, settings.mounts())
        wanted = replace(wanted, source=folder, uri=folder.as_uri())
        if link:
            check_linked(folder, context.root(), settings)
    with context.opened(create=not dry_run) as registry:
        before = release.active(registry, scope, name)
        wanted = replace(wanted, policy=_policy(context, registry, name, policy, ttl, priority))
        if is_remote(source, plugin):
            done = _fetch(context, registry, wanted, source, plugin, expectation, dry_run)
        else:
            with reading(folder) as advance:
                done = ingest.register(
                    registry,
                    scope,
                    wanted,
                    expectation,
                    writer=writer_id(),
                    dry_run=dry_run,
                    progress=advance,
                )
        context.noted.update(revision=done.record.revision, digest=done.record.spec.digest)
        pointer = before if dry_run else release.active(registry, scope, name)
    _tell(context, done, (before, pointer), wanted, dry_run, output)
    if wait is not None and not dry_run:
        moved = [pointer] if activate and pointer is not None else []
        written: list[Record | Pointer] = [done.record, *moved]
        wait_for(context, scope, written, wait, loads=done.record.key, min_replicas=min_replicas)


def _fetch(
    context: Context,
    registry: Registry,
    wanted: Registration,
    source: str,
    plugin: str | None,
    expectation: Expectation,
    dry_run: bool,
) -> Registered:
    """Fetch and register; where nothing may change, fetch to this machine's own temporary folder."""
    scope, by = context.scope(), replace(Fetching.by(context.settings), plugin=plugin)
    with downloading(redacted(source)) as tell:
        fetching = replace(by, tell=tell)
        if not dry_run:
            return fetching_register(
                registry, scope, wanted, source, expectation, fetching, writer=writer_id()
            )
        with brought(source, fetching) as (folder, offer):
            wanted = replace(wanted, source=folder, uri=offer.uri, pin=offer.recorded)
            return ingest.register(registry, scope, wanted, expectation, writer=writer_id(), dry_run=True)


def _policy(
    context: Context, registry: Registry, name: str, policy: str | None, ttl: int | None, priority: int | None
) -> Policy | None:
    """What is said of it; without a policy's name the rest changes the policy of what NAME serves."""
    said = {"kind": policy, "ttl_s": ttl, "priority": priority}
    said = {field: value for field, value in said.items() if value is not None}
    if not said:
        return None
    begins = context.default_policy()
    if policy is None:
        begins = revisions_of(registry, context.scope(), name).policy or begins
    return Policy.model_validate({**begins.model_dump(), **said})


def check_linked(folder: Path, root: Path, settings: Settings) -> None:
    """Every sidecar will read the folder where it is: only what was allowed may be referred to."""
    allowed = Allowed(root, settings.allowed_sources)
    if not allowed.covers(folder):
        places = ", ".join(map(str, allowed.places))
        raise InputError(
            f"--link may refer to folders under {places}; {folder} is not: copy it (leave --link out), "
            "or name its folder in LORA_FS_ALLOWED_SOURCES"
        )


def _tell(
    context: Context,
    done: Registered,
    pointers: tuple[Pointer | None, Pointer | None],
    wanted: Registration,
    dry_run: bool,
    output: Format,
) -> None:
    record, (before, after) = done.record, tuple(p.revision if p else None for p in pointers)
    moves = wanted.activate and before != record.revision
    told = {
        "changed": done.changed or done.amended or done.restored or moves,
        "dry_run": dry_run,
        "record": record.model_dump(mode="json"),
        "pointer": pointers[1].model_dump(mode="json") if pointers[1] else None,
        "warnings": [finding.model_dump(mode="json") for finding in done.report.warnings],
    }
    if context.printed(told, output, [f"{record.name}@{record.revision}"]):
        return
    for finding in done.report.warnings:
        context.say(f"warning: {finding.render()}")
    what = f"{record.name}@{record.revision} in {record.key.scope}"
    if done.changed:
        serves = "" if wanted.activate else f" ({record.name} serves {after or 'nothing'})"
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
