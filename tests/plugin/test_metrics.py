"""The worker's tiers as series: of what is resident now, each told once."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lora_fs.worker_patch.api.metrics import Tiers


def resident(name: str, level: str = "cpu", rank: int = 8) -> dict[str, Any]:
    return {"name": name, "level": level, "pinned": False, "rank": rank}


def scrape(residents: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """The labels of every resident adapter's series, by the text that Prometheus reads."""
    seen = {"resident": residents, "slots": 2, "budget_bytes": 1, "used_bytes": 0, "counters": {}}
    registry = CollectorRegistry()
    registry.register(Tiers(lambda: seen))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return [sample.labels for sample in samples if sample.name == "vllm:lora_adapter_loaded"]


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
