"""doctor: what an operator runs when something looks wrong, and before choosing a volume.

It looks at a registry; asked to, it first tries the filesystem itself (``conformance``), for which no
registry has to be there. It decides nothing about either: it tells what others found.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click

from lora_fs.sidecar.cli.look.status import CLOSED, ago, seen_s
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Place
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.conformance import FULL, QUICK, Verdict, examine
from lora_fs.sidecar.conformance.verdict import told
from lora_fs.sidecar.errors import LoraFsError, OperatorError, RegistryMissing
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.store.marker import has_hard_links
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s, read_reports
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import TemporaryNames
from lora_fs.sidecar.registry.volume.mounts import kind_of, timing_for


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
        registry.check_writable()
        if tier == "cas" and not has_hard_links(root):
            yield Check(False, "hard links are missing here, or are copies: write nothing through this mount")
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
    registry.accounts.quota(scope.namespace)  # one that cannot be understood raises, and says what to do


def _replicas(registry: Registry) -> Iterator[Check]:
    reports = read_reports(registry.layout)
    for replica in reports.replicas:
        age = age_s(replica)
        yield Check(age < LIVE_S, f"replica {replica.replica} wrote {ago(seen_s(replica))}")
        for condition in replica.conditions:
            yield Check(False, f"replica {replica.replica}: {condition}")
        if replica.changed_by == "nobody":
            yield Check(True, f"replica {replica.replica} {CLOSED}")
    for replica_id, problem in reports.unreadable.items():
        yield Check(False, f"replica {replica_id}: its report cannot be read: {problem}")


def _to_the_end(part: Iterator[Check]) -> Iterator[Check]:
    """Turn an error into a failed check, so that it does not hide the rest."""
    try:
        yield from part
    except (LoraFsError, OSError) as error:
        yield Check(False, str(error))


def _registered(context: Context, root: Path, *, tried: bool) -> list[Check]:
    """Every check of a registry. After a trial of the filesystem, there need not be one."""
    try:
        registry = Registry(root)
    except RegistryMissing as error:
        if not tried:
            raise
        return [Check(True, str(error))]
    parts = [_volume(root, registry), _replicas(registry)]
    if not tried or context.settings.model:
        parts.insert(1, _scope(context.scope(), registry))
    return [check for part in parts for check in _to_the_end(part)]


def _show(context: Context, verdict: Verdict) -> None:
    """A verdict for people: tables, the rates, what to set, what to change."""
    marks = {True: "yes", False: "no", None: "?"}
    found = [
        ("NO" if promise.needed and not promise.holds else marks[promise.holds], promise.name, promise.text)
        for promise in verdict.promises
    ]
    context.table(("HOLDS", "PROMISE", "FOUND"), found, folds="FOUND")
    context.say("")
    shown = [(delay.text, told(delay)) for delay in verdict.delays]
    context.table(("HOW LATE THE OTHER MOUNT SHOWS", "MEDIAN, WORST"), shown)
    rates = verdict.rates
    context.say("")
    context.say(
        f"{rates.written_per_s:.0f} small files a second are written, {rates.read_per_s:.0f} read; "
        f"{rates.files} are listed in {rates.listed_s * 1000:.1f} ms"
    )
    context.say(f"read HEAD every {verdict.poll_s:g} s; a dropped folder settles in {verdict.settle_s:g} s")
    for line in verdict.advice:
        context.say(f"-> {line}")
    context.say("")


@command()
@click.option(
    "--root",
    type=Place(),
    metavar="DIR",
    help="Try the filesystem of this folder first; no registry has to be there",
)
@click.option(
    "--peer",
    type=Place(),
    metavar="DIR",
    help="The same folder on another mount of it: what is written in one is looked for in the other",
)
@click.option("--quick", is_flag=True, help="Try it for about 10 seconds rather than for minutes")
@parameters.no_headers
@parameters.output
@click.pass_obj
def doctor(context: Context, root: Path | None, peer: Path | None, quick: bool, output: Format) -> None:
    """Check the volume: its filesystem, its promises, every record of the scope, every replica.

    With --root, --peer or --quick it tries the filesystem itself, with real writers and readers in a
    scratch folder that it removes; it touches nothing else on the volume.

    \b
    Examples:
      lora-fs doctor
      lora-fs doctor -o json
      lora-fs doctor --root /adapters --quick
      lora-fs doctor --root /adapters --peer /mnt/adapters-again
    """
    tried, folder = root is not None or peer is not None or quick, root or context.root()
    verdict: Verdict | None = None
    if tried:
        if output.for_people:
            context.say(
                f"trying {folder}{f' and {peer}' if peer else ''} in a scratch folder, which is removed"
            )
        verdict = examine(folder, peer, QUICK if quick else FULL)
    checks = _registered(context, folder, tried=tried)
    bad = sum(not check.ok for check in checks)
    bad += sum(promise.needed and not promise.holds for promise in verdict.promises) if verdict else 0
    told_of = verdict.model_dump(mode="json") if verdict else None
    everything = {"ok": not bad, "checks": [check._asdict() for check in checks], "filesystem": told_of}
    if not context.printed(everything, output, [check.text for check in checks if not check.ok]):
        if verdict:
            _show(context, verdict)
        for check in checks:
            context.say(f"{'ok  ' if check.ok else 'BAD '} {check.text}")
    if bad:
        raise OperatorError(f"{bad} of these need a look")


COMMANDS = (doctor,)
