"""The dashboard, the alerts and what scales: PromQL that parses, about series and labels that are served."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric

from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.reconcile.catalog import Served, Trial
from lora_fs.sidecar.server.routes.observe import Revisions, Scrape
from lora_fs.worker_patch.api.metrics import Tiers
from tests.deploy.test_kubernetes import VERSIONS
from tests.reconcile.test_plan import RECORD
from tests.server.conftest import FakeReplica

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/observability"
GRAFANA: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
SCALED: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((FOLDER / name).read_text()) for name in ("keda.yaml", "keda-zero.yaml")
}
ADAPTER: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())
SCRAPE: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
ADDED = {one.get("target_label") for one in SCRAPE["scrape_configs"][0]["relabel_configs"]} - {None}
FROM_PROMETHEUS = {"instance", "job", "le", "__name__"} | ADDED
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
LEGEND = re.compile(r"\{\{ *\$?(?:labels\.)?(\w+) *\}\}")
VARIABLES = {"$__rate_interval": "5m", "$job": ".+", "$instance": ".+", "${datasource}": "p"}


def families() -> Iterator[Metric]:
    """Every family that a sidecar, the plugin or the gateway serves, with a series of each."""
    trials = {"a": Trial(Served("a@v1", RECORD), 20)}
    replica = FakeReplica(("a", "b"), phases={"b": Phase.FAILED}, ready=False, trials=trials)
    yield from Scrape(replica).collect()
    seen = {
        "engine": "0",
        "resident": {"1": {"name": "a", "level": "gpu", "pinned": False, "rank": 8}},
        "slots": 2,
        "budget_bytes": 1,
        "used_bytes": 0,
        "counters": {},
    }
    yield from Tiers(lambda: [seen]).collect()
    yield from Revisions(replica).collect()
    router = Router(time.monotonic)
    router.report("r0", [], None, 0.0)
    yield from Metrics(router, Watch(router, Given(()), time.monotonic, headers={})).registry.collect()


def served() -> dict[str, set[str]]:
    """Name → labels of every series that can be asked for."""
    found: dict[str, set[str]] = {name: set() for name in PROCESS}
    for family in families():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SERVED = served()


def grafana_expressions() -> Iterator[tuple[str, str]]:
    """Title and expression of every panel's query."""
    for panel in GRAFANA["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


QUERIES = [
    (name, trigger["metadata"]["query"])
    for name, scaled in SCALED.items()
    for trigger in scaled["spec"]["triggers"]
]
EXPRESSIONS = [
    *grafana_expressions(),
    *((rule["alert"], rule["expr"]) for rule in RULES),
    *QUERIES,
    ("prometheus-adapter.yaml", ADAPTER["rules"]["custom"][0]["seriesQuery"]),
]


def selectors(expression: object) -> Iterator[promql_parser.VectorSelector]:
    """Every selector of series in a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(expression, name, None)
        if isinstance(inner, promql_parser.Expr):
            yield from selectors(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from selectors(argument)


def test_selectors_are_found() -> None:
    """In calls, aggregations, ranges, subqueries and on both sides of an operator."""
    text = 'sum by (x) (rate(a{l="1"}[5m])) / (b offset 5m) or max_over_time(c[1h:5m]) > topk(3, d)'
    assert [one.name for one in selectors(promql_parser.parse(text))] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_what_is_asked_for_is_served(title: str, expression: str) -> None:
    """It parses, and each series that it names is served with the labels that it names."""
    found = list(selectors(promql_parser.parse(expression)))
    assert found
    for one in found:
        assert one.name in SERVED, one.name
        named = {matcher.name for matcher in one.matchers.matchers}
        assert named <= SERVED[one.name] | FROM_PROMETHEUS, (one.name, named)


def test_a_label_of_the_scrape_is_no_series_own() -> None:
    """Prometheus would rename the series' own, and a query by it would ask for something else."""
    assert {"namespace", "pod"} == ADDED
    assert not [name for name, labels in SERVED.items() if labels & ADDED]


@pytest.mark.parametrize("scaled", SCALED.values(), ids=SCALED)
def test_keda_takes_it(scaled: dict[str, Any]) -> None:
    """Its fields are those of KEDA's CRD that a scale by Prometheus needs; the autoscaler gets the others.

    ``cooldownPeriod`` delays the last step to zero alone; above it the autoscaler's own window counts.
    Source: kedacore/keda, config/crd/bases/keda.sh_scaledobjects.yaml.
    """
    spec = dict(scaled["spec"])
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    target, triggers = spec.pop("scaleTargetRef"), spec.pop("triggers")
    least, most = spec.pop("minReplicaCount"), spec.pop("maxReplicaCount")
    assert ("cooldownPeriod" in spec) is (least == 0)
    spec.pop("cooldownPeriod", None)
    behavior = spec.pop("advanced", {"horizontalPodAutoscalerConfig": {}})["horizontalPodAutoscalerConfig"]
    assert not spec
    for trigger in triggers:
        assert (trigger.keys(), trigger["type"]) == ({"type", "metadata"}, "prometheus")
        asked = trigger["metadata"]
        assert {"serverAddress", "query", "threshold"} <= asked.keys()
        assert asked.keys() <= {"serverAddress", "query", "threshold", "activationThreshold"}
        assert all(isinstance(value, str) for value in asked.values()), "KEDA takes texts alone"
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **target},
            "minReplicas": max(1, least),
            "maxReplicas": most,
            **behavior,
        },
    }
    kubernetes_validate.validate(autoscaler, VERSIONS[-1], strict=True)


