"""Health, readiness, metrics, and the service-discovery document.

``/health`` is liveness: it depends on neither the mount nor the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.server.bodies import (
    Health,
    LoadedLora,
    LoraCapacity,
    LoraMetadata,
    Metadata,
    ReadinessBody,
    ServedModel,
)
from lora_fs.sidecar.server.ports import ReplicaPort


class Scrape(Collector):
    """Reads the replica at each scrape: a series goes when its adapter goes.

    Only an adapter that is in the engine or failed has one: ten thousand may be registered, and as
    many of them wait for their turn to be loaded.
    """

    def __init__(self, replica: ReplicaPort) -> None:
        self._replica = replica

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        (told, counts), residency = self._replica.notable(), self._replica.residency()
        phases = GaugeMetricFamily("lora_fs_adapters", "Adapters by phase", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase.value], counts.get(phase, 0))
        yield phases
        loaded = GaugeMetricFamily("lora_fs_adapter_loaded", "In the engine", labels=["adapter_name"])
        flight = GaugeMetricFamily("lora_fs_adapter_in_flight", "Requests", labels=["adapter_name"])
        syncer = GaugeMetricFamily("lora_syncer_adapter_status", "1 loaded, 0 not", labels=["adapter_name"])
        failed = {name for name, status in told.items() if status.phase is Phase.FAILED}
        for name in sorted(failed | residency.keys()):
            loaded.add_metric([name], name in residency)
            syncer.add_metric([name], name in residency)
            flight.add_metric([name], residency.get(name, {}).get("in_flight", 0))
        yield from (loaded, flight, syncer)
        yield GaugeMetricFamily("lora_fs_ready", "Serves", value=self._replica.readiness().ready)
        for name, value in self._replica.counters().items():
            yield CounterMetricFamily(f"lora_fs_{name}", name.replace("_", " "), value=value)


def router(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """The sidecar's routes."""
    routes = discovery(replica, admin)
    registry = CollectorRegistry()
    registry.register(Scrape(replica))

    @routes.get("/health", summary="Liveness")
    async def health() -> Health:
        return Health()

    @routes.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


def discovery(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """Readiness and the service-discovery document, which a vLLM has none of."""
    routes = APIRouter(tags=["operations"])

    @routes.get("/readyz", response_model=ReadinessBody, responses={503: {"model": ReadinessBody}})
    async def readyz() -> JSONResponse:
        readiness = replica.readiness()
        body = ReadinessBody(ready=readiness.ready, conditions=list(readiness.conditions))
        return JSONResponse(body.model_dump(), 200 if readiness.ready else 503)

    @routes.get("/metadata", summary="What this replica has, for service discovery")
    async def metadata(request: Request) -> Metadata:
        sight = await admin.sight(request.headers)
        residency, capacity = replica.residency(), replica.capacity()
        catalog = replica.catalog().served
        loaded = {
            name: LoadedLora(
                base_model=catalog[name].record.spec.base_model,
                namespace=catalog[name].record.namespace,
                revision=catalog[name].record.revision,
                memory_usage=catalog[name].record.spec.size_bytes,
                in_flight=held["in_flight"],
            )
            for name, held in residency.items()
            if name in catalog and catalog[name].record.namespace in sight
        }
        free = None if capacity is None else max(0, capacity - len(residency))
        count = sum(name in catalog for name in residency)
        slots = LoraCapacity(max_loras=capacity, loaded_count=count, available_slots=free)
        return Metadata(
            model=ServedModel(name=replica.model),
            replica=replica.replica_id,
            ready=replica.readiness().ready,
            lora=LoraMetadata(loaded_loras=loaded, lora_capacity=slots),
        )

    return routes
