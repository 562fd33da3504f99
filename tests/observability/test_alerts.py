"""Each alert fires in the situation that its text names, and in no other, over the real series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import GaugeMetricFamily, Metric

from lora_fs.sidecar.gateway.choice import Reason
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.model import AdapterStatus, Phase
from lora_fs.sidecar.reconcile.residents.engine_state import COUNTERS
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.server.ports import Readiness
from lora_fs.sidecar.server.routes.observe import Scrape
from lora_fs.worker_patch.api.metrics import Tiers
from tests.observability.promql import Prometheus, Rule
from tests.server.conftest import FakeReplica

ALERTS = Path(__file__).parents[2] / "examples/observability/alerts.yaml"
EVERY_S = 30.0
START_S = 1_000_000.0
KINDS = ("pass", "stage", "load", "unload")


@dataclass
class Pod(FakeReplica):
    """A replica of which a test says what it observed."""

    troubles: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    took: dict[str, Durations] = field(
        default_factory=lambda: {f"{kind}_seconds": Durations() for kind in KINDS}
    )
    blank_runs: int | None = None
    host_evictions: int = 0
    began: float = START_S
    passes: bool = True

    def readiness(self) -> Readiness:
        return Readiness(self.ready, self.troubles)

    def status(self, name: str) -> AdapterStatus:
        return super().status(name).model_copy(update={"reason": self.reasons.get(name, "")})

    def counters(self) -> Mapping[str, float]:
        return self.counted

    def durations(self) -> Mapping[str, Durations]:
        return self.took

    def scraped(self) -> Iterator[Metric]:
        """What a scrape gives."""
        if self.passes:
            self.took["pass_seconds"].add(0.01)
        yield from Scrape(self).collect()
        if self.blank_runs is not None:
            sizes = {"slots": 2, "budget_bytes": 1, "used_bytes": 0, "resident": {}}
            counters = {"blank_runs": self.blank_runs, "cpu_evictions": self.host_evictions}
            seen = {"engine": "0", "counters": counters, **sizes}
            yield from Tiers(lambda: [seen]).collect()
        yield GaugeMetricFamily("process_start_time_seconds", "Start", value=self.began)


class Watched:
    """A fleet that a Prometheus scrapes every 30 s; ``fired`` has each alert that fired since ``clear``."""

    def __init__(self) -> None:
        rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
        self._rules = {rule["alert"]: Rule(rule) for rule in rules}
        self._prometheus = Prometheus()
        self._scraped: set[str] = set()
        self.targets: dict[str, Callable[[], Iterable[Metric]]] = {}
        self.at = START_S
        self.fired: dict[str, list[dict[str, str]]] = {}

    def pod(self, name: str, **observed: Any) -> Pod:
        """Start a replica."""
        pod = Pod(began=self.at, **observed)
        self.targets[name] = pod.scraped
        return pod

    def during(self, minutes: float, each: Callable[[], object] = lambda: None) -> set[str]:
        """Let time pass. Return the names of all alerts that fired at any moment of it.

        Args:
            each: happens before every scrape.
        """
        self.fired = {}
        for _ in range(int(minutes * 60 / EVERY_S)):
            self.at += EVERY_S
            each()
            for name in self.targets.keys() | self._scraped:
                self._prometheus.scrape(self.at, name, self.targets[name]() if name in self.targets else ())
            self._scraped = set(self.targets)
            for name, rule in self._rules.items():
                if firing := rule.firing(self._prometheus, self.at):
                    self.fired[name] = firing
        return set(self.fired)


@pytest.fixture
def watched() -> Watched:
    return Watched()


NO_ENGINE = ("EngineUnavailable: connection refused",)
STARTING: dict[str, Any] = {"ready": False, "troubles": NO_ENGINE}


def serve(pod: Pod) -> None:
    pod.ready, pod.troubles = True, ()


def test_a_quiet_fleet(watched: Watched) -> None:
    """Nothing fires, neither at first sight nor later; an empty registry is no trouble."""
    watched.pod("a")
    watched.pod("b", names=())
    assert watched.during(60) == set()


def test_a_model_that_takes_long_to_load(watched: Watched) -> None:
    """vLLM may take the 20 minutes of its startupProbe: until then a new replica is no trouble."""
    watched.pod("a")
    starting = watched.pod("b", **STARTING)
    assert watched.during(15) == set()
    serve(starting)
    assert watched.during(30) == set()


def test_an_engine_that_never_comes(watched: Watched) -> None:
    """The alert fires once the time for a start is over."""
    watched.pod("b", **STARTING)
    assert watched.during(25) == {"LoraFsReplicaNotReady"}


def test_an_engine_that_dies(watched: Watched) -> None:
    """The alert fires after two minutes, since the sidecar ran for long."""
    pod = watched.pod("a")
    watched.during(30)
    pod.ready, pod.troubles = False, NO_ENGINE
    assert watched.during(3) == {"LoraFsReplicaNotReady"}
    assert watched.fired["LoraFsReplicaNotReady"][0]["instance"] == "a"


def test_a_volume_that_is_no_registry(watched: Watched) -> None:
    """For a new replica that waits for a volume, and not for its engine, the alert fires at once."""
    watched.pod("a", ready=False, troubles=("RegistryMissing: there is no lora-fs.json",))
    assert watched.during(5) == {"LoraFsReplicaNotReady"}


def test_a_rollout(watched: Watched) -> None:
    """One pod at a time, one more than there are to be; each loads its model for 8 minutes."""
    watched.pod("a1")
    watched.pod("b1")
    watched.during(60)
    for old, new in (("a1", "a2"), ("b1", "b2")):
        pod = watched.pod(new, **STARTING)
        assert watched.during(8) == set()
        serve(pod)
        assert watched.during(2) == set()
        del watched.targets[old]
    assert watched.during(60) == set()


def test_a_replica_that_is_gone(watched: Watched) -> None:
    """Its series vanish, and the others go on."""
    watched.pod("a")
    watched.pod("b")
    watched.during(30)
    del watched.targets["b"]
    assert watched.during(10) == {"LoraFsReplicaGone"}


def test_a_fleet_that_is_gone(watched: Watched) -> None:
    """The alert fires for as long as nothing is scraped."""
    watched.pod("a")
    watched.during(30)
    watched.targets.clear()
    assert watched.during(10) == {"LoraFsReplicaGone"}
    assert watched.during(120) == {"LoraFsReplicaGone"}


def test_a_fleet_at_zero(watched: Watched) -> None:
    """KEDA ends the last replica since nobody asks its gateway: that is no trouble until somebody does."""
    router = Router(lambda: 0.0)
    watched.targets["gateway"] = Metrics(
        router, Watch(router, Given(()), lambda: 0.0, headers={})
    ).registry.collect
    watched.pod("a")
    watched.during(30)
    del watched.targets["a"]
    assert watched.during(90) == set()
    assert watched.during(15, lambda: router.chosen.update([Reason.NONE])) == {"LoraFsReplicaGone"}


@pytest.mark.parametrize("kind", ["VolumeUnavailable", "VolumeStalled", "Frozen"])
def test_a_volume(watched: Watched, kind: str) -> None:
    """The alert names each condition."""
    watched.pod("a", troubles=(f"{kind}: it does not answer",))
    assert watched.during(2) == {"LoraFsVolume"}
    assert watched.fired["LoraFsVolume"][0]["type"] == kind


def test_a_status_that_is_not_written(watched: Watched) -> None:
    """After five minutes."""
    watched.pod("a", troubles=("StatusNotWritten: it is read-only",))
    assert watched.during(4) == set()
    assert watched.during(3) == {"LoraFsStatusNotWritten"}


def failing(*names: str) -> dict[str, Any]:
    return {
        "names": names,
        "phases": dict.fromkeys(names, Phase.FAILED),
        "reasons": dict.fromkeys(names, "InvalidAdapter"),
    }


def retried(pod: Pod, count: int = 1) -> Callable[[], None]:
    """Let each of ``count`` adapters be tried again every 5 minutes, the longest delay of all."""
    ticks = [0]

    def tick() -> None:
        ticks[0] += 1
        if ticks[0] % 10 == 0:
            pod.counted["load_failures_total"] += count

    return tick


def test_one_adapter_that_fails(watched: Watched) -> None:
    """A bad adapter that is retried for hours is a warning with its name, and pages nobody."""
    pod = watched.pod("a", **failing("broken"))
    assert watched.during(60, retried(pod)) == {"LoraFsAdapterFails"}
    (alert,) = watched.fired["LoraFsAdapterFails"]
    assert alert == {"adapter_name": "broken", "reason": "InvalidAdapter"}


def test_an_adapter_that_nobody_asks_for_any_more(watched: Watched) -> None:
    """A lazy adapter whose last load failed stays so until its next request: then it may well succeed."""
    pod = watched.pod("a")
    watched.during(30)
    pod.names, pod.phases = ("lazy",), {"lazy": Phase.FAILED}
    pod.reasons = {"lazy": "EngineUnavailable"}
    pod.counted["load_failures_total"] += 1
    watched.during(20)
    assert watched.during(120) == set()


def test_a_name_that_the_engine_has(watched: Watched) -> None:
    """The alert fires although no load is tried."""
    pod = watched.pod("a", **failing("tiny"))
    pod.reasons = {"tiny": "NameConflict"}
    assert watched.during(30) == {"LoraFsAdapterFails"}


def test_most_loads_fail(watched: Watched) -> None:
    """Of many adapters, as when the stage folder's disk is full."""
    pod = watched.pod("a", **failing("x", "y", "z"))

    def each() -> None:
        pod.counted["loads_total"] += 2
        pod.counted["load_failures_total"] += 1

    assert watched.during(30, each) == {"LoraFsAdapterFails", "LoraFsManyLoadsFail"}


