"""The plan is pure: these hold for every state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_fs.sidecar.model import (
    AdapterSpec,
    LoraShape,
    Policy,
    PolicyKind,
    Record,
    Source,
    State,
)
from lora_fs.sidecar.reconcile.plan import (
    ALWAYS,
    Absent,
    Resident,
    decide,
    firm_bytes,
    give_way,
    next_to_go,
)

RECORD = Record(
    namespace="default",
    model="tiny",
    name="a1",
    revision="v1",
    generation=1,
    request_id="r",
    token="t",
    writer="test",
    updated_at="2026-01-01T00:00:00+00:00",
    uid="u",
    state=State.PRESENT,
    origin="register",
    spec=AdapterSpec(
        source=Source(uri="file:///a1"),
        path="default/tiny/v1/a1",
        base_model="tiny",
        digest="sha256:" + "0" * 64,
        size_bytes=1,
        files=(),
        lora=LoraShape(rank=4, alpha=8, target_modules=("q_proj",), dtype="float32"),
        int_id=1,
    ),
)
policies = st.builds(Policy, kind=st.sampled_from(PolicyKind), ttl_s=st.just(10), priority=st.integers(0, 3))
residents = st.lists(
    st.builds(
        Resident,
        name=st.uuids().map(str),
        wanted=st.sampled_from([None, RECORD]),
        current=st.booleans(),
        in_flight=st.integers(0, 2),
        idle_s=st.floats(0, 20),
        policy=policies,
    ),
    max_size=8,
)
absents = st.lists(
    st.builds(Absent, name=st.uuids().map(str), policy=policies, may_try=st.booleans()),
    max_size=8,
)


def wanting(absent: list[Absent]) -> dict[str, PolicyKind]:
    """What is to be loaded if there is room."""
    return {one.name: one.policy.kind for one in absent if one.may_try}


@given(residents, absents, st.none() | st.integers(1, 6))
def test_the_plan_keeps_its_promises(
    resident: list[Resident], absent: list[Absent], capacity: int | None
) -> None:
    """Nothing in use is unloaded; a pinned one stays while it is wanted; capacity holds and is used."""
    decided = decide(resident, absent, capacity)
    by_name = {entry.name: entry for entry in resident}
    for name in decided.unload:
        entry = by_name[name]
        assert not entry.in_flight
        wanted = entry.wanted is not None and entry.current
        if wanted and entry.policy.kind is PolicyKind.PINNED:
            assert capacity is not None
            kept = [
                e for e in resident if e.name not in decided.unload and e.policy.kind is entry.policy.kind
            ]
            assert sum(e.policy.priority >= entry.policy.priority for e in kept) >= capacity - 1
        if capacity is None:
            assert not (wanted and entry.policy.kind in ALWAYS)
    for missing in absent:
        if not missing.may_try:
            assert missing.name not in decided.load
    if capacity is not None and decided.load:
        assert len(resident) - len(decided.unload) + len(decided.load) <= capacity
    may_load = wanting(absent)
    assert may_load.keys() >= {*decided.load}
    left = {kind for name, kind in may_load.items() if name not in decided.load}
    if capacity is None:
        assert not left
    elif left - {PolicyKind.PINNED}:
        assert len(resident) - len(decided.unload) + len(decided.load) >= capacity, "a place is free"


LAZY = Policy(ttl_s=10)
PINNED = Policy(kind=PolicyKind.PINNED)


def sized(digest: int) -> Record:
    """One of a few copies, each of its own size."""
    spec = RECORD.spec.model_copy(update={"digest": f"sha256:{digest:064x}", "size_bytes": 10 * digest})
    return RECORD.model_copy(update={"spec": spec})


@given(residents, absents, st.integers(1, 6))
@example(
    resident=[Resident("kept", RECORD, True, 0, 1.0, PINNED)],
    absent=[Absent(name, PINNED, True) for name in "abc"],
    capacity=3,
)
def test_pinned_adapters_leave_one_place(
    resident: list[Resident], absent: list[Absent], capacity: int
) -> None:
    """However many are pinned, a lazy one has a place; all others are theirs, but those in use."""
    decided = decide(resident, absent, capacity)
    policies = {entry.name: entry.policy.kind for entry in resident}
    policies |= {entry.name: entry.policy.kind for entry in absent}
    stay = [entry.name for entry in resident if entry.name not in decided.unload]
    pinned_before = sum(policies[name] is PolicyKind.PINNED for name in stay)
    pinned_loaded = sum(policies[name] is PolicyKind.PINNED for name in decided.load)
    assert pinned_loaded == 0 or pinned_before + pinned_loaded <= capacity - 1
    left = wanting(absent).items() - {(name, policies[name]) for name in decided.load}
    if PolicyKind.PINNED in dict(left).values() and pinned_before + pinned_loaded < capacity - 1:
        others = [e for e in resident if e.name in stay and e.policy.kind is not PolicyKind.PINNED]
        assert all(entry.in_flight for entry in others)
        assert len(stay) + len(decided.load) >= capacity


def test_the_pinned_that_stay_are_those_of_the_highest_priority() -> None:
    """Requests loaded more pinned ones than may stay: beyond the places they have, use decides as for all."""
    idle_by_priority = {3: 9.0, 2: 5.0, 1: 1.0}
    resident = [
        Resident(f"p{priority}", RECORD, True, 0, idle, Policy(kind=PolicyKind.PINNED, priority=priority))
        for priority, idle in idle_by_priority.items()
    ]
    assert decide(resident, [], 2).unload.keys() == {"p2"}


@pytest.mark.parametrize(
    ("kind", "idle_s", "state", "reason"),
    [
        (PolicyKind.LAZY, 10.0, {}, "Idle"),
        (PolicyKind.LAZY, 9.0, {}, None),
        (PolicyKind.STICKY, 10.0, {}, None),
        (PolicyKind.LAZY, 10.0, {"in_flight": 1}, None),
        (PolicyKind.PINNED, 0.0, {"current": False}, "Superseded"),
        (PolicyKind.PINNED, 0.0, {"current": False, "wanted": None}, "Withdrawn"),
        (PolicyKind.PINNED, 0.0, {"current": False, "wanted": None, "unknown": True}, None),
        (PolicyKind.LAZY, 10.0, {"current": False, "wanted": None, "unknown": True}, "Idle"),
        (PolicyKind.PINNED, 0.0, {"current": False, "unknown": True, "outdated": True}, "Outdated"),
        (PolicyKind.LAZY, 10.0, {"leaving": True}, None),
    ],
)
def test_why_an_adapter_is_unloaded(
    kind: PolicyKind, idle_s: float, state: dict[str, Any], reason: str | None
) -> None:
    """By its own state; one in use waits for its end, and one whose unload runs is not decided about."""
    one = replace(Resident("one", RECORD, True, 0, idle_s, Policy(kind=kind, ttl_s=10)), **state)
    decided, in_use = decide([one], [], None), decide([replace(one, in_flight=1)], [], None)
    assert [why.partition(":")[0] for why in decided.unload.values()] == ([reason] if reason else [])
    assert decided.draining == ()
    assert in_use.unload == {}
    assert in_use.draining == (("one",) if reason not in (None, "Idle") else ())


def test_who_makes_a_place_for_a_request() -> None:
    """First what serves nothing any more, then the one idle longest of those that may go."""
    longest = Resident("longest", RECORD, True, 0, 9.0, LAZY)
    stays = [
        Resident("used", RECORD, True, 1, 9.5, LAZY),
        Resident("leaving", RECORD, True, 0, 9.5, LAZY, leaving=True),
        Resident("pinned", RECORD, True, 0, 9.5, Policy(kind=PolicyKind.PINNED, priority=1)),
        Resident("used-and-old", RECORD, False, 1, 9.5, LAZY),
        Resident("leaving-and-old", RECORD, False, 0, 9.5, LAZY, leaving=True),
    ]
    old = Resident("old", RECORD, False, 0, 0.0, LAZY)
    assert next_to_go([*stays, longest, old], 8) == ("old",)
    assert next_to_go([*stays, longest], 8) == ("longest",)
    assert next_to_go(stays, 8) == ()
    assert next_to_go([Resident("low", RECORD, True, 0, 1.0, PINNED), *stays[2:3]], 2) == ("low",)
    two = [
        longest,
        Resident("b", RECORD, True, 0, 1.0, LAZY, "b"),
        Resident("c", RECORD, True, 0, 2.0, LAZY, "b"),
    ]
    assert next_to_go(two, 8, {"b": 1}) == ("c",)


def test_what_gives_no_room_however_long_one_waits() -> None:
    """The copies of current eager and pinned adapters, each once."""
    firm = Resident("a", sized(1), True, 1, 0.0, PINNED)
    others = [
        replace(firm, name="b"),
        replace(firm, name="c", wanted=sized(2), policy=Policy(kind=PolicyKind.EAGER)),
        replace(firm, name="d", wanted=sized(3), policy=LAZY),
        replace(firm, name="e", wanted=sized(4), current=False),
        replace(firm, name="f", wanted=None, current=False),
    ]
    assert firm_bytes([firm, *others]) == 10 + 20


@given(st.lists(st.floats(0, 20), min_size=1, max_size=6, unique=True))
def test_room_is_made_by_the_least_recently_used(idle: list[float]) -> None:
    """A pinned adapter that has no room takes the place of the one idle longest."""
    sticky = Policy(kind=PolicyKind.STICKY)
    resident = [Resident(str(i), RECORD, True, 0, s, sticky) for i, s in enumerate(idle)]
    pinned = Absent("pinned", Policy(kind=PolicyKind.PINNED), True)
    capacity = max(2, len(idle))
    decided = decide(resident, [pinned], capacity)
    assert decided.load == ("pinned",)
    longest = max(resident, key=lambda entry: entry.idle_s).name
    assert set(decided.unload) == ({longest} if len(idle) == capacity else set())


tenants = st.sampled_from(["a", "b", "c"])
weights = st.dictionaries(tenants, st.integers(1, 5), min_size=1)
crowds = st.lists(
    st.builds(
        Resident,
        name=st.uuids().map(str),
        wanted=st.just(RECORD),
        current=st.just(True),
        in_flight=st.integers(0, 1),
        idle_s=st.floats(0, 20),
        policy=st.just(Policy(kind=PolicyKind.STICKY)),
        tenant=tenants,
    ),
    max_size=12,
)


@given(crowds, weights, st.integers(1, 6))
def test_nobody_gives_way_below_its_share(
    resident: list[Resident], weights: dict[str, int], capacity: int
) -> None:
    """Who gave way had, for its weight, as much before as anybody who could have has afterwards."""
    unload = decide(resident, [], capacity, weights).unload

    def has(tenant: str, entries: list[Resident]) -> float:
        return sum(entry.tenant == tenant for entry in entries) / weights.get(tenant, 1)

    stay = [entry for entry in resident if entry.name not in unload]
    idle = {entry.tenant for entry in stay if not entry.in_flight}
    for gone in resident:
        if gone.name in unload:
            assert has(gone.tenant, [*stay, gone]) >= max((has(one, stay) for one in idle), default=0)
            older = [
                e for e in stay if e.tenant == gone.tenant and not e.in_flight and e.idle_s > gone.idle_s
            ]
            assert not older
    assert len(unload) == min(max(0, len(resident) - capacity), sum(not e.in_flight for e in resident))


def test_free_places_go_to_who_has_least_for_its_weight() -> None:
    """What is loaded counts: ``b`` has none, and catches up before ``a`` gets one more."""
    held = [Resident(f"a{n}", RECORD, True, 0, 0.0, Policy(), "a") for n in range(2)]
    eager = Policy(kind=PolicyKind.EAGER)
    wanting = [Absent(f"{tenant}{n}", eager, True, tenant) for tenant in "ab" for n in range(7, 10)]
    assert decide(held, wanting, 5, {"a": 1}).load == ("b7", "b8", "a7")
    assert decide(held, wanting, 5, {"a": 3}).load == ("a7", "b7", "a8")


copies = st.lists(
    st.builds(
        Resident,
        name=st.uuids().map(str),
        wanted=st.none() | st.integers(1, 5).map(sized),
        current=st.booleans(),
        in_flight=st.integers(0, 1),
        idle_s=st.floats(0, 20),
        policy=policies,
        tenant=tenants,
    ),
    max_size=10,
)


def freed(resident: list[Resident], gone: tuple[str, ...]) -> int:
    """Bytes of the copies that no name needs any more."""
    left = {e.wanted.spec.digest for e in resident if e.wanted is not None and e.name not in gone}
    specs = [e.wanted.spec for e in resident if e.wanted is not None]
    return sum({spec.digest: spec.size_bytes for spec in specs if spec.digest not in left}.values())


@given(copies, st.integers(0, 120), st.just({}) | weights)
def test_room_in_the_stage_is_made_by_idle_ones(
    resident: list[Resident], lacks: int, weights: dict[str, int]
) -> None:
    """Enough of them go, and none where all would not be enough; nobody else ever does."""
    gone = give_way(resident, lacks, weights)
    may_go = {
        e.name: e.idle_s
        for e in resident
        if e.wanted is not None
        and e.current
        and not e.in_flight
        and e.policy.kind in (PolicyKind.LAZY, PolicyKind.STICKY)
    }
    assert may_go.keys() >= {*gone}
    sharing: dict[str, set[str]] = {}  # the names of each copy
    for one in resident:
        if one.wanted is not None:
            sharing.setdefault(one.wanted.spec.digest, set()).add(one.name)
    if gone:
        assert freed(resident, gone) >= lacks
        assert freed(resident, gone[:-1]) < lacks, "one more than it takes"
        assert all(names <= {*gone} or names.isdisjoint(gone) for names in sharing.values()), "in vain"
    else:
        assert lacks <= 0 or freed(resident, tuple(may_go)) < lacks
    if gone and not weights:
        stay = [names for names in sharing.values() if names <= may_go.keys() - {*gone}]
        assert all(min(map(may_go.__getitem__, names)) <= may_go[gone[-1]] for names in stay)


def test_exactly_enough_room_is_enough() -> None:
    """One copy has as many bytes as are lacking: its adapter goes, and nobody else."""
    resident = [Resident(str(size), sized(size), True, 0, float(size), LAZY) for size in (1, 2)]
    assert give_way(resident, 20) == ("2",)
    assert give_way(resident, 30) == ("2", "1")
    assert give_way(resident, 31) == ()


@pytest.mark.parametrize(
    ("in_flight", "idle_s", "policy"), [(1, 0.0, LAZY), (0, 0.0, PINNED), (0, 1.0, LAZY)]
)
def test_who_shares_its_bytes_does_not_go_in_vain(in_flight: int, idle_s: float, policy: Policy) -> None:
    """With one that is busy, one that is pinned, and one that was used later: another frees enough."""
    resident = [
        Resident("shares", sized(1), True, in_flight, idle_s, policy),
        Resident("longest-idle", sized(1), True, 0, 9.0, LAZY),
        Resident("other", sized(2), True, 0, 5.0, LAZY),
    ]
    assert give_way(resident, 20) == ("other",)


def test_who_cannot_go_is_not_counted_to_its_tenant() -> None:
    """It frees nothing, so the tenant that has most still gives way first."""
    resident = [
        Resident("a-busy", sized(1), True, 1, 0.0, LAZY, "a"),
        Resident("a-shares", sized(1), True, 0, 9.0, LAZY, "a"),
        Resident("a-other", sized(2), True, 0, 1.0, LAZY, "a"),
        Resident("b-one", sized(3), True, 0, 5.0, LAZY, "b"),
        Resident("b-two", sized(4), True, 0, 5.0, LAZY, "b"),
    ]
    assert give_way(resident, 20, {"a": 1}) == ("a-other",)


def test_eager_adapters_are_loaded_by_shares() -> None:
    """Of four places a tenant that weighs three times as much has three, whatever the other's priorities."""
    absent = [
        Absent(f"{tenant}{number}", Policy(kind=PolicyKind.EAGER, priority=number + more), True, tenant)
        for tenant, more in (("a", 0), ("b", 100))
        for number in range(5)
    ]
    load = decide([], absent, 4, {"a": 3}).load
    assert sorted(load) == ["a2", "a3", "a4", "b4"]
    assert decide([], absent, 4, {}).load == ("b4", "b3", "b2", "b1")
    pinned = Absent("pinned", PINNED, True, "a")
    first = Absent("first", Policy(kind=PolicyKind.EAGER, priority=200), True, "a")
    assert decide([], [pinned, first, absent[5]], 2, {"b": 1}).load == ("pinned", "b0")