def test_every_count_of_a_revision_has_a_panel() -> None:
    """The dashboard draws each series by revision: requests, errors, loads, the share of a canary."""
    families = {family.name for family in Revisions(FakeReplica(("a",))).collect()}
    assert {"lora_fs_revision_requests", "lora_fs_revision_errors", "lora_fs_canary_percent"} <= families
    drawn = [
        one.name or ""
        for _, expression in grafana_expressions()
        for one in selectors(promql_parser.parse(expression))
    ]
    assert {one for one in families if not any(name.startswith(one) for name in drawn)} == set()


@pytest.mark.parametrize("panel", GRAFANA["panels"], ids=lambda panel: panel["title"])
def test_legends_name_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    """A label that an aggregation drops is an empty legend."""
    for target in panel["targets"]:
        kept = {
            word
            for group in re.findall(r"by \(([^)]*)\)", target["expr"])
            for word in re.split(r",\s*", group)
        }
        assert set(LEGEND.findall(target["legendFormat"])) <= (kept or FROM_PROMETHEUS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_what_to_do(rule: dict[str, Any]) -> None:
    """Each has a severity and a summary; pages that it names are there."""
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    for page in re.findall(r"docs/[\w/.-]+\.md", rule["annotations"].get("description", "")):
        assert (ROOT / page).exists()


def calls(expression: object) -> Iterator[promql_parser.Call]:
    """Every call of a function in a parsed expression."""
    if isinstance(expression, promql_parser.Call):
        yield expression
    for name in ("expr", "lhs", "rhs", "param"):
        inner = getattr(expression, name, None)
        if isinstance(inner, promql_parser.Expr):
            yield from calls(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from calls(argument)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_a_quantile_is_of_one_histogram(title: str, expression: str) -> None:
    """The sum of two histograms' buckets counts each load twice: it is no distribution of any time."""
    for call in calls(promql_parser.parse(expression)):
        if call.func.name == "histogram_quantile":
            assert len({one.name for one in selectors(call)}) == 1, expression


def test_slow_loads_say_which_step() -> None:
    """One alert for the copy and one for the engine's load, each with what the summary calls it."""
    (rule,) = (one for one in RULES if one["alert"] == "LoraFsSlowLoads")
    made = [one for one in calls(promql_parser.parse(rule["expr"])) if one.func.name == "label_replace"]
    steps = {next(selectors(one)).name: [argument.val for argument in one.args[1:3]] for one in made}
    assert steps == {
        "lora_fs_stage_seconds_bucket": ["step", "copy"],
        "lora_fs_load_seconds_bucket": ["step", "load"],
    }
    assert "one {{ $labels.step }} in ten takes more than 10 s" in rule["annotations"]["summary"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_summary_names_labels_that_the_rule_keeps(rule: dict[str, Any]) -> None:
    """A label that the expression drops is empty in the message."""
    grouped = re.findall(r"by \(([^)]*)\)", rule["expr"])
    kept = {word for group in grouped for word in re.split(r",\s*", group)}
    parsed = promql_parser.parse(rule["expr"])
    kept |= {one.args[1].val for one in calls(parsed) if one.func.name == "label_replace"}
    series = {label for one in selectors(parsed) for label in SERVED[one.name or ""]}
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert named <= (kept if grouped else series | FROM_PROMETHEUS)


def test_panels_do_not_overlap() -> None:
    """Each has its own place on the grid of 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in GRAFANA["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells
        taken |= cells


def test_every_timed_work_is_a_histogram() -> None:
    """Quantiles over replicas are made of buckets."""
    kinds = {family.name for family in families() if isinstance(family, HistogramMetricFamily)}
    assert "lora_fs_load_seconds" in kinds
    assert any(isinstance(family, InfoMetricFamily) for family in families())
