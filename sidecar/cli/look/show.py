"""show: one name with each of its revisions: record, evaluation, effect, signer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import click

from lora_fs.sidecar.cli.look.listing import check_registered, read, rows_of
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, shown_bytes, shown_time
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Record, ReplicaStatus
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s
from lora_fs.sidecar.registry.view.snapshot import Desired

FIGURES: Final = (
    *("pass_rate", "score", "errors", "regressions", "improvements", "difference", "p_worse"),
    *("ttft_p99_ms", "tokens_per_s_p50"),
)
NAMED: Final = 3  # replicas in a line


@command()
@parameters.name
@parameters.revision_option()
@parameters.output
@click.pass_obj
def show(context: Context, name: str, revision: str | None, output: Format) -> None:
    """Show NAME: what it serves, and each of its revisions.

    \b
    Examples:
      lora-fs show support
      lora-fs show support@v1 -o json
    """
    with read(context, (context.scope(),), name) as desired:
        _show(context, desired, name, revision, output)


def _show(context: Context, desired: Desired, name: str, revision: str | None, output: Format) -> None:
    scope = context.scope()
    records = [record for record, _ in rows_of(desired, name) if revision in (None, record.revision)]
    check_registered(desired, (scope,), name, revision)
    if not records:
        return  # it may exist
    pointer = desired.pointers.get((scope, name))
    shown = {record.revision for record in records}
    try:
        known = context.backend.named(scope, name).evaluations
        found = {one: evaluation for one, evaluation in known.found.items() if one in shown}
        unreadable = {one: why for one, why in known.unreadable.items() if one in shown}
    except VolumeUnavailable as error:  # show the records all the same
        found, unreadable = {}, dict.fromkeys(shown, str(error))
    effects = _effects(records, context.backend.reports().of(scope))
    told = {
        "pointer": pointer.model_dump(mode="json") if pointer else None,
        "revisions": [record.model_dump(mode="json") for record in records],
        "evaluations": {one: evaluation.model_dump(mode="json") for one, evaluation in found.items()},
        "unreadable_evaluations": unreadable,
        "effects": effects,
    }
    if context.printed(told, output, [f"{name}@{record.revision}" for record in records]):
        return
    serves = pointer.revision if pointer is not None and pointer.revision else "nothing"
    before = pointer.previous_revision if pointer is not None else None
    trial = pointer.canary if pointer is not None else None
    canary = f"; {trial.revision} answers {trial.percent} % of the requests" if trial is not None else ""
    context.say(f"{name} in {scope} serves {serves}" + (f", before that {before}" if before else "") + canary)
    for record in records:
        lines = _facts(record)
        lines |= _evaluated(found.get(record.revision), unreadable.get(record.revision))
        lines["effect"] = _effect(effects[record.revision])
        context.say("")
        context.say(record.revision)
        for title, text in lines.items():
            context.say(f"  {title:<11}{text}")


def _facts(record: Record) -> dict[str, str]:
    """The record, line by line."""
    spec, policy = record.spec, record.spec.policy
    return {
        "base model": spec.base_model,
        "files": f"{spec.path} ({shown_bytes(spec.size_bytes)})",
        "source": spec.source.uri,
        "digest": spec.digest,
        "lora": f"rank {spec.lora.rank}, alpha {spec.lora.alpha:g}, {spec.lora.dtype}, "
        f"{', '.join(spec.lora.target_modules)}",
        "policy": f"{policy.kind.value}, TTL {policy.ttl_s} s, priority {policy.priority}"
        if policy
        else "as each sidecar is set",
        "labels": ", ".join(f"{key}={value}" for key, value in spec.labels.items()) or "none",
        "signed by": spec.signer or "not known",
        "written": f"{shown_time(record.updated_at)} by {record.writer}, generation {record.generation}",
    }


def _evaluated(evaluation: Evaluation | None, unreadable: str | None) -> dict[str, str]:
    """The newest evaluation: its gate, its cases and its figures."""
    if evaluation is None:
        return {"evaluated": f"cannot be read: {unreadable}" if unreadable is not None else "no"}
    if evaluation.passed is None:
        verdict = "without a gate"
    else:
        verdict = (
            f"passed {evaluation.gate}" if evaluation.passed else f"failed {'; '.join(evaluation.unmet)}"
        )
    against = f", against {evaluation.baseline.revision}" if evaluation.baseline is not None else ""
    cases = f"{evaluation.cases} cases of {evaluation.data}{against}, {shown_time(evaluation.updated_at)}"
    known = evaluation.figures
    figures = ", ".join(f"{figure} {known[figure]:.4g}" for figure in FIGURES if figure in known)
    return {"evaluated": f"{verdict}; {cases}", **({"figures": figures} if figures else {})}


def _effects(records: Iterable[Record], replicas: Iterable[ReplicaStatus]) -> dict[str, dict[str, str]]:
    """By revision, what each live replica that has it loaded found."""
    by_key = {tuple(record.key): record.revision for record in records}
    found: dict[str, dict[str, str]] = {revision: {} for revision in by_key.values()}
    for replica in replicas:
        for one in replica.adapters.values() if age_s(replica) <= LIVE_S else ():
            if one.key in by_key and one.effect is not None:
                found[by_key[one.key]][replica.replica] = one.effect
    return found


def _effect(found: Mapping[str, str]) -> str:
    """Say who found what; an adapter that has no effect anywhere has none."""
    said = {"none": "none: it answers as the base model does", "some": "it changes answers"}
    parts = []
    for kind, text in said.items():
        replicas = sorted(replica for replica, effect in found.items() if effect == kind)
        more = f" and {len(replicas) - NAMED} more" if len(replicas) > NAMED else ""
        parts += [f"{text} ({', '.join(replicas[:NAMED])}{more})"] if replicas else []
    return "; ".join(parts) or "not known"


COMMANDS = (show,)
