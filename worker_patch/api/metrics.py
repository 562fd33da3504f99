"""The worker's tiers as Prometheus series, under the names vLLM is giving them upstream.

``vllm:lora_adapter_loaded`` and its kin say what is resident, which ``vllm:lora_requests_info`` does
not. Read at each scrape from the last ``sync``: a series goes when its adapter goes.

Each data-parallel engine has its own tiers and loads: their numbers are summed. The workers of one
engine do everything together, each with its share: the first one's numbers are the engine's, save
for bytes, and for blank runs, of which another worker's must show.

vLLM's own ``vllm:lora_requests_info`` has the engine's names. Gateways compare them with the models that
clients ask for: ``public`` gives them back. vLLM keeps a series for each set of adapters that it ever saw in
use together; of these the latest holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from lora_fs.sidecar.engine.protocol import Queue
from lora_fs.sidecar.model import public_of
from lora_fs.sidecar.server.routes.engine_series import REQUESTS, latest

_NAMES = re.compile(r'(_lora_adapters=")([^"]*)')

COUNTERS = {
    "gpu_hits": "An adapter's requests began with it in the accelerator's memory",
    "gpu_misses": "An adapter's requests began with it outside that memory",
    "gpu_evictions": "Adapters that left a slot for another",
    "gpu_loads": "Adapters put into a slot",
    "gpu_load_bytes": "Bytes copied for it",
    "gpu_load_seconds": "Seconds that the engine's steps spent on it",
    "cpu_hits": "Holds that found the adapter in host memory",
    "cpu_misses": "Holds that did not",
    "cpu_evictions": "Adapters that left host memory for another",
    "host_loads": "Adapters read from the staged copy into host memory",
    "host_loads_alike": "Those packed as one of their kind was before, without vLLM's reader",
    "host_load_bytes": "Bytes of them",
    "blank_runs": "Steps that ran an adapter without its weights, since it could not be had",
}

OF_ALL_WORKERS = frozenset(("blank_runs", "gpu_load_bytes", "host_load_bytes"))


class Tiers(Collector):
    """``seen`` gives each worker's last answer, with its ``engine``; none before the first."""

    def __init__(self, seen: Callable[[], list[dict[str, Any]]]) -> None:
        self._seen = seen

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        workers = self._seen()
        if not workers:
            return
        engines = [*{worker["engine"]: worker for worker in reversed(workers)}.values()]
        resident = [(of["engine"], one) for of in engines for one in of["resident"].values() if one["name"]]
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Resident adapters",
            labels=["engine", "adapter_name", "level", "pinned", "rank"],
        )
        # One name may be there twice, while its old bytes leave: a series must be unique.
        for labels in sorted({(engine, *_labels(one)) for engine, one in resident}):
            loaded.add_metric(labels, 1)
        yield loaded
        there = sum(one["level"] == "gpu" for _, one in resident)
        yield GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "On the accelerator", value=there)
        yield GaugeMetricFamily("vllm:num_cpu_loaded_lora_adapters", "In host memory", value=len(resident))
        yield GaugeMetricFamily("vllm:max_gpu_lora_adapters", "Slots", value=_sum(engines, "slots"))
        loads, took_s = (_counted(engines, name) for name in ("host_loads", "host_load_seconds"))
        yield SummaryMetricFamily(
            "vllm:lora_adapter_load_seconds",
            "Loads into host memory",
            count_value=int(loads),
            sum_value=took_s,
        )
        taken, budget = _sum(workers, "used_bytes"), _sum(workers, "budget_bytes")
        yield GaugeMetricFamily("lora_fs_host_bytes", "Host memory taken", value=taken)
        yield GaugeMetricFamily("lora_fs_host_budget_bytes", "Host budget", value=budget)
        for name, told in COUNTERS.items():
            of = workers if name in OF_ALL_WORKERS else engines
            yield CounterMetricFamily(f"lora_fs_{name}", told, value=_counted(of, name))


def queue_of(registry: CollectorRegistry) -> Queue | None:
    """Read vLLM's gauges of requests, of all engines of this process; None where it logs no statistics."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    counts: dict[str, int] = {}
    for family in registry.restricted_registry(names).collect():
        for sample in family.samples:
            if sample.name in names:
                counts[sample.name] = counts.get(sample.name, 0) + int(sample.value)
    return Queue(*(counts[name] for name in names)) if len(counts) == len(names) else None


def public(exposed: bytes, static: Collection[str]) -> bytes:
    """vLLM's series with the names that clients know; of its gauge of LoRA requests the latest series alone.

    Args:
        static: names of ``--lora-modules``, which are as they are.
    """
    lines = exposed.decode().split("\n")
    last = latest([line for line in lines if line.startswith(REQUESTS)])
    kept = (line for line in lines if line is last or not line.startswith(REQUESTS))
    named = partial(_NAMES.sub, lambda found: found[1] + _public(found[2], static))
    return "\n".join(named(line) if line is last else line for line in kept).encode()


def _public(names: str, static: Collection[str]) -> str:
    known = (name if name in static else public_of(name) for name in names.split(","))
    return ",".join(dict.fromkeys(known))


def _sum(workers: Iterable[dict[str, Any]], what: str) -> float:
    return sum(float(worker[what]) for worker in workers)


def _counted(workers: Iterable[dict[str, Any]], name: str) -> float:
    return sum(float(worker["counters"].get(name, 0)) for worker in workers)


def _labels(one: dict[str, Any]) -> tuple[str, str, str, str]:
    return one["name"], one["level"], str(one["pinned"]).lower(), str(one["rank"])