def test_few_loads_fail(watched: Watched) -> None:
    """Three adapters that fail among many that load are three warnings."""
    pod = watched.pod("a", **failing("x", "y", "z"))
    tick = retried(pod, 3)

    def each() -> None:
        pod.counted["loads_total"] += 2
        tick()

    assert watched.during(60, each) == {"LoraFsAdapterFails"}


def test_thrashing(watched: Watched) -> None:
    """Misses with unloads are; misses alone, as after a start, are not."""
    pod = watched.pod("a")

    def asked() -> None:
        pod.counted["request_hits_total"] += 30
        pod.counted["request_misses_total"] += 10

    assert watched.during(60, asked) == set()

    def evicting() -> None:
        asked()
        pod.counted["unloads_total"] += 10

    assert watched.during(60, evicting) == {"LoraFsThrashing"}
    assert watched.fired["LoraFsThrashing"] == [{"instance": "a"}]


def test_thrashing_in_the_workers_memory(watched: Watched) -> None:
    """With the plugin the worker evicts by itself, and the replica unloads nothing."""
    pod = watched.pod("a", blank_runs=0)

    def evicting() -> None:
        pod.counted["request_hits_total"] += 30
        pod.counted["request_misses_total"] += 10
        pod.host_evictions += 10

    assert watched.during(60, evicting) == {"LoraFsThrashing"}


