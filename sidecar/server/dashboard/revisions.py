"""An adapter's revisions over time: role, share, use, evaluation and signer of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.reconcile.catalog import Catalog
from lora_fs.sidecar.registry.store.evaluations import Evaluations
from lora_fs.sidecar.server.dashboard.usage import Totals
from lora_fs.sidecar.server.ports import Served


def revisions_of(
    catalog: Catalog,
    served: Served,
    usage: Mapping[str, Totals],
    evaluations: Evaluations,
    *,
    whole: bool,
) -> list[dict[str, Any]]:
    """List every revision of what ``served`` is, the one registered last first.

    Args:
        usage: counts by revision.
        evaluations: of the registered revisions.
        whole: ``usage`` lists every revision with requests. If not, missing counts are unknown, and None.
    """
    record = served.record
    pointer = catalog.source.pointers.get((record.key.scope, record.name))
    trial = catalog.trials.get(served.name)
    tried = trial.served.record.revision if trial is not None else None
    percent = trial.percent if trial is not None else 0
    before = pointer.previous_revision if pointer is not None else None
    shares = {record.revision: 100 - percent, tried: percent}
    roles = {before: "previous", record.revision: "serves", tried: "canary"}
    records = catalog.source.records_of(record.key.scope).values()
    found = [one for one in records if one.name == record.name]
    found.sort(key=lambda one: (one.registered_at or one.updated_at, one.revision), reverse=True)
    return [
        {
            "revision": one.revision,
            "role": roles.get(one.revision, "") if one.present else "withdrawn",
            "share": shares.get(one.revision, 0) if one.present else 0,
            "registered_at": one.registered_at or one.updated_at,
            "writer": one.writer,
            "signer": one.spec.signer,
            "evaluation": _evaluated(evaluations.found.get(one.revision)),
            "evaluation_problem": evaluations.unreadable.get(one.revision),
            **_used(usage.get(one.revision, Totals() if whole else None)),
        }
        for one in found
    ]


def _evaluated(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    kept = {"data", "cases", "gate", "passed", "unmet", "updated_at"}
    against = evaluation.baseline.revision if evaluation.baseline is not None else None
    told = evaluation.model_dump(mode="json", include=kept)
    return {**told, "figures": evaluation.figures, "against": against}


def _used(totals: Totals | None) -> dict[str, Any]:
    if totals is None:
        return {"requests": None, "errors_4xx": None, "errors_5xx": None, "load_s": None}
    counts = {"requests": totals.requests, "errors_4xx": totals.errors_4xx, "errors_5xx": totals.errors_5xx}
    return {**counts, "load_s": totals.mean_load_s}
