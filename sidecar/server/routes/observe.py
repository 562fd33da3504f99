"""Health, readiness, metrics, and the service-discovery document.

``/health`` is liveness: it depends on neither the mount nor the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping

import anyio.to_thread
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lora_fs.sidecar import __version__
from lora_fs.sidecar.model import AdapterStatus, JsonObject, Phase, Scope
from lora_fs.sidecar.reconcile.catalog import public_name
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.server.bodies import (
    EngineQueue,
    Health,
    LoadedLora,
    LoraCapacity,
    LoraMetadata,
    Metadata,
    ReadinessBody,
    ServedModel,
)
from lora_fs.sidecar.server.middleware.access import ALL, Admin, Sight
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.errors import AGAIN
from lora_fs.sidecar.server.pauses import Pauses
from lora_fs.sidecar.server.ports import ReplicaPort
from lora_fs.sidecar.server.routes.engine_series import merged

MAX_NAMES = 1000  # with series of what is loaded, three each, and as many with one of their failure


class Scrape(Collector):
    """Reads the replica at each scrape: a series goes when its adapter goes.

    An adapter has series while it is in the engine or failed, up to ``MAX_NAMES``, busy ones first, then
    loaded ones: ten thousand may be registered, and all of them may fail.
    """

    def __init__(self, replica: ReplicaPort) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        replica = self._replica
        told, counts = replica.notable()
        readiness, capacity = replica.readiness(), replica.capacity()
        yield from self._adapters(told, replica.residency())
        yield _gauge("lora_fs_adapters", "Adapters by phase", "phase", {p: counts.get(p, 0) for p in Phase})
        yield _gauge("lora_fs_resident_adapters", "Adapters by where they are", "tier", replica.tiers())
        without = sum(one.reason == "NoEffect" for one in told.values())
        yield GaugeMetricFamily(
            "lora_fs_adapters_without_effect", "Loaded, and answer as the base model", value=without
        )
        yield GaugeMetricFamily("lora_fs_ready", "Serves", value=readiness.ready)
        kinds = Counter(told.partition(":")[0] for told in readiness.conditions)
        yield _gauge("lora_fs_conditions", "What is wrong, by kind", "type", kinds)
        downloads = len(replica.downloads())
        yield GaugeMetricFamily("lora_fs_downloads", "Fetched now, to be registered", value=downloads)
        if capacity is not None:
            yield GaugeMetricFamily("lora_fs_capacity", "Adapters that may be loaded at once", value=capacity)
        for name, value in replica.counters().items():
            yield CounterMetricFamily(f"lora_fs_{name}", name.replace("_", " "), value=value)
        for name, took in replica.durations().items():
            text = f"Seconds that one {name.partition('_')[0]} took"
            yield HistogramMetricFamily(f"lora_fs_{name}", text, buckets=took.buckets(), sum_value=took.sum_s)
        yield InfoMetricFamily("lora_fs_build", "This lora-fs", value={"version": __version__})

    def _adapters(
        self, told: Mapping[str, AdapterStatus], residency: Mapping[str, JsonObject]
    ) -> Iterator[Metric]:
        failed = {name: one.reason for name, one in told.items() if one.phase is Phase.FAILED}
        in_flight = {name: residency[name]["in_flight"] for name in sorted(residency)}
        in_flight |= dict.fromkeys(sorted(failed.keys() - residency.keys()), 0)
        # An autoscaler sums them up: the busy ones have series, however many are loaded.
        names = sorted(in_flight, key=lambda name: -in_flight[name])[:MAX_NAMES]
        label = "adapter_name"
        loaded = {name: name in residency for name in names}
        flight = {name: in_flight[name] for name in names}
        yield _gauge("lora_fs_adapter_loaded", "In the engine", label, loaded)
        yield _gauge("lora_fs_adapter_in_flight", "Requests", label, flight)
        yield _gauge("lora_syncer_adapter_status", "1 loaded, 0 not", label, loaded)
        why = GaugeMetricFamily("lora_fs_adapter_failed", "Cannot be loaded", labels=[label, "reason"])
        named = sorted(failed)[:MAX_NAMES]  # by its own bound, so that what is loaded hides no failure
        for name in named:
            why.add_metric([name, failed[name]], 1)
        yield why
        left_out = len(in_flight.keys() - {*names, *named})
        yield GaugeMetricFamily("lora_fs_adapters_without_series", "Over the bound", value=left_out)


class Revisions(Collector):
    """Requests, errors and loads by revision, and which share a canary has. Read at each scrape."""

    def __init__(self, replica: ReplicaPort) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        labels, usage = ["adapter_name", "revision"], self._replica.usage()
        requests = CounterMetricFamily("lora_fs_revision_requests", "By what answered", labels=labels)
        errors = CounterMetricFamily(
            "lora_fs_revision_errors", "Answers of 400 and more", labels=[*labels, "status"]
        )
        loads = SummaryMetricFamily("lora_fs_revision_load_seconds", "Loads by the engine", labels=labels)
        for key, counts in usage.revisions.items():
            of = [public_name(key.scope, key.name, self._replica.namespaces), key.revision]
            requests.add_metric(of, counts.requests)
            errors.add_metric([*of, "4xx"], counts.errors_4xx)
            errors.add_metric([*of, "5xx"], counts.errors_5xx)
            loads.add_metric(of, count_value=counts.loads, sum_value=counts.load_seconds)
        yield from (requests, errors, loads)
        yield GaugeMetricFamily("lora_fs_revisions_without_series", "Over the bound", value=usage.left_out)
        share = GaugeMetricFamily("lora_fs_canary_percent", "Of the requests for the name", labels=labels)
        for name, trial in sorted(self._replica.catalog().trials.items()):
            share.add_metric([name, trial.served.record.revision], trial.percent)
        yield share


class Refusals(Collector):
    """Refused admin calls, and those of them without an audit line."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail

    def collect(self) -> Iterator[Metric]:
        refused = self._trail.refused
        yield CounterMetricFamily("lora_fs_refused_calls", "Admin calls refused", value=refused.total)
        yield CounterMetricFamily(
            "lora_fs_refused_calls_left_out", "Refused, and not in the audit", value=refused.left_out
        )


