"""doctor and gc: what an operator runs when something looks wrong, or full."""

from __future__ import annotations

import os
import secrets
import shutil

import click

from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.cli.wait import LIVE_S, age_s, read_replicas
from lora_fs.sidecar.errors import LoraFsError, OperatorError
from lora_fs.sidecar.model import AdapterKey, Phase
from lora_fs.sidecar.registry import atomic, gc
from lora_fs.sidecar.registry.atomic import TemporaryNames
from lora_fs.sidecar.registry.filesystem import kind_of, timing_for
from lora_fs.sidecar.registry.lock import lease
from lora_fs.sidecar.registry.view import RegistryView


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Say what would go, remove nothing")
@click.option("--older-than", type=float, default=24.0, show_default=True, help="Hours")
@click.pass_obj
def collect_garbage(context: Context, dry_run: bool, older_than: float) -> None:
    """Remove the files of adapters unregistered long ago, and what dead writers left.

    \b
    Example:
      lora-fs gc --dry-run
    """
    scope, registry = context.scope(), context.registry()
    in_use = {
        AdapterKey(*status.key)
        for replica in read_replicas(registry.layout)
        for status in replica.adapters.values()
        if status.phase is not Phase.FAILED
    }
    with lease(registry.layout.lease("gc"), wait_s=0) as had:
        if not had and not dry_run:
            raise OperatorError("another gc is at work on this volume")
        found = gc.find(registry, scope, in_use, older_than * 3600)
        for item in found:
            context.out.print(
                f"{'would remove' if dry_run else 'removing'} {item.path}: {item.why}", markup=False
            )
        if not dry_run:
            gc.collect(found)
    context.out.print(f"{len(found)} things")


@click.command()
@click.pass_obj
def doctor(context: Context) -> None:
    """Check the volume: its filesystem, its promises, and every record of the scope.

    \b
    Example:
      lora-fs doctor
    """
    root, problems = context.root(), 0

    def tell(good: bool, text: str) -> None:
        nonlocal problems
        problems += not good
        context.out.print(f"{'ok  ' if good else 'BAD '} {text}", markup=False)

    registry = context.registry()
    kind = kind_of(root)
    timing = timing_for(kind)
    tell(True, f"{root} is {kind}: HEAD every {timing.poll_s} s, folders settle in {timing.settle_s} s")
    tell(registry.marker.tier == "cas", f"tier {registry.marker.tier} (cas: hard links decide writes)")
    probe = root / f".tmp-doctor-{secrets.token_hex(8)}"
    names = TemporaryNames()
    try:
        first = atomic.publish(probe, b"one\n", names)
        second = atomic.publish(probe, b"two\n", names)
        tell(first and not second, "of two writers of one name exactly one wins")
    except LoraFsError as error:
        tell(False, f"cannot write: {error}")
    finally:
        names.sweep(wait=True)
        probe.unlink(missing_ok=True)
    free = shutil.disk_usage(root).free
    tell(free > 1 << 30, f"{free / 1e9:.1f} GB free")
    tell(os.access(registry.layout.replicas, os.W_OK), "replicas can write their status")
    view = RegistryView(registry, (context.scope(),))
    view.refresh()
    for problem in view.desired.problems.values():
        tell(False, f"unreadable: {problem}")
    for key, record in view.desired.records.items():
        folder = registry.layout.resolve(record.spec.path)
        if record.present and not folder.is_dir():
            tell(False, f"{key}: its files are gone from {folder}")
    for replica in read_replicas(registry.layout):
        tell(age_s(replica) < LIVE_S, f"replica {replica.replica} wrote {age_s(replica):.0f} s ago")
        for condition in replica.conditions:
            tell(False, f"replica {replica.replica}: {condition}")
    if problems:
        raise OperatorError(f"{problems} of these need a look")


COMMANDS = (doctor, collect_garbage)
