"""wait: until every live replica is where it should be with a name."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from lora_fs.sidecar.cli.backends.port import Backend
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration
from lora_fs.sidecar.cli.options.waiting import LOOK_MOST_S, LOOK_S, UNDER_WAY, not_seen, public_name
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.errors import NotFound, TemporaryError, WaitTimeout
from lora_fs.sidecar.model import Phase, Pointer, Record, ReplicaStatus, Scope
from lora_fs.sidecar.reconcile.telemetry.conditions import TYPES
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s

READY, DELETED, CONDITION = "ready", "deleted", "condition="


class Aim(click.ParamType[str]):
    """``ready``, ``deleted``, ``condition=Loaded`` or ``condition=Loaded=False``."""

    name = "aim"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, _, holds = value.removeprefix(CONDITION).partition("=")
        is_condition = value.startswith(CONDITION) and kind in TYPES and holds in ("", "True", "False")
        if value in (READY, DELETED) or is_condition:
            return value
        kinds = ", ".join(f"condition={one}" for one in TYPES)
        self.fail(f"write ready, deleted, {kinds}, or one of these followed by =False", param, ctx)


@command("wait")
@parameters.name
@parameters.revision_option(default="the one that NAME serves; with --for deleted every one")
@click.option(
    "--for",
    "aim",
    type=Aim(),
    metavar="WHAT",
    default=READY,
    show_default=True,
    help="ready, deleted, condition=Available or condition=Loaded; with =False: that it is not",
)
@click.option(
    "--timeout",
    type=Duration(),
    default="60s",
    show_default=True,
    help="Wait no longer",
)
@parameters.output
@click.pass_obj
def wait(context: Context, name: str, revision: str | None, aim: str, timeout: float, output: Format) -> None:
    """Wait until every replica has NAME ready, or gone, or in a condition; exit 6 if one does not.

    \b
    Examples:
      lora-fs wait support
      lora-fs wait support@v1 --for condition=Loaded --timeout 120
      lora-fs wait support --for deleted
    """
    scope, backend = context.scope(), context.backend
    what = name if revision is None else f"{name}@{revision}"
    deadline, pause_s = time.monotonic() + timeout, LOOK_S
    while True:
        try:
            lagging = list(_lagging(backend, scope, name, revision, aim))
        except TemporaryError as error:
            lagging = [f"that cannot be told now ({error})"]
        if not lagging:
            if not context.printed({"name": what, "for": aim}, output, [what]):
                context.say(f"{what}: {aim} on every replica")
            return
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise WaitTimeout(f"{what} is not {aim} after {timeout:g} s: {', '.join(lagging)}")
        time.sleep(min(pause_s, remaining))
        pause_s = min(1.5 * pause_s, LOOK_MOST_S)


def _lagging(backend: Backend, scope: Scope, name: str, revision: str | None, aim: str) -> Iterator[str]:
    """The missing parts, and why; raises NotFound if a name to be ready is not registered."""
    named = backend.named(scope, name)
    pointer, revisions = named.pointer, {record.revision: record for record in named.revisions}
    serves = pointer.revision if pointer is not None else None
    if revision is not None:
        revisions = {one: record for one, record in revisions.items() if one == revision}
        pointer = pointer if serves == revision else None
    record = revisions.get(revision or serves or "")
    if record is None and aim != DELETED:
        what = f"{name} serves nothing" if revision is None else f"{name}@{revision} is not registered"
        raise NotFound(f"{what} in {scope}: `lora-fs list` shows what is registered")
    if aim == DELETED and revisions:
        yield f"{', '.join(sorted(revisions))} {'is' if len(revisions) == 1 else 'are'} registered"
        return
    reports = backend.reports()
    live = [status for status in reports.of(scope) if age_s(status) < LIVE_S]
    yield from (f"{one} (its report cannot be read)" for one in reports.young)
    if not live and aim != DELETED:
        yield f"no live replica of {scope} has reported"
    written: list[Record | Pointer] = [body for body in (pointer, record) if body is not None]
    for status in live:
        if (unseen := not_seen(status, written)) is not None:
            yield f"{status.replica} has not seen it yet{unseen}"
        elif (why := _not_yet(status, scope, name, revision, aim)) is not None:
            yield f"{status.replica} {why}"


def _not_yet(status: ReplicaStatus, scope: Scope, name: str, revision: str | None, aim: str) -> str | None:
    """Why a replica is not there; an adapter absent from its report is not loaded."""
    public = public_name(status, scope, name)
    of_name = {
        told: one
        for told, one in status.adapters.items()
        if told.partition("@")[0] == public and revision in (None, one.key[2])
    }
    one = of_name.get(public) if revision is None else next(iter(of_name.values()), None)
    phase = one.phase if one is not None else Phase.UNLOADED
    said = (one.message or one.reason) if one is not None else ""
    why = f"({phase.value}{': ' + said if said else ''})"
    if aim == DELETED:
        return f"still has it {why}" if of_name else None
    kind, _, wanted = aim.removeprefix(CONDITION).partition("=")
    if wanted != "False" and status.engine != "ready":
        return "(no engine answers)"  # its adapters are unknown, and no request gets an answer
    if aim == READY:
        return why if phase in UNDER_WAY or not TYPES["Available"](phase) else None
    return why if TYPES[kind](phase) != (wanted != "False") else None


COMMANDS = (wait,)