class Collected(Collector):
    """Families that are collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def exposed(registry: CollectorRegistry) -> bytes:
    """The text of a scrape: collected on the event loop, where the state is, and written in a thread."""
    collected = Collected(list(registry.collect()))
    return await anyio.to_thread.run_sync(generate_latest, collected)


def _gauge(name: str, told: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, told, labels=[label])
    for value in values:
        family.add_metric([str(value)], values[value])
    return family


def router(
    replica: ReplicaPort,
    admin: Admin,
    trail: Trail,
    engine_metrics: Callable[[], Awaitable[str | None]] | None = None,
    *,
    pauses: Pauses | None = None,
    admin_port: int | None = None,
) -> APIRouter:
    """The sidecar's routes.

    Args:
        engine_metrics: asks for the text of the engine's own series; None where there is none.
        pauses, admin_port: see ``discovery``.
    """
    routes = discovery(replica, admin, pauses=pauses, admin_port=admin_port)
    registry = CollectorRegistry()
    registry.register(Scrape(replica))
    registry.register(Revisions(replica))
    registry.register(Refusals(trail))
    ProcessCollector(registry=registry)

    @routes.get("/health", summary="Liveness")
    async def health() -> Health:
        return Health()

    @routes.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        theirs = await engine_metrics() if engine_metrics is not None else None
        ours = await exposed(registry)
        both = await anyio.to_thread.run_sync(merged, ours.decode(), theirs)
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    return routes


def discovery(
    replica: ReplicaPort, admin: Admin, *, pauses: Pauses | None = None, admin_port: int | None = None
) -> APIRouter:
    """Readiness and the service-discovery document, which a vLLM has none of.

    Args:
        pauses: of the proxy; None: there is no proxy, and nothing pauses.
        admin_port: the one port that answers operations; None: every port does.
    """
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/readyz",
        summary="Readiness: 503 until this replica can serve",
        response_model=ReadinessBody,
        responses={503: {"model": ReadinessBody}},
    )
    async def readyz() -> JSONResponse:
        readiness = replica.readiness()
        body = ReadinessBody(
            ready=readiness.ready, conditions=list(readiness.conditions), changed_by=admin.changed_by
        )
        again = None if readiness.ready else AGAIN
        return JSONResponse(body.model_dump(), 200 if readiness.ready else 503, again)

    @routes.get("/metadata", summary="What this replica has, for service discovery")
    async def metadata(request: Request) -> Metadata:
        sight = await admin.sight(request.headers)
        listings, figures = replica.catalog().source.listings, replica.figures()
        scopes = (Scope(namespace, replica.model) for namespace in replica.namespaces if namespace in sight)
        known = ((scope, listings.get(scope, ScopeListing())) for scope in scopes)
        return Metadata(
            model=ServedModel(name=replica.model, served_names=_served_names(replica)),
            replica=replica.replica_id,
            namespaces=[scope.namespace for scope, listed in known if listed.revisions or listed.pointers],
            ready=replica.readiness().ready,
            version=__version__,
            engine_version=replica.engine_version,
            queue=_queue(figures) if sight == ALL else None,
            paused=pauses.named(sight) if pauses is not None else [],
            admin_port=admin_port,
            lora=_lora(replica, figures, sight),
        )

    return routes


def _served_names(replica: ReplicaPort) -> list[str]:
    """List what the engine serves by itself to everybody. Its other adapters may be a tenant's."""
    names = [str(card["id"]) for card in replica.base_cards()]
    return [name for name in names if replica.kept_to(name) is None]


