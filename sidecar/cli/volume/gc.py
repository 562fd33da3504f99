"""gc: what an operator runs when the volume is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration
from lora_fs.sidecar.cli.output import Format, complain, counted, shown_bytes
from lora_fs.sidecar.errors import LoraFsError, OperatorError
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.maintenance.compaction import HISTORY_S
from lora_fs.sidecar.registry.maintenance.garbage import What, collect
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.leases import LEASE_S, lease, take_over
from lora_fs.sidecar.settings import writer_id

DEAD_AFTER_S = 1.5 * LEASE_S


@command("gc")
@parameters.dry_run
@click.option(
    "--older-than",
    type=Duration(bare=False),
    default="24h",
    show_default=True,
    help="Keep what is younger",
)
@click.option(
    "--history-older-than",
    type=Duration(bare=False),
    default=f"{HISTORY_S / 3600:g}h",
    show_default=True,
    help="Keep superseded generations and tombstones that are younger",
)
@parameters.output
@click.pass_obj
def collect_garbage(
    context: Context, dry_run: bool, older_than: float, history_older_than: float, output: Format
) -> None:
    """Remove files of adapters unregistered long ago, leftovers of interrupted writes, old history.

    \b
    Examples:
      lora-fs gc --dry-run
      lora-fs gc --older-than 48h
    """
    scope, registry = context.scope(), context.registry()
    unknown: LoraFsError | None = None
    if not dry_run:
        registry.check_writable()
    with nullcontext() if dry_run else _alone(registry.layout.lease("gc")):
        try:
            in_use = gc.in_use(registry)
        except LoraFsError as error:
            in_use, unknown = None, error
        ages = {"older_than_s": older_than, "history_s": history_older_than}
        found = gc.find(registry, scope, in_use, **ages, writer=writer_id())
        refused = {} if dry_run else collect(found)
    found = [item for item in found if item.path not in refused]
    if found and not dry_run:
        context.noted.update(removed=len(found))
    freed = sum(item.size_bytes for item in found if item.what is not What.REVISION)
    later = sum(item.size_bytes for item in found if item.what is What.REVISION)
    items = [
        {
            "path": str(item.path),
            "why": item.why,
            "size_bytes": item.size_bytes,
            "withdrawn": item.what is What.REVISION,
        }
        for item in found
    ]
    told = {
        "dry_run": dry_run,
        "removed": items,
        "refused": [{"path": str(path), "why": str(error)} for path, error in refused.items()],
        "kept": str(unknown) if unknown else None,
    }
    if not context.printed(told, output, [str(item.path) for item in found]):
        for item in found:
            did = "unregister" if item.what is What.REVISION else "remove"
            done = f"would {did}" if dry_run else f"{did.removesuffix('e')}ed"
            context.say(f"{done} {item.path} ({shown_bytes(item.size_bytes)}): {item.why}")
        more = f", {shown_bytes(later)} more a day after they are unregistered" if later else ""
        context.say(f"{counted(len(found), 'thing')}, {shown_bytes(freed)}{more}")
    if unknown is not None:
        raise OperatorError(f"every adapter's files are kept: {unknown}")
    if refused:
        why = "\n".join(f"  - {error}" for error in refused.values())
        raise OperatorError(f"{len(refused)} of {len(found) + len(refused)} things were not removed:\n{why}")


@contextmanager
def _alone(lockfile: Path) -> Iterator[None]:
    """Keep a second gc out, as far as the volume allows; two at once remove nothing wrongly.

    Only LEASE_S proves that a gc which was killed on another host is dead. On a full volume nobody can
    write a lease, and that is when gc is needed.
    """
    if atomic.read_bytes(lockfile):
        complain(f"another gc is at work on this volume, or was killed: asking for {DEAD_AFTER_S:.0f} s")
        take_over(lockfile, within_s=DEAD_AFTER_S)
    with lease(lockfile, wait_s=0) as had:
        if not had and atomic.read_bytes(lockfile):
            raise OperatorError("another gc is at work on this volume: try again when it has ended")
        yield


COMMANDS = (collect_garbage,)
