"""What a replica says of its adapters: their status, what the engine holds, and the numbers for people.

Pure: each call builds it from memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from lora_fs.sidecar.errors import NoSpareRoom
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, JsonObject, Phase, Record, public_of
from lora_fs.sidecar.reconcile.catalog import Catalog, Served
from lora_fs.sidecar.reconcile.residents.effect import Effect
from lora_fs.sidecar.reconcile.residents.loading import Residents
from lora_fs.sidecar.reconcile.residents.probe import NO_EFFECT
from lora_fs.sidecar.reconcile.stage.jobs import Stager

MOST_UNLOADED = 1024  # that a report tells of: 400 kB of its 4 MiB
MOST_READY = 1 << 14  # statuses that are kept: a report lists all loaded adapters, most of them unchanged


def resting(record: Record) -> AdapterStatus:
    """The status of a name that waits for its first request."""
    return _make(record, Phase.UNLOADED, "LoadsAtFirstRequest")


def notable(catalog: Catalog, residents: Residents, now: float) -> dict[str, AdapterStatus]:
    """Only names that are not simply unloaded, canaries among them: work in proportion to these."""
    loaded = {name.partition("@")[0] for name in (*residents.paths, *residents.elsewhere)}
    names = loaded.union(catalog.unasked, residents.failures, residents.phases)
    told_of = [catalog.served[name] for name in sorted(names) if name in catalog.served]
    told_of += [trial.served for trial in catalog.trials.values()]
    found = {one.name: _status(one, residents, now, catalog) for one in told_of}
    told = {name: status for name, status in found.items() if status.phase is not Phase.UNLOADED}
    return {**_draining(residents, catalog), **told, **dict(_conflicts(catalog))}


def bounded(
    told: Mapping[str, AdapterStatus], recent: Collection[str], most: int = MOST_UNLOADED
) -> tuple[dict[str, AdapterStatus], int]:
    """The statuses that a report holds, and how many it leaves out.

    It holds each adapter that is loaded, loads or leaves. Of those that wait or failed it holds ``most``:
    those of ``recent`` series first, for which ``--wait`` looks, then the failed ones.
    """

    def rank(of: tuple[str, AdapterStatus]) -> tuple[bool, bool]:
        key = AdapterKey(*of[1].key)
        changed = {str(key), f"{key.scope}/.active/{key.name}"}
        return changed.isdisjoint(recent), of[1].phase is Phase.PENDING

    loaded = {name: one for name, one in told.items() if one.phase not in (Phase.PENDING, Phase.FAILED)}
    others = [(name, one) for name, one in told.items() if name not in loaded]
    if len(others) > most:
        others.sort(key=rank)
    return {**loaded, **dict(others[:most])}, max(0, len(others) - most)


def counts(catalog: Catalog, told: Mapping[str, AdapterStatus]) -> dict[str, int]:
    """How many are in each phase, given the notable ones."""
    found: Counter[str] = Counter(status.phase for status in told.values())
    found[Phase.UNLOADED] += len(catalog.served) - sum(name in catalog.served for name in told)
    return dict(+found)


def residency(residents: Residents, catalog: Catalog) -> dict[str, JsonObject]:
    """What the engine holds, by the name that clients send: ``bodies.Residency``.

    Of two copies, of which one leaves, it is the one that new requests get; ``in_flight`` is of both.
    """
    found: dict[str, JsonObject] = {}
    for engine_name, path in residents.paths.items():
        plain = engine_name.partition("@")[0]
        active = catalog.served.get(plain)
        serves_plain = active is not None and residents.name_of(active) == engine_name
        public = public_of(engine_name)
        name = plain if serves_plain else public
        in_flight = residents.in_flight(engine_name)
        if name in found:
            in_flight += found[name]["in_flight"]
        if name in found and not serves_plain:
            found[name]["in_flight"] = in_flight
            continue
        found[name] = {
            "engine_name": public,
            "in_flight": in_flight,
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


def _draining(residents: Residents, catalog: Catalog) -> dict[str, AdapterStatus]:
    """Adapters that must go and have not: by name, or with the revision if the name stays."""
    found = {}
    for engine_name, record in residents.held():
        if engine_name not in residents.draining and not catalog.has_tombstone(record.key):
            continue
        plain = engine_name.partition("@")[0]
        name = f"{plain}@{record.revision}" if plain in catalog.served else public_of(engine_name)
        requests = residents.in_flight(engine_name)
        why = ("InUse", f"waits for {requests} requests to end") if requests else ("Unloading", "")
        found[name] = _make(record, Phase.DRAINING, *why)
    return dict(sorted(found.items()))


def _conflicts(catalog: Catalog) -> Iterator[tuple[str, AdapterStatus]]:
    for name, record in catalog.conflicts.items():
        why = f"the engine itself serves {name!r}: register the adapter under another name"
        yield name, _make(record, Phase.FAILED, "NameConflict", why)


def _status(served: Served, residents: Residents, now: float, catalog: Catalog) -> AdapterStatus:
    record, name = served.record, served.name
    if residents.name_of(served) is not None:
        signer, effect = residents.signer_of(record), residents.effects.get(record.spec.digest)
        return _ready(record.key, record.generation, signer, effect)
    if name in residents.phases:
        return _make(record, residents.phases[name])
    failure = residents.failures.get(name)
    if failure is not None and failure.concerns(record):
        return _make(
            record,
            Phase.PENDING if isinstance(failure.error, NoSpareRoom) else Phase.FAILED,
            type(failure.error).__name__,
            str(failure.error),
            attempts=failure.attempts,
            retry_in_s=max(0.0, round(failure.retry_at - now, 1)),
        )
    if name in catalog.unasked and name not in residents.unplaced:
        return _make(record, Phase.PENDING, "NotLoadedYet", residents.why_not_loaded())
    return resting(record)


@lru_cache(MOST_READY)
def _ready(key: AdapterKey, generation: int, signer: str | None, effect: Effect | None) -> AdapterStatus:
    if effect is Effect.NONE:
        return _of(key, generation, Phase.READY, "NoEffect", NO_EFFECT, signer=signer, effect=effect.value)
    known = effect.value if effect is not None else None
    return _of(key, generation, Phase.READY, "Loaded", signer=signer, effect=known)


def _make(record: Record, phase: Phase, reason: str = "", message: str = "", **more: Any) -> AdapterStatus:
    return _of(record.key, record.generation, phase, reason, message, **more)


def _of(
    key: AdapterKey, generation: int, phase: Phase, reason: str, message: str = "", **more: Any
) -> AdapterStatus:
    return AdapterStatus(
        key=tuple(key), generation=generation, phase=phase, reason=reason, message=message, **more
    )
