"""Homes: any fleet, any replica that comes or goes; nothing leaves one replica before it is on another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.model import Phase, Policy, PolicyKind
from lora_fs.sidecar.reconcile import placement
from lora_fs.sidecar.reconcile.placement import Homes, Part, homes_of, policy_there, rendezvous
from tests.reconcile.conftest import Rig

NAMES = st.sets(st.sampled_from([f"r{number}" for number in range(8)]), min_size=1)
ADAPTERS = [f"a{number}" for number in range(12)]
FIRM = (PolicyKind.EAGER, PolicyKind.PINNED)


def parts(fleet: dict[str, set[str]], adapter: str, homes: int) -> dict[str, Part]:
    """What each replica is to an adapter, as each computes it for itself."""
    return {
        own: Homes(own).part(adapter, homes, {name: held for name, held in fleet.items() if name != own})
        for own in fleet
    }


@given(NAMES, st.sampled_from(ADAPTERS), st.integers(1, 10))
def test_all_replicas_agree_on_the_homes(names: set[str], adapter: str, homes: int) -> None:
    """Each replica computes for itself, and together they are as many homes as there should be."""
    found = parts({name: set() for name in names}, adapter, homes)
    chosen = {name for name, part in found.items() if part is Part.HOME}
    assert chosen == set(rendezvous(adapter, names)[:homes])
    assert len(chosen) == min(homes, len(names))


@given(st.lists(NAMES, min_size=1), st.integers(1, 3))
def test_a_replica_remembers_no_homes_of_another_fleet(fleets: list[set[str]], homes: int) -> None:
    """Whoever comes and goes, it is what a replica is that knew none of the fleets before."""
    own = Homes("own")
    for names in fleets:
        living = {name: {"a1"} for name in names}
        for adapter in ADAPTERS:
            assert own.part(adapter, homes, living) is Homes("own").part(adapter, homes, living)


def test_a_fleet_is_ordered_once_for_each_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass asks for every eager adapter, and each look at the fleet makes another mapping."""
    own, ordered = Homes("own"), []

    def order(adapter: str, names: frozenset[str]) -> list[str]:
        ordered.append(adapter)
        return sorted(names)

    monkeypatch.setattr(placement, "rendezvous", order)
    for fleet in ({"r0"}, {"r0"}, {"r0", "r1"}):
        for adapter in ("a0", "a1", "a0"):
            own.part(adapter, 1, {name: set[str]() for name in fleet})
    assert ordered == ["a0", "a1"] * 2


def test_the_order_is_the_same_in_every_version() -> None:
    """Replicas and gateways of two versions stand side by side during an upgrade."""
    names = [f"r{number}" for number in range(4)]
    assert rendezvous("support", names) == ["r1", "r2", "r0", "r3"]
    assert rendezvous("billing", names) == ["r0", "r1", "r2", "r3"]


@given(NAMES, st.integers(1, 3))
def test_a_replica_that_goes_moves_only_its_own_adapters(names: set[str], homes: int) -> None:
    """Without one replica, the homes of adapters that it was no home of are the same."""
    gone = min(names)
    for adapter in ADAPTERS:
        before = rendezvous(adapter, names)[:homes]
        if gone not in before:
            assert rendezvous(adapter, names - {gone})[:homes] == before


@st.composite
def histories(draw: st.DrawFn) -> list[set[str]]:
    """Fleets one after another, of which each has at least one replica of the one before."""
    fleets = [draw(NAMES)]
    for _ in range(draw(st.integers(1, 6))):
        stays = draw(st.sampled_from(sorted(fleets[-1])))
        fleets.append(draw(NAMES) | {stays})
    return fleets


@given(histories(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_adapter_is_emptied_before_it_has_arrived(
    history: list[set[str]], homes: int, order: random.Random
) -> None:
    """Replicas act in any order while others come and go: an adapter that is loaded stays loaded somewhere.

    A copy may be evicted wherever the plan lets it: on every replica where it is not as of a home.
    """
    fleet: dict[str, set[str]] = {name: set() for name in history[0]}
    for names in history:
        lost = {one for name in fleet.keys() - names for one in fleet[name]}
        fleet = {name: fleet.get(name, set()) for name in names}
        for turn in range(2):
            for adapter in ADAPTERS:
                was = any(adapter in held for held in fleet.values())
                acting = sorted(fleet)
                order.shuffle(acting)
                for own in acting:
                    part = parts(fleet, adapter, homes)[own]
                    if part is Part.HOME:
                        fleet[own].add(adapter)
                    elif part is Part.OTHER:
                        fleet[own].discard(adapter)
                    assert any(adapter in held for held in fleet.values()) or not was or adapter in lost, turn
        for adapter in ADAPTERS:
            holders = {name for name, held in fleet.items() if adapter in held}
            assert holders == set(rendezvous(adapter, fleet)[:homes])


@given(st.sampled_from(PolicyKind), st.sampled_from(Part))
def test_a_copy_elsewhere_is_kept_until_its_place_is_needed(kind: PolicyKind, part: Part) -> None:
    """Only on another replica than its homes and keepers an eager or pinned adapter is like a sticky one."""
    policy = policy_there(Policy(kind=kind, priority=3), part)
    expected = PolicyKind.STICKY if kind in FIRM and part is Part.OTHER else kind
    assert (policy.kind, policy.priority) == (expected, 3)


@given(st.text(max_size=12), st.integers(1, 5))
def test_a_label_that_is_no_number_counts_as_none(text: str, default: int) -> None:
    """Whatever the label says, an adapter has from 1 to 10,000 homes."""
    assert 1 <= homes_of({"replicas": text}, default) <= 10_000
    for none in ("x", "0", "10001", "\N{ARABIC-INDIC DIGIT THREE}", "9" * 5000):
        assert homes_of({"replicas": none}, default) == homes_of({}, default) == default
    assert (homes_of({"replicas": "1"}, default), homes_of({"replicas": "10000"}, default)) == (1, 10_000)


@pytest.mark.anyio
@pytest.mark.parametrize("max_loaded", [None, 8], ids=["no bound", "all fit"])
async def test_a_replica_loads_unasked_what_it_is_a_home_of(
    max_loaded: int | None, make_rig: Callable[..., Rig]
) -> None:
    """Nothing else, whether all adapters would fit or not: the others wait for a request."""
    rig = make_rig(max_loaded)
    rig.limits = replace(rig.limits, part_of=lambda served: Part(served.name))
    for part in Part:
        rig.volume.put(part, policy=Policy(kind=PolicyKind.EAGER))
    rig.replica = rig.start()
    await rig.settle()
    assert rig.engine.public() == {Part.HOME}
    assert rig.replica.notable()[1] == {Phase.READY: 1, Phase.UNLOADED: 2}