def _lora(replica: ReplicaPort, figures: Mapping[str, float], sight: Sight) -> LoraMetadata:
    """Describe the adapters in the engine that a caller may read, and how many more it may load."""
    residency, catalog, capacity = replica.residency(), replica.catalog(), replica.capacity()
    loaded: dict[str, LoadedLora] = {}
    count = 0
    for name, held in residency.items():
        # A copy that serves the plain name may serve ``name@revision`` as well: no second one is loaded.
        found = {one: catalog.find(one) for one in (name, str(held["engine_name"]))}
        readable = {
            one: served.record
            for one, served in found.items()
            if served is not None and served.record.namespace in sight
        }
        count += bool(readable) or sight == ALL  # an adapter that was withdrawn and drains has no record
        for one, record in readable.items():
            loaded[one] = LoadedLora(
                base_model=record.spec.base_model,
                namespace=record.namespace,
                revision=record.revision,
                digest=record.spec.digest,
                memory_usage=record.spec.size_bytes,
                last_used=time.time() - held["idle_s"],
                in_flight=held["in_flight"],
            )
    free = max(0, capacity - count) if capacity is not None and sight == ALL else None
    max_loras = figures.get("max_loras")
    slots = LoraCapacity(
        max_loras=None if max_loras is None else int(max_loras), loaded_count=count, available_slots=free
    )
    load_s = _load_s(replica) if sight == ALL else None
    return LoraMetadata(loaded_loras=loaded, lora_capacity=slots, load_seconds=load_s)


def _load_s(replica: ReplicaPort) -> float | None:
    durations = replica.durations()
    staged_s, loaded_s = (durations[what].median_s() for what in ("stage_seconds", "load_seconds"))
    return None if staged_s is None or loaded_s is None else round(staged_s + loaded_s, 4)


def _queue(figures: Mapping[str, float]) -> EngineQueue | None:
    running, waiting = figures.get("requests_running"), figures.get("requests_waiting")
    if running is None or waiting is None:
        return None
    return EngineQueue(running=int(running), waiting=int(waiting))
