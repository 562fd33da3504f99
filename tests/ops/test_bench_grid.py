"""The benchmark on GPUs, as far as it needs none: its cases, floors, predictions and what it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from lora_fs.kernels.gpu.configs import SHARED_BYTES
from lora_fs.kernels.segments import NO_SLOT
from tests.ops.benchmarks import loaded

# tokens, adapters, ranks: µs at 3.0 and 4.3 TB/s, of Llama-8B and of 70B over four.
FLOORS = [
    (1, 1, "16", (0.95, 0.66), (0.95, 0.66)),
    (16, 8, "16", (8.2, 5.7), (8.1, 5.7)),
    (64, 8, "16", (11.8, 8.2), (11.1, 7.7)),
    (64, 8, "mix", (21.4, 14.9), (20.8, 14.5)),
    (64, 64, "16", (60.7, 42.4), (60.9, 42.5)),
    (256, 64, "mix", (188, 131), (188, 131)),
    (4096, 8, "16", (315, 219), (259, 181)),
    (16384, 8, "16", (1237, 863), (1014, 707)),
]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with loaded() as modules:
        yield modules


@pytest.mark.parametrize(("tokens", "adapters", "ranks", "small", "large"), FLOORS)
def test_floors_are_those_of_the_design(
    scripts: SimpleNamespace,
    tokens: int,
    adapters: int,
    ranks: str,
    small: tuple[float, float],
    large: tuple[float, float],
) -> None:
    """To the last digit of the design's table; padding and empty slots move nothing."""
    grid = scripts.grid
    for model, wanted in (("8B", small), ("70B/TP4", large)):
        case = grid.Case(model, tokens, adapters, ranks, 128, 64)
        for bandwidth, floor in zip((3.0e12, 4.3e12), wanted, strict=True):
            digits = 2 if floor < 1 else 1 if floor < 100 else 0
            assert round(grid.floor_us(case, bandwidth), digits) == floor


def test_a_floor_counts_live_rows_and_adapters_alone(scripts: SimpleNamespace) -> None:
    """One row of one adapter, beside one bare row: A, B, x, and y twice, in bf16."""
    grid = scripts.grid
    shape = grid.MODELS["8B"]["qkv"]
    case = grid.Case("8B", 2, 4, "8", 128, 64, "half")
    weights = 8 * (3 * 4096 + 6144)
    assert grid.moved_bytes(shape, case) == 2 * (weights + 4096 + 2 * 6144)


def test_the_grid_is_that_of_the_design(scripts: SimpleNamespace) -> None:
    """Targets first; every size, rank, padding and spread; no case twice, no more adapters than rows."""
    quick, full = scripts.grid.cases(quick=True), scripts.grid.cases(quick=False)
    assert full[: len(quick)] == quick == [target.case for target in scripts.grid.TARGETS]
    assert len(set(full)) == len(full) > 3000
    assert {case.model for case in full} == {"8B", "70B/TP4"}
    assert {case.tokens for case in full} == {1, 4, 16, 64, 128, 256, 1024, 2048, 4096, 8192, 16384}
    assert {case.adapters for case in full if case.tokens <= 256} == {1, 4, 8, 16, 32, 64}
    assert {case.ranks for case in full} == {"8", "16", "64", "128", "mix"}
    assert {case.spread for case in full} == {"uniform", "zipf", "half"}
    for case in full:
        assert case.adapters <= case.tokens
        assert case.max_loras in (case.adapters, 64)
        assert max(scripts.grid.ranks_of(case)) <= case.max_rank


