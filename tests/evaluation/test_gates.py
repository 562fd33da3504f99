"""The grammar of gates: what is read, what is refused and where, and what meets one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.model.gates import FIGURES, BadGate, parse

NOW = {"pass_rate": 0.92, "regressions": 2.0, "ttft_p99_ms": 115.0, "errors": 0.0}
BEFORE = {"pass_rate": 0.95, "ttft_p99_ms": 100.0}
OPS = (">=", "<=", "==", ">", "<")


@pytest.mark.parametrize(
    "gate",
    [
        "pass_rate>=0.9 and regressions<=2 and ttft_p99_ms<=1.2*baseline",
        "pass_rate >= baseline - 0.05",
        "pass_rate >= baseline*0.9",
        "ttft_p99_ms < baseline + 20, errors == 0",
        "pass_rate>.9",
        "pass_rate>9e-1",
        "errors >= -1",
    ],
)
def test_met(gate: str) -> None:
    """A gate whose conditions all hold is passed; `and` or a comma joins them."""
    assert parse(gate).unmet(NOW, BEFORE) == ()


@pytest.mark.parametrize(
    ("gate", "why"),
    [
        ("pass_rate>=0.93", "pass_rate>=0.93: pass_rate is 0.92, the bound is 0.93"),
        ("ttft_p99_ms<=1.1*baseline", "ttft_p99_ms<=1.1*baseline: ttft_p99_ms is 115, the bound is 110"),
        ("errors>0", "errors>0: errors is 0, the bound is 0"),
        ("score>=0", "score>=0: score is not known"),
        ("errors<=baseline", "errors<=baseline: the baseline's errors is not known"),
    ],
)
def test_unmet(gate: str, why: str) -> None:
    """A gate that is not passed names each condition, its figure and its bound. The unknown meets none."""
    assert parse(f"pass_rate>0 and {gate}").unmet(NOW, BEFORE) == (why,)
    assert parse("score>=0 and errors>0").unmet(NOW, BEFORE) == (
        "score>=0: score is not known",
        "errors>0: errors is 0, the bound is 0",
    )


@pytest.mark.parametrize("cases", [50, 100, 200, 500])
def test_a_tie_is_equal(cases: int) -> None:
    """A figure that equals its bound is equal to it, however the two were rounded; one case more is not."""
    step = cases // 50
    for passed in range(step, cases - step):
        before = {"pass_rate": passed / cases, "error_rate": passed / cases}
        for sign, text in ((1, "+"), (-1, "-")):
            now = dict.fromkeys(before, (passed + sign * step) / cases)
            above = dict.fromkeys(before, (passed + sign * step + 1) / cases)
            below = dict.fromkeys(before, (passed + sign * step - 1) / cases)
            bound = f"baseline{text}0.02"
            gates = {op: parse(f"pass_rate{op}{bound} and error_rate{op}{bound}") for op in OPS}
            assert [op for op in OPS if not gates[op].unmet(now, before)] == [">=", "<=", "=="]
            assert [op for op in OPS if not gates[op].unmet(above, before)] == [">=", ">"]
            assert [op for op in OPS if not gates[op].unmet(below, before)] == ["<=", "<"]


def test_small_and_large_figures_are_no_ties() -> None:
    """Only rounding is passed over: a small chance is not 0, and an infinite time is no number's equal."""
    for gate, figure, value, before in (
        ("p_worse==0", "p_worse", 1e-15, 0.0),
        ("p_worse<=1e-15", "p_worse", 1.1e-15, 0.0),
        ("ttft_p99_ms<=5", "ttft_p99_ms", float("inf"), 0.0),
        ("ttft_p99_ms<=baseline", "ttft_p99_ms", float("inf"), 1.0),
        ("live_requests>=1000000", "live_requests", 999_999.0, 0.0),
    ):
        assert parse(gate).unmet({figure: value}, {figure: before}), gate


def test_not_a_number() -> None:
    """A figure that is no number meets no condition."""
    assert parse("score<=1").unmet({"score": float("nan")}, {})


@pytest.mark.parametrize(
    ("gate", "column", "why"),
    [
        ("", 1, "expected a figure"),
        ("pas_rate>=0.9", 1, "did you mean pass_rate?"),
        ("speed>=0.9", 1, "one of pass_rate"),
        ("pass_rate", 10, "expected one of >= <= == > <"),
        ("pass_rate=0.9", 10, "expected one of"),
        ("pass_rate>=", 12, "expected a number or 'baseline'"),
        ("pass_rate>=high", 12, "expected a number or 'baseline'"),
        ("pass_rate>=0.9 or errors<=0", 16, "expected 'and'"),
        ("pass_rate>=0.9 errors<=0", 16, "expected 'and'"),
        ("pass_rate>=0.9 and", 19, "expected a figure"),
        ("regressions<=2*baseline", 16, "regressions has no baseline"),
        ("pass_rate>=1.1*score", 16, "expected 'baseline'"),
        ("pass_rate>=90%", 14, "expected 'and'"),
        ("pass_rate>=(0.9)", 12, "expected a number"),
        ("pass_rate>=0.9; errors<=0", 15, "no meaning"),
        ("pass_rate>=1e999", 12, "too large"),
        ("pass_rate>=0.9 and and", 20, "expected a figure"),
    ],
)
def test_refused(gate: str, column: int, why: str) -> None:
    """A gate that does not parse is refused with the column, the reason and an example."""
    with pytest.raises(BadGate) as refused:
        parse(gate)
    assert f"at column {column}: " in str(refused.value)
    assert why in str(refused.value)
    assert "write for example: pass_rate>=0.9" in str(refused.value)


@given(st.text(max_size=40) | st.text(alphabet="pass_rate><=0.9*baseline and+-,", max_size=40))
def test_any_text(text: str) -> None:
    """Any text is a gate or is refused as one: no other error."""
    try:
        gate = parse(text)
    except BadGate:
        return
    assert all(one.figure in FIGURES for one in gate.conditions)


def test_needs_a_baseline() -> None:
    """A gate says whether it compares."""
    assert not parse("pass_rate>=0.9").needs_baseline
    assert parse("regressions<=2").needs_baseline
    assert parse("pass_rate>=baseline").needs_baseline
