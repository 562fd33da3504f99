"""The worker's tiers as series: of what is resident now, each told once."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lora_fs.worker_patch.api.metrics import COUNTERS, Tiers


def resident(name: str, level: str = "cpu", rank: int = 8) -> dict[str, Any]:
    return {"name": name, "level": level, "pinned": False, "rank": rank}


def samples(residents: dict[str, dict[str, Any]], **counters: float) -> list[Sample]:
    """What Prometheus reads."""
    seen = {"resident": residents, "slots": 2, "budget_bytes": 9, "used_bytes": 5, "counters": counters}
    registry = CollectorRegistry()
    registry.register(Tiers(lambda: seen))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [sample for family in families for sample in family.samples]


def scrape(residents: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """The labels of every resident adapter's series."""
    return [sample.labels for sample in samples(residents) if sample.name == "vllm:lora_adapter_loaded"]


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
