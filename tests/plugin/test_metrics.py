"""The worker's tiers as series: of what is resident now, each told once."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lora_fs.sidecar.engine.protocol import Queue
from lora_fs.worker_patch.api.metrics import COUNTERS, Tiers, public, queue_of


def resident(name: str, level: str = "cpu", rank: int = 8) -> dict[str, Any]:
    return {"name": name, "level": level, "pinned": False, "rank": rank}


def samples(residents: dict[str, dict[str, Any]], **counters: float) -> list[Sample]:
    """What Prometheus reads."""
    return scraped([worker("0", residents, **counters)])


def worker(engine: str, residents: dict[str, dict[str, Any]], **counters: float) -> dict[str, Any]:
    """What one worker says."""
    sizes = {"slots": 2, "budget_bytes": 9, "used_bytes": 5}
    return {"engine": engine, "resident": residents, "counters": counters, **sizes}


def scraped(seen: list[dict[str, Any]]) -> list[Sample]:
    """What Prometheus reads of several."""
    registry = CollectorRegistry()
    registry.register(Tiers(lambda: seen))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [sample for family in families for sample in family.samples]


def scrape(residents: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """The labels of every resident adapter's series."""
    return [sample.labels for sample in samples(residents) if sample.name == "vllm:lora_adapter_loaded"]


def test_the_queue_of_all_engines() -> None:
    """vLLM's own gauges, summed; unknown while it has none."""
    registry = CollectorRegistry()
    assert queue_of(registry) is None
    labels = ["model_name", "engine"]
    running = Gauge("vllm:num_requests_running", "", labels, registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "", labels, registry=registry)
    Gauge("vllm:num_requests_waiting_by_reason", "", [*labels, "reason"], registry=registry)
    assert queue_of(registry) is None
    for engine, counts in (("0", (3, 1)), ("1", (4, 0))):
        for gauge, count in zip((running, waiting), counts, strict=True):
            gauge.labels("tiny", engine).set(count)
    assert queue_of(registry) == Queue(7, 1)


def test_every_tier_is_told() -> None:
    """Upstream's names, and of each tier what was had, missed, evicted and loaded, in bytes and seconds."""
    counters = {"host_load_seconds": 0.5, **dict.fromkeys(COUNTERS, 7.0)}
    told = {sample.name: sample.value for sample in samples({"1": resident("a", "gpu")}, **counters)}
    assert told == {
        "vllm:lora_adapter_loaded": 1,
        "vllm:num_gpu_loaded_lora_adapters": 1,
        "vllm:num_cpu_loaded_lora_adapters": 1,
        "vllm:max_gpu_lora_adapters": 2,
        "vllm:lora_adapter_load_seconds_count": 7,
        "vllm:lora_adapter_load_seconds_sum": 0.5,
        "lora_fs_host_bytes": 5,
        "lora_fs_host_budget_bytes": 9,
        **{
            f"lora_fs_{tier}_{what}_total": 7
            for tier, counted in {
                "gpu": ("hits", "misses", "evictions", "loads", "load_bytes", "load_seconds"),
                "cpu": ("hits", "misses", "evictions"),
                "host": ("loads", "loads_alike", "load_bytes"),
            }.items()
            for what in counted
        },
        "lora_fs_blank_runs_total": 7,
    }


def test_labels_are_those_of_vllm() -> None:
    """engine, adapter_name, level, pinned and rank, as upstream has them."""
    assert scrape({"1": resident("a", "gpu")}) == [
        {"engine": "0", "adapter_name": "a", "level": "gpu", "pinned": "false", "rank": "8"}
    ]


def test_a_series_goes_with_its_adapter() -> None:
    """What the worker does not hold any more has none."""
    assert scrape({"1": resident("a")}) != []
    assert scrape({}) == []


def test_an_adapter_registered_anew_is_told_once() -> None:
    """While its old bytes leave, two ids have one name: twice the same series would end the scrape."""
    assert len(scrape({"1": resident("a"), "2": resident("a")})) == 1
    assert len(scrape({"1": resident("a"), "2": resident("a", rank=16)})) == 2


def told_of(seen: list[dict[str, Any]]) -> dict[str, float]:
    """The values of the series without labels."""
    return {sample.name: sample.value for sample in scraped(seen) if not sample.labels}


def test_every_data_parallel_engine_is_told() -> None:
    """Each has its own slots, memory and loads; an adapter is told of each, by vLLM's number of it."""
    seen = [worker("0", {"1": resident("a", "gpu")}), worker("3", {"1": resident("a"), "2": resident("b")})]
    loaded = [one.labels for one in scraped(seen) if one.name == "vllm:lora_adapter_loaded"]
    found = [(labels["engine"], labels["adapter_name"], labels["level"]) for labels in loaded]
    assert found == [("0", "a", "gpu"), ("3", "a", "cpu"), ("3", "b", "cpu")]
    told = told_of(seen)
    assert (told["lora_fs_host_bytes"], told["lora_fs_host_budget_bytes"]) == (10, 18)
    assert told["vllm:num_gpu_loaded_lora_adapters"] == 1
    assert told["vllm:num_cpu_loaded_lora_adapters"] == 3
    assert told["vllm:max_gpu_lora_adapters"] == 4


@pytest.mark.parametrize("engines", ["00", "01"])
@pytest.mark.parametrize("counter", sorted(COUNTERS))
def test_the_counters_of_all_workers(counter: str, engines: str) -> None:
    """What the workers of one engine do together counts once; bytes, and blank runs, count each."""
    seen = [worker(engine, {}, **{counter: number}) for engine, number in zip(engines, (4, 3), strict=True)]
    together = engines == "00" and counter not in {"blank_runs", "gpu_load_bytes", "host_load_bytes"}
    assert told_of(seen)[f"lora_fs_{counter}_total"] == (4 if together else 7)


def test_requests_are_told_by_the_names_that_clients_know() -> None:
    """Static names stay. Of vLLM's series of all sets that it ever saw in use the latest is there."""
    registry, old, new = CollectorRegistry(), f"@{'0a' * 6}", f"@{'0b' * 6}"
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    gauge = Gauge("vllm:lora_requests_info", "Running stats", labels, registry=registry)
    Gauge("vllm:other", f"sql{old}", registry=registry).set(7)
    for running, waiting, at in [
        (f"sql{old}", "", 3.5),
        (f"sql{old},sql{new},a/law@v2{new}", f"kept{old}", 9.25),
        (f"sql{new}", "", 5.0),
        ("", "", 1.0),
    ]:
        gauge.labels("2", running, waiting).set(at)
    exposed = public(generate_latest(registry), {f"kept{old}"}).decode()
    families = {one.name: one for one in text_string_to_metric_families(exposed)}
    told = [(tuple(one.labels.values()), one.value) for one in families["vllm:lora_requests_info"].samples]
    assert told == [(("2", "sql,a/law@v2", f"kept{old}"), 9.25)]
    assert families["vllm:other"].documentation == f"sql{old}"
