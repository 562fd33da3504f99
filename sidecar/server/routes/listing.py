"""Every adapter with this replica's status, as bytes of JSON: made in a thread, one adapter at a time.

Ten thousand take a third of a second of work. The event loop, which streams answers meanwhile, only
collects the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import anyio
import anyio.to_thread

from lora_fs.sidecar.model import AdapterStatus, Condition, JsonObject, Phase
from lora_fs.sidecar.reconcile.status import resting
from lora_fs.sidecar.registry.lifecycle.selectors import Selection
from lora_fs.sidecar.server.middleware.access import Sight
from lora_fs.sidecar.server.ports import ReplicaPort, Served

AT_ONCE = 2  # renderings; further callers wait for one of them


class Listing:
    """The rows of one replica."""

    def __init__(self, replica: ReplicaPort) -> None:
        self._replica, self._threads = replica, anyio.CapacityLimiter(AT_ONCE)

    async def answer(
        self, body: JsonObject, sight: Sight, selection: Selection, phase: Phase | None
    ) -> bytes:
        """``body`` with ``data``: a ``bodies.AdapterDescription`` of each selected adapter in ``sight``."""
        replica = self._replica
        told, residency = replica.notable()[0], replica.residency()
        catalog = replica.catalog()

        def one(adapter: Served, status: AdapterStatus) -> bytes:
            # Only reads the conditions: a list notes nothing.
            conditions = replica.conditions(adapter.name, status)
            return row(adapter, status, conditions, residency.get(adapter.name), replica.staged(adapter))

        def render() -> bytes:
            seen = (each for each in catalog.in_order() if each.record.namespace in sight)
            meant = (each for each in seen if selection.covers(each.name, each.record))
            known = ((each, told.get(each.name)) for each in meant)
            found = (pair for pair in known if phase in (None, pair[1].phase if pair[1] else Phase.UNLOADED))
            rows = (one(each, status or resting(each.record)) for each, status in found)
            return around(rows, body, "data")

        return await anyio.to_thread.run_sync(render, limiter=self._threads)


def row(
    served: Served,
    status: AdapterStatus,
    conditions: Iterable[Condition],
    residency: JsonObject | None,
    staged: bool,
) -> bytes:
    """One adapter, as ``bodies.AdapterDescription`` says."""
    parts = {
        "name": json.dumps(served.name),
        "record": served.record.model_dump_json(),
        "status": status.model_dump_json(),
        "conditions": "[" + ",".join(one.model_dump_json() for one in conditions) + "]",
        "residency": json.dumps(residency),
        "staged": json.dumps(staged),
    }
    return ("{" + ",".join(f'"{name}":{part}' for name, part in parts.items()) + "}").encode()


def around(rows: Iterable[bytes], body: JsonObject, field: str) -> bytes:
    """``body`` with a list of the rows as its last field. Joined once: a copy holds up the event loop."""
    opening = json.dumps(body).encode().removesuffix(b"}") + f',"{field}":['.encode()
    parts = [part for row in rows for part in (b",", row)]
    return b"".join([opening, *parts[1:], b"]}"])