def test_names_that_share_their_bytes_free_them_once() -> None:
    """Two names of one copy go together, and a third adapter with them where that is too little."""
    shared = [Resident(name, sized(2), True, 0, 9.0, LAZY) for name in "ab"]
    resident = [*shared, Resident("c", sized(1), True, 0, 1.0, LAZY)]
    assert give_way(resident, 20) == ("a", "b")
    assert give_way(resident, 30) == ("a", "b", "c")
    assert give_way([replace(resident[2], leaving=True)], 5) == ()


def test_another_name_of_the_same_bytes_is_another_copy() -> None:
    """It gives way beside one that stays. The copies of two that stay are two."""
    stays, goes = (sized(2).model_copy(update={"name": name}) for name in ("stays", "goes"))
    resident = [Resident("stays", stays, True, 0, 9.0, PINNED), Resident("goes", goes, True, 0, 9.0, LAZY)]
    assert give_way(resident, 20) == ("goes",)
    assert firm_bytes([replace(one, policy=PINNED) for one in resident]) == 40


def test_eager_adapters_take_only_what_is_free() -> None:
    """By priority, while they fit; nothing is evicted for them."""
    resident = [Resident("used", RECORD, True, 0, 5.0, Policy(kind=PolicyKind.STICKY))]
    eager = [Absent(n, Policy(kind=PolicyKind.EAGER, priority=p), True) for n, p in (("low", 1), ("high", 2))]
    decided = decide(resident, eager, 2)
    assert decided.load == ("high",)
    assert not decided.unload


@given(residents)
def test_withdrawn_names_go_or_drain(resident: list[Resident]) -> None:
    """A withdrawn name is unloaded, or waits for its requests and for nothing else."""
    decided = decide(resident, [], None)
    for entry in resident:
        if entry.wanted is None:
            assert (entry.name in decided.draining) is bool(entry.in_flight)
            assert (entry.name in decided.unload) is not bool(entry.in_flight)