def test_batches(scripts: SimpleNamespace) -> None:
    """Decoding interleaves, a prefill is in runs; half are bare; Zipf's first adapter has the most rows."""
    grid = scripts.grid
    uniform = grid.slots_of(grid.Case("8B", 64, 8, "16", 16, 8))
    assert uniform[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    half = grid.slots_of(grid.Case("8B", 64, 8, "16", 16, 8, "half"))
    assert (half == NO_SLOT).sum() == 32
    assert set(half.tolist()) == {NO_SLOT, *range(8)}
    case = grid.Case("8B", 4096, 8, "16", 16, 8, "zipf")
    zipf = grid.slots_of(case)
    assert (np.diff(zipf) >= 0).all()
    assert np.bincount(zipf).argmax() == 0
    assert np.array_equal(zipf, grid.slots_of(case))


def test_predictions_say_that_they_are(scripts: SimpleNamespace) -> None:
    """Called predicted, with their constants; never below the floor."""
    told = scripts.grid.prediction_table()
    assert told.startswith("Predicted, not measured.")
    assert "5.5 µs" in told
    assert told.count("| 8B ") == 2 * len(scripts.grid.TARGETS)
    for target in scripts.grid.TARGETS:
        assert scripts.grid.predicted_us(target.case, 3e12) > scripts.grid.floor_us(target.case, 3e12)


def test_pieces_of_a_peer_cover_every_row_once(scripts: SimpleNamespace) -> None:
    """Sorted by slot, in pieces of at most a chunk; bare rows at the slot of rank 0."""
    slots = np.array([2, 0, NO_SLOT, 0, 0, 2, 0])
    order, of_pieces, ends = scripts.peers.chunks_of(slots, bare=4, chunk=3)
    assert order.tolist() == [1, 3, 4, 6, 0, 5, 2]
    assert of_pieces == [0, 0, 2, 4]
    assert ends == [0, 3, 4, 6, 7]


def make_result(scripts: SimpleNamespace, target: int = 1, **ways: list[float]) -> dict[str, Any]:
    case = scripts.grid.TARGETS[target].case
    modules = {name: {"us": ways, "refused": {}} for name in scripts.grid.MODELS["8B"]}
    raw = {"case": asdict(case), "label": case.label, "modules": modules}
    summarized: dict[str, Any] = scripts.gpu_summary.summarize(raw, 3e12)
    return summarized


def test_a_case_is_summed_up(scripts: SimpleNamespace) -> None:
    """A layer is its four modules round by round; ratios come from the same round; a target is judged."""
    result = make_result(scripts, ours=[4.0, 5.0, 5.0], vllm=[16.0, 20.0, 22.0], csgmv=[16.0, 16.0, 16.0])
    layer = result["layer"]
    assert layer["us"] == {"ours": 20.0, "vllm": 80.0, "csgmv": 64.0}
    assert layer["ratios"]["vllm"][0] == 4.0
    assert layer["floor_share"] == pytest.approx(11.8 / 20, rel=0.01)
    told = scripts.gpu_summary.line(result)
    assert "vllm 4.00 (4.00 to 4.40)" in told
    assert "misses triton_v2 not compared" in told
    slow = make_result(scripts, ours=[6.0] * 3, vllm=[6.0] * 3, csgmv=[60.0] * 3, triton_v2=[60.0] * 3)
    assert scripts.gpu_summary.verdict(slow) == "misses ≤ 22 µs, vllm ≥ 4"
    fast = make_result(scripts, ours=[5.0] * 3, vllm=[60.0] * 3, csgmv=[60.0] * 3, triton_v2=[60.0] * 3)
    assert scripts.gpu_summary.verdict(fast) == "reached"


def test_a_case_that_failed_has_no_ratio(scripts: SimpleNamespace) -> None:
    """Told with its reason, and not drawn."""
    result = make_result(scripts)
    result["modules"]["o"]["refused"] = {"ours": "3 times the tolerance"}
    assert "ratios" not in result["layer"]
    assert "3 times the tolerance" in scripts.gpu_summary.line(result)
    assert scripts.gpu_summary.rows_of([result]) == []


def test_a_chart_is_svg(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Well-formed, text escaped, one bar a ratio, for light and dark; empty where nothing was measured."""
    rows = [
        scripts.plot.Row("T64 <A8>", {"vllm": (4.0, 3.5, 4.4), "csgmv": (0.7, 0.6, 0.8)}),
        scripts.plot.Row("T1", {"vllm": (9.0, 8.0, 9.5)}),
    ]
    scripts.plot.write_plot(tmp_path / "new" / "chart.svg", "LoRA & GPUs", rows, "a <note>")
    text = (tmp_path / "new" / "chart.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)  # noqa: S314 - written by ourselves
    spreads = [one for one in root.iter() if one.get("class") == "spread"]
    assert len(spreads) == 3
    assert {"T64 <A8>", "LoRA & GPUs", "a <note>", "0.7×"} <= {one.text for one in root.iter()}
    assert "prefers-color-scheme: dark" in text
    ElementTree.fromstring(scripts.plot.bars("nothing", [], ""))  # noqa: S314


def test_results_are_replaced_at_once(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """With the machine, the versions and the commit; no draft is left."""
    path = tmp_path / "new" / "results.json"
    for number in range(2):
        here = scripts.figures.origin("torch", "no-such-package")
        scripts.figures.write_json(path, {"origin": here, "number": number})
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["number"] == 1
    assert {"cores", "machine", "linux", "python", "packages", "commit"} <= found["origin"].keys()
    assert set(found["origin"]["packages"]) <= {"lora-fs", "torch"}
    assert [one.name for one in path.parent.iterdir()] == ["results.json"]


def test_a_run_keeps_what_it_has(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Each case's result is written when it is there; one without memory is told, and the rest goes on."""
    bench, kept = scripts.bench_gpu_ops, tmp_path / "results.json"

    def measure(case: Any, rounds: int, without: dict[str, str]) -> dict[str, Any]:
        if case.ranks == "mix":
            raise torch.cuda.OutOfMemoryError("no room")
        module = {"us": {"ours": [5.0] * rounds, "vllm": [20.0] * rounds}, "refused": {}}
        modules = dict.fromkeys(scripts.grid.MODELS["8B"], module)
        return {"case": asdict(case), "label": case.label, "modules": modules}

    device = SimpleNamespace(name="a GPU", multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(bench.peers, "missing", lambda: {"sglang": "no such wheel"})
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 3e12)
    monkeypatch.setattr(bench, "metadata", lambda rounds, without: [])
    monkeypatch.setattr(bench, "swap", lambda rounds: {})
    files = ["--json", str(kept), "--plot", str(tmp_path / "chart.svg")]
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--rounds", "3", *files])
    bench.main()
    results = json.loads(kept.read_text(encoding="utf-8"))
    assert len(results["cases"]) == 4
    assert [one["reason"] for one in results["not_measured"]] == ["no room", "no room"]
    assert results["left"] == 0
    assert results["without"] == {"sglang": "no such wheel"}
    assert results["cases"][0]["layer"]["ratios"]["vllm"] == [4.0, 4.0, 4.0]
    assert "4×" in (tmp_path / "chart.svg").read_text(encoding="utf-8")
    told = capsys.readouterr().out
    assert "sglang is not compared: no such wheel" in told
    assert told.count("not measured: out of memory") == 2


def test_without_a_gpu_it_says_so(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The GPU part was not run; nothing is written, and that is no failure. Predictions need none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--json", str(tmp_path / "results.json")])
    scripts.bench_gpu_ops.main()
    assert "the GPU part was not run" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["bench", "--predict"])
    scripts.bench_gpu_ops.main()
    assert "Predicted, not measured." in capsys.readouterr().out


def test_tuning_changes_a_size_at_a_time_then_adds_up_what_helped(scripts: SimpleNamespace) -> None:
    """The second round has a value of each size that gained, the greatest gain first."""
    tune, case = scripts.tune_gpu_ops, scripts.grid.TARGETS[1].case
    shape = scripts.grid.MODELS["8B"]["qkv"]
    found = tune.first_round(case, shape, 132, SHARED_BYTES)
    base = found["base"]
    assert all(half.early for half in base)
    assert not any(half.early for half in found["plain"])
    assert len(set(found.values())) == len(found)
    us: dict[str, Any] = {
        **dict.fromkeys(found, 10.0),
        "shrink.warps=8": 8.0,
        "expand.columns=64": 7.0,
        "shrink.warps=2": 9.0,
    }
    us["expand.stages=1"] = "RuntimeError: of one that was not timed"
    added = tune.second_round(found, us, 132)
    assert list(added) == ["2: and shrink.warps=8"]
    (shrink, expand) = added["2: and shrink.warps=8"]
    assert (shrink, expand) == (replace(base[0], warps=8), replace(base[1], columns=64))


@pytest.mark.parametrize(("kib", "inputs"), [(227, 128), (99, 64)], ids=["H100", "L4"])
def test_tuning_begins_with_what_the_gpu_at_hand_gets(
    scripts: SimpleNamespace, kib: int, inputs: int
) -> None:
    """A prefill's shrink that fits an H100 does not fit an L4: there it could not even be launched."""
    case = next(target.case for target in scripts.grid.TARGETS if target.case.tokens == 4096)
    shape = scripts.grid.MODELS["8B"]["o"]
    shrink, _ = scripts.tune_gpu_ops.first_round(case, shape, 132, kib << 10)["plain"]
    assert shrink.inputs == inputs
    assert shrink.stages * (shrink.rows + shrink.ranks) * shrink.inputs * 2 <= kib << 10
