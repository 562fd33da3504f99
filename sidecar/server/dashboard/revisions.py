"""An adapter's revisions over time: which serves, which is tried by what share, who asked here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_fs.sidecar.reconcile.catalog import Catalog
from lora_fs.sidecar.server.ports import Served


def revisions_of(
    catalog: Catalog, served: Served, requests: Mapping[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """List every revision of what ``served`` is, the one registered last first.

    Args:
        requests: of this replica, by plain name and revision. It counts those of what it holds or tries;
            of another name None is told.
    """
    record = served.record
    pointer = catalog.source.pointers.get((record.key.scope, record.name))
    trial = catalog.trials.get(served.name)
    tried = trial.served.record.revision if trial is not None else None
    percent = trial.percent if trial is not None else 0
    before = pointer.previous_revision if pointer is not None else None
    counted = trial is not None or any(name == served.name for name, _ in requests)
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
            "requests": requests.get((served.name, one.revision), 0) if counted else None,
        }
        for one in found
    ]
