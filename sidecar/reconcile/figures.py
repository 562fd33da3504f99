"""What a replica tells of its adapters: what is in the engine, where, and the numbers for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lora_fs.sidecar.model import JsonObject, public_of
from lora_fs.sidecar.reconcile.catalog import Catalog
from lora_fs.sidecar.reconcile.loading import Residents
from lora_fs.sidecar.reconcile.stage.jobs import Stager


def residency(residents: Residents, catalog: Catalog) -> dict[str, JsonObject]:
    """What the engine holds, by the name that clients send: ``bodies.Residency``.

    Of two copies of one revision, of which one leaves, it is the one that new requests get.
    """
    found: dict[str, JsonObject] = {}
    for engine_name, path in residents.paths.items():
        plain = engine_name.partition("@")[0]
        active = catalog.served.get(plain)
        serves_plain = active is not None and residents.name_of(active) == engine_name
        public = public_of(engine_name)
        name = plain if serves_plain else public
        if name in found and not serves_plain:
            continue
        found[name] = {
            "engine_name": public,
            "in_flight": residents.in_flight(engine_name),
            "idle_s": round(residents.idle_s(engine_name), 1),
            "path": path,
            "tier": residents.tiers.get(engine_name),
        }
    return found


def tiers(residents: Residents, stager: Stager) -> dict[str, int]:
    """Adapters by where they are: as ``server.ports.ReplicaPort`` says."""
    counted = Counter(residents.tiers.get(name, "engine") for name in residents.paths)
    return {"disk": stager.copies, **counted}


def numbers(residents: Residents, stager: Stager, known: Mapping[str, int | None]) -> dict[str, float]:
    """Counters and gauges in one; of ``known`` what is not None."""
    found = {name.removesuffix("_total"): float(value) for name, value in residents.counters.items()}
    found |= {f"tier_{tier}": float(count) for tier, count in tiers(residents, stager).items()}
    found["in_flight"] = sum(residents.in_flight(name) for name in residents.paths)
    median_s = residents.durations["load_seconds"].median_s()
    if median_s is not None:
        found["load_s"] = round(median_s, 4)
    return found | {name: float(value) for name, value in known.items() if value is not None}