@pytest.mark.parametrize(("series", "step"), [("stage_seconds", "copy"), ("load_seconds", "load")])
def test_slow_loads(watched: Watched, series: str, step: str) -> None:
    """The step that is slow is named."""
    pod = watched.pod("a")
    other = "load_seconds" if step == "copy" else "stage_seconds"

    def each() -> None:
        pod.took[series].add(25.0)
        pod.took[other].add(1.0)

    assert watched.during(40, each) == {"LoraFsSlowLoads"}
    assert watched.fired["LoraFsSlowLoads"] == [{"instance": "a", "step": step}]


def test_a_loop_that_stands(watched: Watched) -> None:
    """The alert fires for its replica alone."""
    pod = watched.pod("a")
    watched.pod("b")
    watched.during(10)
    pod.passes = False
    assert watched.during(15) == {"LoraFsLoopStands"}
    assert [one["instance"] for one in watched.fired["LoraFsLoopStands"]] == ["a"]


def test_blank_runs(watched: Watched) -> None:
    """At once, and over ten minutes after the last one."""
    pod = watched.pod("a", blank_runs=0)
    assert watched.during(10) == set()
    pod.blank_runs = 1
    assert watched.during(1) == {"LoraFsBlankRuns"}
    watched.during(12)
    assert watched.during(10) == set()


def test_blank_runs_before_the_first_scrape(watched: Watched) -> None:
    """A counter that is there with 1 did not rise, as Prometheus sees it."""
    watched.pod("a", blank_runs=1)
    assert watched.during(5) == {"LoraFsBlankRuns"}
    watched.during(10)
    assert watched.during(30) == set()


def test_a_restart(watched: Watched) -> None:
    """Counters begin again at 0: nothing rose, and nothing fell."""
    pod = watched.pod("a", blank_runs=7)
    pod.counted.update(loads_total=500.0, load_failures_total=90.0, unloads_total=400.0)
    watched.during(30)
    watched.pod("a", blank_runs=0)
    assert watched.during(60) == set()
