"""One scrape with the engine's series and ours: each family once, adapters by the names that clients know."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lora_fs.sidecar.server.routes.engine_series import merged

RUNNING = "a@0123456789ab,b@v2@0123456789ab"
VLLM = f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny"}} 2.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{RUNNING}",waiting_lora_adapters=""}} 1.7e+09
# HELP vllm:time_to_first_token_seconds Time to first token.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} 1.0
vllm:time_to_first_token_seconds_count 1.0
vllm:time_to_first_token_seconds_sum 0.5
# HELP process_cpu_seconds_total Total user and system CPU time spent in seconds.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 99.0
# EOF
"""


def ours() -> str:
    registry = CollectorRegistry()
    Gauge("lora_fs_ready", "Serves", registry=registry).set(1)
    Counter("lora_fs_loads", "Loads", registry=registry).inc()
    ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


def values(text: str) -> dict[str, float]:
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_both_sets_are_there_and_each_family_once() -> None:
    """The engine's series stand beside ours; what both have is ours."""
    text = merged(ours(), VLLM)
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    found = values(text)
    assert found["vllm:num_requests_running[('engine', '0'), ('model_name', 'tiny')]"] == 2
    assert found["vllm:time_to_first_token_seconds_sum[]"] == 0.5
    assert found["lora_fs_ready[]"] == found["lora_fs_engine_metrics[]"] == 1
    assert found["process_cpu_seconds_total[]"] != 99
    assert "# EOF" not in text


def test_adapters_have_the_names_that_clients_know() -> None:
    """vLLM's list of adapters tells public names: a router compares them with a request's model."""
    (line,) = [one for one in merged(ours(), VLLM).splitlines() if one.startswith("vllm:lora_requests_info")]
    assert 'running_lora_adapters="a,b@v2",waiting_lora_adapters=""' in line
    assert line.endswith("1.7e+09")


def test_of_the_gauge_of_adapters_the_latest_series_is_there() -> None:
    """vLLM keeps one for each set of adapters it ever saw; after a reload two would have the same labels."""
    series = (
        'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="a@{}",waiting_lora_adapters=""}} {}'
    )
    gauge = [series.format(f"{at:012x}", at) for at in (7, 2000, 30)]
    text = merged(ours(), "\n".join(["# TYPE vllm:lora_requests_info gauge", *gauge, "vllm:up 1"]))
    assert [line for line in text.splitlines() if line.startswith("vllm:")] == [
        series.format("", 2000).replace("a@", "a"),
        "vllm:up 1",
    ]


def test_a_series_that_cannot_be_read_costs_no_other() -> None:
    """The gauge of adapters keeps the latest one that can be read."""
    gauge = [f'vllm:lora_requests_info{{running_lora_adapters="{name}"}}' for name in "abc"]
    text = merged(ours(), f"{gauge[0]} 7.0\n{gauge[1]} torn\n{gauge[2]} 9.0\n")
    assert [line for line in text.splitlines() if line.startswith("vllm:")] == [f"{gauge[2]} 9.0"]


def test_without_an_engine_ours_are_alone_and_a_gauge_says_so() -> None:
    """An engine that does not answer costs no series of ours."""
    text = merged(ours(), None)
    assert "lora_fs_engine_metrics 0.0\n" in text
    assert "vllm:" not in text
    assert values(text)["lora_fs_loads_total[]"] == 1


@given(st.text(string.printable, max_size=300))
def test_whatever_an_engine_says_ours_stay_readable(theirs: str) -> None:
    """Lines that are no series of a new name change nothing of ours."""
    before = ours()
    assert merged(before, theirs).startswith(before)


@given(st.sampled_from(["gauge", "counter", "histogram", "summary"]), st.integers(1, 5))
def test_every_family_of_an_engine_passes_whole(kind: str, count: int) -> None:
    """Families that we lack pass with all their samples."""
    registry = CollectorRegistry()
    for number in range(count):
        if kind == "gauge":
            Gauge(f"vllm:g{number}", "g", registry=registry).set(number)
        elif kind == "counter":
            Counter(f"vllm:c{number}", "c", registry=registry).inc()
        else:
            Histogram(f"vllm:h{number}", "h", registry=registry).observe(number)
    theirs = generate_latest(registry).decode()
    assert values(theirs).items() <= values(merged(ours(), theirs)).items()


@pytest.mark.parametrize("name", ["lora_fs_loads", "lora_fs_loads_total", "lora_fs_loads_created"])
def test_a_family_of_ours_is_never_the_engines(name: str) -> None:
    """An engine cannot write a series of ours."""
    text = merged(ours(), f"# TYPE {name} gauge\n{name} 0.98765\n")
    assert "0.98765" not in text
