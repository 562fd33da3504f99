"""A scrape of one API server has what all of them counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.parser import text_string_to_metric_families

from lora_fs.worker_patch.api.shared_series import SharedSeries

pytestmark = pytest.mark.anyio


@dataclass
class Server:
    """One server's series: counts, times, a gauge, and the workers' loads as it last saw them."""

    own: CollectorRegistry = field(default_factory=CollectorRegistry)
    workers: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.requests = Counter("requests", "", ["adapter"], registry=self.own)
        self.took = Histogram("took", "", buckets=(1, 2), registry=self.own)
        self.ready = Gauge("ready", "", registry=self.own)
        self.seen = Counter("host_loads", "", registry=self.workers)

    def series(self) -> tuple[list[Metric], list[Metric]]:
        return list(self.own.collect()), list(self.workers.collect())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[tuple[Server, SharedSeries], tuple[Server, SharedSeries]]:
    """Two servers of one vLLM."""
    one, other = Server(), Server()
    return (one, SharedSeries(tmp_path, 0, 2, one.series)), (
        other,
        SharedSeries(tmp_path, 1, 2, other.series),
    )


async def scraped(shared: SharedSeries) -> dict[str, float]:
    """What Prometheus reads; no family is there twice."""
    families = [*text_string_to_metric_families((await shared.exposed()).decode())]
    assert len({one.name for one in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    told = {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }
    assert len(told) == len([sample for sample in samples if not sample.name.endswith("_created")])
    return told


Pair = tuple[tuple[Server, SharedSeries], tuple[Server, SharedSeries]]


async def test_alone_so_far(pair: Pair) -> None:
    """The first server that a scrape reaches tells its own; the other has written nothing yet."""
    (one, shared), _ = pair
    one.requests.labels("a").inc(3)
    one.ready.set(1)
    told = await scraped(shared)
    assert (told["requests_total/a"], told["ready"], told["host_loads_total"]) == (3, 1, 0)


async def test_counts_are_of_all(pair: Pair) -> None:
    """Counts are summed, by label too. The workers' largest count stands, and the server's own gauges."""
    (one, first), (other, second) = pair
    one.requests.labels("a").inc(3)
    other.requests.labels("a").inc(4)
    other.requests.labels("b").inc(5)
    one.took.observe(0.5)
    other.took.observe(1.5)
    one.ready.set(1)
    one.seen.inc(7)
    other.seen.inc(9)
    await second.exposed()
    told = await scraped(first)
    assert (told["requests_total/a"], told["requests_total/b"]) == (7, 5)
    assert [told[f"took_{of}"] for of in ("bucket/1.0", "bucket/2.0", "count", "sum")] == [1, 2, 2, 2]
    assert (told["ready"], told["host_loads_total"]) == (1, 9)
    assert {**await scraped(second), "ready": 1} == told


async def test_gauges_of_what_one_server_knows(pair: Pair) -> None:
    """An autoscaler gets the requests of all, and an alert the trouble of any, whichever server answers."""
    for number, (server, _) in enumerate(pair):
        at = {"adapter_name": "a"}
        gauges: dict[str, tuple[dict[str, str], int]] = {
            "lora_fs_ready": ({}, number),
            "lora_fs_adapter_in_flight": (at, 3 + number),
            "lora_fs_adapter_loaded": (at, number),
            f"lora_fs_{number}": ({}, 1),
        }
        for name, (labels, value) in gauges.items():
            gauge = Gauge(name, "", labels, registry=server.own)
            (gauge.labels(**labels) if labels else gauge).set(value)
        Gauge("lora_fs_adapter_failed", "", ["reason"], registry=server.own).labels(f"r{number}").set(1)
    for number, (_, shared) in enumerate(pair):
        await pair[1 - number][1].exposed()
        told = await scraped(shared)
        assert {name: value for name, value in told.items() if name.startswith("lora_fs_")} == {
            "lora_fs_ready": 0,
            "lora_fs_adapter_in_flight/a": 7,
            "lora_fs_adapter_loaded/a": 1,
            "lora_fs_adapter_failed/r0": 1,
            "lora_fs_adapter_failed/r1": 1,
            f"lora_fs_{number}": 1,
        }


async def test_no_count_falls(pair: Pair) -> None:
    """Scrapes that reach the servers in turns never see fewer: Prometheus would take that for a restart."""
    before = 0.0
    for number in range(8):
        server, shared = pair[number % 2]
        server.requests.labels("a").inc()
        now = (await scraped(shared))["requests_total/a"]
        assert now == before + 1
        before = now


async def test_a_server_that_no_scrape_reaches_tells(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes by itself: Prometheus keeps its connection, so to one server."""
    monkeypatch.setattr("lora_fs.worker_patch.api.shared_series.WRITE_S", 0.01)
    (_, first), (other, second) = pair
    other.requests.labels("a").inc(4)
    async with second.running():
        await told_by(first, lambda told: told.get("requests_total/a") == 4)
        other.requests.labels("a").inc()
        await told_by(first, lambda told: told.get("requests_total/a") == 5)


async def told_by(shared: SharedSeries, holds: Callable[[dict[str, float]], bool]) -> None:
    """Scrape until it holds."""
    with anyio.fail_after(60):
        while not holds(await scraped(shared)):
            pass


async def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    """The server that is asked tells its own."""
    one = Server()
    one.requests.labels("a").inc()
    assert (await scraped(SharedSeries(tmp_path / "gone", 0, 2, one.series)))["requests_total/a"] == 1
