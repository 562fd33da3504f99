"""doctor and gc: what an operator runs when something looks wrong, or full."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.status import ago, seen_s
from lora_fs.sidecar.cli.wait import LIVE_S, age_s, read_reports
from lora_fs.sidecar.errors import LoraFsError, OperatorError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry import atomic, gc
from lora_fs.sidecar.registry.atomic import TemporaryNames
from lora_fs.sidecar.registry.filesystem import kind_of, timing_for
from lora_fs.sidecar.registry.lock import lease
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView


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


class Check(NamedTuple):
    """One thing the doctor looked at."""

    ok: bool
    text: str


def _volume(root: Path, registry: Registry) -> Iterator[Check]:
    kind = kind_of(root)
    timing = timing_for(kind)
    yield Check(
        True, f"{root} is {kind}: HEAD every {timing.poll_s} s, folders settle in {timing.settle_s} s"
    )
    tier = registry.marker.tier
    yield Check(tier == "cas", f"tier {tier} (cas: hard links decide writes)")
    probe = root / f".tmp-doctor-{secrets.token_hex(8)}"
    names = TemporaryNames()
    try:
        first = atomic.publish(probe, b"one\n", names)
        second = atomic.publish(probe, b"two\n", names)
        yield Check(first and not second, "of two writers of one name exactly one wins")
    except LoraFsError as error:
        yield Check(False, f"cannot write: {error}")
    finally:
        names.sweep(wait=True)
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    free = shutil.disk_usage(root).free
    yield Check(free > 1 << 30, f"{free / 1e9:.1f} GB free")
    yield Check(os.access(registry.layout.replicas, os.W_OK), "replicas can write their status")


def _scope(scope: Scope, registry: Registry) -> Iterator[Check]:
    view = RegistryView(registry, (scope,))
    view.refresh()
    for problem in view.desired.problems.values():
        yield Check(False, f"unreadable: {problem}")
    present = {key: record for key, record in view.desired.records.items() if record.present}
    gone = {key: registry.layout.resolve(record.spec.path) for key, record in present.items()}
    for key, folder in gone.items():
        if not folder.is_dir():
            yield Check(False, f"{key}: its files are gone from {folder}")
    revisions = "1 revision is" if len(present) == 1 else f"{len(present)} revisions are"
    yield Check(True, f"{revisions} registered in {scope}")


def _replicas(registry: Registry) -> Iterator[Check]:
    reports = read_reports(registry.layout)
    for replica in reports.replicas:
        age = age_s(replica)
        yield Check(age < LIVE_S, f"replica {replica.replica} wrote {ago(seen_s(replica))}")
        for condition in replica.conditions:
            yield Check(False, f"replica {replica.replica}: {condition}")
    for replica_id, problem in reports.unreadable.items():
        yield Check(False, f"replica {replica_id}: its report cannot be read: {problem}")


def _to_the_end(part: Iterator[Check]) -> Iterator[Check]:
    """What cannot be looked at is told, and does not hide the rest."""
    try:
        yield from part
    except (LoraFsError, OSError) as error:
        yield Check(False, str(error))


@click.command()
@parameters.output
@click.pass_obj
def doctor(context: Context, output: str) -> None:
    """Check the volume: its filesystem, its promises, every record of the scope, every replica.

    \b
    Examples:
      lora-fs doctor
      lora-fs doctor -o json
    """
    registry, root = context.registry(), context.root()
    parts = (_volume(root, registry), _scope(context.scope(), registry), _replicas(registry))
    checks = [check for part in parts for check in _to_the_end(part)]
    bad = sum(not check.ok for check in checks)
    if output == "json":
        context.emit({"ok": not bad, "checks": [check._asdict() for check in checks]})
    else:
        for check in checks:
            context.say(f"{'ok  ' if check.ok else 'BAD '} {check.text}")
    if bad:
        raise OperatorError(f"{bad} of these need a look")


COMMANDS = (doctor, collect_garbage)
