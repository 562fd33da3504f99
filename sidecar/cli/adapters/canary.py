"""canary: another revision answers a share of the requests for a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lora_fs.sidecar.cli.adapters.stepping import Stepping, Steps
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration
from lora_fs.sidecar.cli.options.waiting import follow
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.errors import NotFound, OperatorError
from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.model.gates import parse
from lora_fs.sidecar.registry.lifecycle.acts import Try

if TYPE_CHECKING:
    from lora_fs.sidecar.model import Pointer, Scope


@command()
@parameters.name
@parameters.other_revision
@click.option(
    "--percent",
    type=click.IntRange(0, 100),
    metavar="P",
    help="Its share [default: as it is, at first 0]",
)
@click.option(
    "--steps", type=Steps(), metavar="P,P", help="Advance by itself, such as 5,25,100; 100 finishes"
)
@click.option("--every", type=Duration(), default="10m", show_default=True, help="How long a step lasts")
@click.option(
    "--gate", metavar="GATE", help="With --steps: end the trial and exit 5 if a step does not pass it"
)
@click.option("--force", is_flag=True, help="Also one that the namespace's gate refuses; the audit tells")
@click.option("--finish", is_flag=True, help="Let it serve the name, and end the trial")
@click.option("--abort", is_flag=True, help="Let it answer nothing more, and end the trial")
@parameters.changes
@click.pass_obj
def canary(
    context: Context,
    name: str,
    revision: str | None,
    percent: int | None,
    steps: tuple[int, ...] | None,
    every: float,
    gate: str | None,
    force: bool,
    finish: bool,
    abort: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Let REVISION answer a share of the requests for NAME; change, finish or abort that.

    \b
    Examples:
      lora-fs canary support v2 --percent 5 --wait 20
      lora-fs canary support v2 --steps 5,25,100 --every 10m --gate 'live_errors<=10'
      lora-fs canary support --finish
    """
    if finish + abort + (revision is not None or percent is not None) > 1:
        raise click.UsageError("--finish, --abort and a revision or --percent exclude each other")
    if steps is not None and (finish or abort or dry_run or percent is not None):
        raise click.UsageError("--steps stands without --percent, --finish, --abort and --dry-run")
    if gate is not None and steps is None:
        raise click.UsageError("--gate needs --steps")
    scope = context.scope()
    pointer: Pointer | None
    if steps is not None:
        pointer = _stepped(context, scope, name, revision, steps, every, gate, force=force)
    elif finish or abort or revision is not None or percent is not None:
        end = "finish" if finish else "abort" if abort else None
        act = Try(revision=revision, percent=percent, end=end, force=force, dry_run=dry_run)
        pointer = context.backend.do(scope, name, act).pointer
    else:
        pointer = context.backend.named(scope, name).pointer
        if pointer is None or pointer.canary is None:
            raise NotFound(f"{name} has no canary in {scope}: say which revision to try")
    assert pointer is not None  # the act moves it
    trial = pointer.canary
    tried = trial.revision if trial is not None else pointer.revision
    context.noted.update(revision=tried)
    told = {"dry_run": dry_run, "pointer": pointer.model_dump(mode="json")}
    if not context.printed(told, output, [f"{name}@{tried}"]):
        share = f", {trial.revision} answers {trial.percent} % of the requests" if trial is not None else ""
        serves = "would serve" if dry_run else "serves"
        context.say(f"{name} {serves} {pointer.revision}{share}")
    if tried is not None:
        follow(context, scope, [pointer], dry_run=dry_run, loads=AdapterKey(*scope, tried, name))


def _stepped(
    context: Context,
    scope: Scope,
    name: str,
    revision: str | None,
    steps: tuple[int, ...],
    every_s: float,
    gate: str | None,
    *,
    force: bool,
) -> Pointer:
    wanted = parse(gate) if gate is not None else None
    known = context.backend.named(scope, name)
    tried = known.pointer.canary if known.pointer is not None else None
    chosen = revision or (tried.revision if tried is not None else None)
    if chosen is None:
        raise click.UsageError(f"say which revision: lora-fs canary {name} REVISION --steps …")
    if wanted is not None and chosen in known.evaluations.unreadable:
        raise OperatorError(known.evaluations.unreadable[chosen])
    stepping = Stepping(
        context, scope, AdapterKey(*scope, chosen, name), wanted, known.evaluations.found.get(chosen)
    )
    return stepping.run(steps, every_s, force=force)


COMMANDS = (canary,)
