"""What the benchmark on GPUs does before it times: make the ways, and refuse those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_fs.kernels.weights.layout import Shape
from tests.ops.benchmarks import loaded
from tests.ops.gpu.conftest import DEVICE, INTERPRETED

GQA = Shape(64, (64, 16, 16))


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with loaded() as modules:
        yield modules


def make_work(
    scripts: SimpleNamespace, tokens: int = 20, ranks: str = "8", spread: str = "uniform", copies: int = 2
) -> Any:
    case = scripts.grid.Case("8B", tokens, 3, ranks, 128, 4, spread)
    return scripts.peers.make_work(case, GQA, DEVICE, torch.bfloat16, copies)


def ours(scripts: SimpleNamespace, work: Any) -> Callable[[int], None]:
    peers = scripts.peers
    call: Callable[[int], None] = peers.ours(work, peers.in_arena(work), peers.plan_of(work))
    return call


BATCHES = [("mix", "half"), ("mix", "zipf"), ("8", "uniform")]


@pytest.mark.parametrize(("ranks", "spread"), BATCHES[:1] if INTERPRETED else BATCHES)
def test_ours_passes_the_gate(scripts: SimpleNamespace, ranks: str, spread: str) -> None:
    """Through the arena and the plan that are timed, over every copy of the layer."""
    work = make_work(scripts, ranks=ranks, spread=spread)
    before = [y.clone() for y in work.y]
    right, refused, errors = scripts.gpu_timing.checked(work, {"vllm": "", "sglang": ""})
    assert list(right) == ["ours"]
    assert refused == {}
    assert 0 < errors["ours"] <= 1
    assert all(torch.equal(y, was) for y, was in zip(work.y, before, strict=True))


@pytest.mark.parametrize("fault", ["a wrong number", "a bare row", "not a number"])
def test_a_wrong_way_is_refused(
    scripts: SimpleNamespace, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the tolerance, or a bit changed in a row without an adapter: told, and not timed."""
    work = make_work(scripts, spread="half")
    honest = ours(scripts, work)

    def faulty(copy: int) -> None:
        honest(copy)
        row, value = {"a wrong number": (0, 99.0), "a bare row": (1, 1e-3), "not a number": (0, torch.nan)}[
            fault
        ]
        work.y[copy][row, 5] += value

    ways: dict[str, Callable[[int], None] | str] = {"peer": faulty, "absent": "no such wheel"}
    monkeypatch.setattr(scripts.peers, "ways", lambda work, without: ways)
    right, refused, _ = scripts.gpu_timing.checked(work, {})
    assert right == {}
    assert "times the tolerance" in refused["peer"]
    assert refused["absent"] == "no such wheel"


def test_a_peer_is_held_to_its_own_arithmetic(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that rounds the product before it adds may err by that rounding, and by no more."""
    work = make_work(scripts, copies=1)

    def rounding(copy: int, times: float = 1.0) -> None:
        x, y = work.x[copy], work.y[copy]
        for slot, adapter in enumerate(work.adapters):
            rows, begin = work.slots == slot, 0
            for a, b in zip(adapter.a, adapter.b, strict=True):
                z = (x[rows].float() @ a.float().T).to(y.dtype)
                product = (z.float() @ b.float().T * times).to(y.dtype)
                y[rows, begin : begin + b.shape[0]] += product
                begin += b.shape[0]

    def wrong(copy: int) -> None:
        rounding(copy, times=1.02)

    strict = scripts.gpu_timing.check(work, rounding, twice=False)
    ways: dict[str, Callable[[int], None] | str] = {"vllm": rounding, "csgmv": wrong}
    monkeypatch.setattr(scripts.peers, "ways", lambda work, without: ways)
    right, refused, errors = scripts.gpu_timing.checked(work, {})
    assert list(right) == ["vllm"]
    assert errors["vllm"] < strict
    assert "times the tolerance" in refused["csgmv"]


def test_ours_has_to_be_the_same_twice(scripts: SimpleNamespace) -> None:
    """A result within the tolerance that differs between two runs is refused."""
    work = make_work(scripts, copies=1)
    honest, runs = ours(scripts, work), iter(range(9))

    def shaky(copy: int) -> None:
        honest(copy)
        work.y[copy][0, 0] *= 1 + 2**-7 * (next(runs) % 2)

    assert scripts.gpu_timing.check(work, honest, twice=True) <= 1
    assert scripts.gpu_timing.check(work, shaky, twice=True) == float("inf")
