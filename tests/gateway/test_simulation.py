"""The production choice on a virtual clock: what a fleet gains by it, in scenarios that a fleet meets."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "fleet"
SEEDS = (1, 2)
CHANGES: dict[str, dict[str, Any]] = {
    "steady": {},
    "drifting": {"swaps_per_s": 2.0},
    "dying": {"dying": 2},
    "scaling": {"more": 4},
    "stale": {"poll_s": 10.0, "lag_s": 5.0},
}


@pytest.fixture(scope="module")
def fleet() -> ModuleType:
    """The benchmark's simulator, which is in no package."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module("simulate")


def ran(fleet: ModuleType, scenario: str, policy: str, seed: int) -> dict[str, float]:
    small = fleet.Scenario(replicas=12, adapters=600, clients=96, warm_s=30.0, seconds=30.0)
    figures: dict[str, float] = fleet.simulated(replace(small, **CHANGES[scenario]), policy, seed)
    return figures


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", CHANGES)
def test_the_gateway_beats_hashing_with_bounded_loads_and_comes_near_an_oracle(
    fleet: ModuleType, scenario: str, seed: int
) -> None:
    """The gateway answers 1.15 × as many requests with 0.75 × the loads, and 0.7 × what an oracle does."""
    gateway = ran(fleet, scenario, "gateway", seed)
    bounded = ran(fleet, scenario, "bounded-load hashing", seed)
    oracle = ran(fleet, scenario, "oracle", seed)
    assert gateway["requests/s"] >= 1.15 * bounded["requests/s"]
    assert gateway["requests/s"] >= 0.7 * oracle["requests/s"]
    assert gateway["loads a request"] <= 0.75 * bounded["loads a request"]
    assert gateway["p95 s"] <= 0.85 * bounded["p95 s"]
    assert gateway["busiest/mean"] <= 1.3
    assert gateway["copies"] <= 1.2


@pytest.mark.parametrize("policy", ["gateway", "3 gateways"])
@pytest.mark.parametrize("scenario", CHANGES)
def test_only_a_replica_that_dies_costs_requests(fleet: ModuleType, scenario: str, policy: str) -> None:
    """Every request is answered, but for those that a replica had when it died."""
    figures = ran(fleet, scenario, policy, 1)
    died = CHANGES[scenario].get("dying", 0)
    assert figures["errors"] <= died * figures["worst queue"]
    assert (figures["errors"] > 0) == (died > 0)


@pytest.mark.parametrize("scenario", CHANGES)
def test_gateways_side_by_side_are_better_than_hashing(fleet: ModuleType, scenario: str) -> None:
    """Three gateways that know nothing of each other answer more than hashing does, with fewer loads."""
    three = ran(fleet, scenario, "3 gateways", 1)
    bounded = ran(fleet, scenario, "bounded-load hashing", 1)
    assert three["requests/s"] >= bounded["requests/s"]
    assert three["loads a request"] <= bounded["loads a request"]


def test_a_simulation_is_the_same_each_time(fleet: ModuleType) -> None:
    """The same seed gives the same figures."""
    assert ran(fleet, "drifting", "gateway", 3) == ran(fleet, "drifting", "gateway", 3)
