"""From what replicas and records say to the table's rows and columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_fs.sidecar.model import AdapterStatus, Phase, ReplicaStatus, Scope
from lora_fs.sidecar.reconcile.catalog import public_name
from lora_fs.sidecar.server.dashboard.grid import LETTERS, MAX_WHY, Column, Row
from lora_fs.sidecar.server.ports import Served
from lora_fs.sidecar.server.routes.models import unix_s

LIVE_S = 60.0  # as `lora-fs status` has it
UNDER_WAY = frozenset({Phase.PENDING, Phase.DOWNLOADING, Phase.VALIDATING, Phase.LOADING})


def row_of(served: Served) -> Row:
    """An adapter's row, from its record."""
    record, spec = served.record, served.record.spec
    return Row(
        served.name,
        record.namespace,
        record.revision,
        spec.policy.kind.value if spec.policy is not None else "",
        spec.size_bytes,
        spec.lora.rank,
        " ".join(f"{name}={value}" for name, value in sorted(spec.labels.items())),
    )


def column_of(status: ReplicaStatus, namespaces: tuple[str, ...], rows: Mapping[str, Row]) -> Column:
    """One replica's column, in the names that a reader of ``namespaces`` uses.

    A revision beside the one that the name serves is left out: the name has one cell.
    """
    cells: dict[str, str] = {}
    why: dict[str, str] = {}
    unknown: dict[str, Row] = {}
    for told_as, one in status.adapters.items():
        namespace, model, revision, plain = one.key
        if namespace not in namespaces or model != status.model:
            continue
        name = public_name(Scope(namespace, model), plain, namespaces)
        if "@" in told_as and name in rows:
            continue
        cells[name] = LETTERS[one.phase]
        if one.phase is Phase.FAILED or (one.message and one.phase in UNDER_WAY):
            why[name] = _sentence(one)
        if name not in rows:
            unknown[name] = Row(name, namespace, revision)
    return Column(frozenset(status.namespaces), cells, why, unknown)


def summary_of(status: ReplicaStatus, now: float, *, own: bool) -> dict[str, Any]:
    """A replica but for its adapters. ``live``: it wrote its report in the last ``LIVE_S``."""
    at = None if own else unix_s(status.updated_at)
    return {
        "live": own or (at is not None and now - at < LIVE_S),
        "own": own,
        "at": at,
        "engine": status.engine,
        "url": status.url,
        "conditions": list(status.conditions),
        "conditions_since": {kind: unix_s(at) for kind, at in status.conditions_since.items()},
        "figures": status.figures,
        "usage_whole": status.usage_left_out == 0,
        "downloads": [one.model_dump(mode="json") for one in status.downloads.values()],
    }


def _sentence(one: AdapterStatus) -> str:
    text = " ".join((one.message or one.reason).split())
    text = text.removeprefix("/".join(one.key)).removeprefix(" cannot be served: - ").removeprefix(".: ")
    return text if len(text) <= MAX_WHY else text[: MAX_WHY - 1] + "…"
