"""Properties of the choice: which replica answers a request, for any state of any fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.gateway import homes
from lora_fs.sidecar.gateway.choice import (
    AHEAD,
    LOADS,
    PATIENCE_S,
    PREFIX_AHEAD,
    Choice,
    Peer,
    Reason,
    choose,
)
from lora_fs.sidecar.gateway.homes import EVIDENCE, HALF_LIFE_S, SHRINK_S, Demand
from lora_fs.sidecar.reconcile.placement import rendezvous

NOW = 100.0
ADAPTERS = ("a", "b", "c")


@st.composite
def fleets(draw: st.DrawFn) -> list[Peer]:
    """Draw up to eight replicas in any state."""
    peers = []
    for number in range(draw(st.integers(0, 8))):
        resident = draw(st.sets(st.sampled_from(ADAPTERS)))
        loading = draw(st.sets(st.sampled_from(ADAPTERS))) - resident
        since = draw(st.sampled_from([NOW, NOW - 2 * PATIENCE_S]))
        peers.append(
            Peer(
                f"r{number}",
                in_flight=draw(st.integers(0, 60)),
                resident=resident,
                loading=dict.fromkeys(loading, since),
            )
        )
    return peers


@given(fleets(), st.sampled_from([*ADAPTERS, None]), st.integers(1, 8))
def test_a_request_waits_only_while_every_replica_loads_and_none_holds_its_adapter(
    order: list[Peer], adapter: str | None, copies: int
) -> None:
    """A request waits only where no replica holds its adapter and each has all its loads under way."""
    choice = choose(adapter, order, copies=copies, now=NOW)
    if choice.peer is None:
        assert not order if choice.reason is Reason.NONE else adapter is not None
        if adapter is not None:
            assert not any(peer.holds(adapter) for peer in order)
            assert all(peer.loads(NOW) >= LOADS for peer in order)
    else:
        assert choice.peer in order


@given(fleets(), st.sampled_from(ADAPTERS), st.integers(1, 8))
def test_no_replica_is_given_more_than_one_load_above_its_bound(
    order: list[Peer], adapter: str, copies: int
) -> None:
    """A cold request goes to a replica with a load free; a further copy may be one load above that."""
    choice = choose(adapter, order, copies=copies, now=NOW)
    if choice.peer is not None and not choice.peer.holds(adapter):
        bound = LOADS if choice.reason is Reason.COLD else LOADS + 1
        assert choice.peer.loads(NOW) < bound


@given(fleets(), st.sampled_from(ADAPTERS), st.integers(1, 8))
def test_a_copy_is_added_only_beside_a_busier_home(order: list[Peer], adapter: str, copies: int) -> None:
    """A request loads a second copy only at a replica that is less busy than every home."""
    choice = choose(adapter, order, copies=copies, now=NOW)
    holders = [peer for peer in order if peer.holds(adapter)]
    if choice.reason in (Reason.HOME, Reason.SPILL):
        assert choice.peer is not None
        assert holders
        assert all(choice.peer.in_flight + AHEAD < peer.in_flight for peer in holders[:copies])
        assert choice.reason is Reason.SPILL or len(holders) < copies


@given(fleets(), st.sampled_from([*ADAPTERS, None]), st.integers(1, 8))
def test_the_choice_changes_nothing_and_is_always_the_same(
    order: list[Peer], adapter: str | None, copies: int
) -> None:
    """The choice is a function of what it is given."""
    before = [(p.in_flight, set(p.resident), dict(p.loading)) for p in order]
    first = choose(adapter, order, copies=copies, now=NOW)
    assert choose(adapter, order, copies=copies, now=NOW) == first
    assert [(p.in_flight, set(p.resident), dict(p.loading)) for p in order] == before


def test_the_home_that_has_the_prompt_is_chosen_until_it_is_too_busy() -> None:
    """The longest prefix wins up to PREFIX_AHEAD requests above the least busy home."""
    idle, warm = Peer("idle", resident={"a"}), Peer("warm", in_flight=PREFIX_AHEAD, resident={"a"})
    choice = choose("a", [idle, warm], copies=2, prefix={"warm": 1}, now=NOW)
    assert (choice.peer, choice.reason) == (warm, Reason.PREFIX)
    warm.in_flight += 1
    choice = choose("a", [idle, warm], copies=2, prefix={"warm": 1}, now=NOW)
    assert (choice.peer, choice.reason) == (idle, Reason.RESIDENT)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_home_that_has_the_prompt_is_helped_once_it_is_too_busy(is_held: bool) -> None:
    """Where it is the only home, too: by the least busy holder, or by a replica that gets a copy."""
    warm = Peer("warm", in_flight=PREFIX_AHEAD, resident={"a"})
    idle = Peer("idle", resident={"a"} if is_held else ())
    assert choose("a", [warm, idle], prefix={"warm": 3}, now=NOW) == Choice(warm, Reason.PREFIX)
    warm.in_flight += 1
    helps = Choice(idle, Reason.RESIDENT if is_held else Reason.SPILL)
    assert choose("a", [warm, idle], prefix={"warm": 3}, now=NOW) == helps
    if not is_held:
        assert choose("a", [warm, idle], copies=2, prefix={"warm": 3}, now=NOW) == Choice(idle, Reason.HOME)


@pytest.mark.parametrize("adapter", ["a", None])
def test_without_a_replica_nobody_waits(adapter: str | None) -> None:
    """The request fails at once."""
    assert choose(adapter, []) == Choice(None, Reason.NONE)


def test_a_request_for_the_base_model_goes_by_its_prompt_and_else_to_the_least_busy() -> None:
    """Whatever they load: none of them has to load for it."""
    busy, idle = Peer("busy", in_flight=1), Peer("idle", loading=dict.fromkeys("abc", NOW))
    assert choose(None, [busy, idle], now=NOW) == Choice(idle, Reason.BASE)
    assert choose(None, [busy, idle], prefix={"busy": 1}, now=NOW) == Choice(busy, Reason.PREFIX)


def test_a_prompt_that_only_others_have_counts_for_no_home() -> None:
    """As a replica that holds the adapter, and is no home."""
    home, other = Peer("home", resident={"a"}), Peer("other", resident={"a"})
    assert choose("a", [home, other], prefix={"other": 3}, now=NOW) == Choice(home, Reason.RESIDENT)


@pytest.mark.parametrize(
    ("home", "others", "spills"),
    [
        (24, (0, 20, 20), False),  # 1.25 times the mean, and AHEAD
        (25, (0, 20, 20), True),
        (20, (9, 14, 13), False),  # far below a fleet that is busy
        (40, (20, 20, 20), False),  # the helper would have half as many
        (40, (19, 20, 20), True),
    ],
)
def test_a_saturated_home_spills_to_a_replica_that_is_less_than_half_as_busy(
    home: int, others: tuple[int, ...], spills: bool
) -> None:
    """Once it has over 1.25 times the mean of requests, and AHEAD more."""
    first = Peer("home", in_flight=home, resident={"a"})
    helper, *rest = (Peer(f"r{busy}", in_flight=busy) for busy in others)
    expected = Choice(helper, Reason.SPILL) if spills else Choice(first, Reason.RESIDENT)
    assert choose("a", [first, helper, *rest], now=NOW) == expected


@pytest.mark.parametrize(("loads", "helps"), [(LOADS, True), (LOADS + 1, False)])
def test_a_helper_may_have_one_load_more_than_a_cold_request_finds(loads: int, helps: bool) -> None:
    """The home is busy already."""
    home = Peer("home", in_flight=20, resident={"a"})
    helper = Peer("helper", loading={f"b{number}": NOW for number in range(loads)})
    assert choose("a", [home, helper], copies=2, now=NOW).peer is (helper if helps else home)


@pytest.mark.parametrize(("more", "is_first"), [(AHEAD, True), (AHEAD + 1, False)])
def test_a_cold_adapter_goes_to_its_first_replica_unless_that_is_busier(more: int, is_first: bool) -> None:
    """AHEAD requests more than the least busy one has are none too many."""
    first, second = Peer("first", in_flight=1 + more), Peer("second", in_flight=1)
    choice = choose("a", [first, second], now=NOW)
    assert (choice.peer, choice.reason) == (first if is_first else second, Reason.COLD)


def test_a_load_that_hangs_holds_up_others_for_a_bounded_time() -> None:
    """After PATIENCE_S a load does not keep its replica from being given the next one."""
    peer = Peer("r0", loading={f"b{number}": NOW for number in range(LOADS)})
    assert choose("a", [peer], now=NOW + PATIENCE_S - 0.1).reason is Reason.WAIT
    assert choose("a", [peer], now=NOW + PATIENCE_S).reason is Reason.COLD


@pytest.mark.parametrize(("load_s", "held_s"), [(0.125, 0.5), (1.0, PATIENCE_S), (float("nan"), PATIENCE_S)])
def test_a_load_holds_up_others_for_a_few_times_what_loads_take_there(load_s: float, held_s: float) -> None:
    """For LATE times that, and PATIENCE_S at most, whatever the replica says."""
    peer = Peer("r0", loading={f"b{number}": NOW for number in range(LOADS)}, load_s=load_s)
    assert choose("a", [peer], now=NOW + held_s - 0.01).reason is Reason.WAIT
    assert choose("a", [peer], now=NOW + held_s).reason is Reason.COLD


@given(st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=12), st.text(max_size=8))
def test_a_replica_that_leaves_moves_only_what_it_was_first_for(names: set[str], adapter: str) -> None:
    """Without one replica, the others keep their order."""
    order = rendezvous(adapter, names)
    gone = min(names)
    assert rendezvous(adapter, names - {gone}) == [name for name in order if name != gone]


@given(st.lists(st.sampled_from(ADAPTERS), max_size=200), st.integers(1, 20))
def test_every_adapter_has_a_home_and_never_more_than_there_are_replicas(
    asked: list[str], replicas: int
) -> None:
    """An adapter has one home at least and one on every replica at most, whatever is asked for."""
    demand = Demand()
    for at, adapter in enumerate(asked):
        demand.asked(adapter, at * 0.1)
    assert all(1 <= demand.copies(one, replicas, 20.0) <= replicas for one in ADAPTERS)
    assert sum(demand.share(one) for one in set(asked)) <= 1 + 1e-9


def test_homes_grow_at_once_and_shrink_one_by_one_after_a_delay() -> None:
    """Demand adds homes with the next request, and gives up one each SHRINK_S."""
    demand = Demand()
    for at in range(100):
        demand.asked("a", at * 0.01)
    assert demand.copies("a", 4, 1.0) == 4
    for at in range(1000):
        demand.asked("b", 100.0 + at * 0.01)
    late = 110.0
    assert demand.copies("a", 4, late) == 3
    assert demand.copies("a", 4, late + SHRINK_S - 1) == 3
    assert demand.copies("a", 4, late + SHRINK_S) == 2
    assert demand.copies("a", 4, late + 2 * SHRINK_S - 1) == 2
    assert demand.copies("a", 4, late + 2 * SHRINK_S) == 1
    assert not demand._homes


def test_a_home_stays_for_a_while_after_the_last_request_that_needed_it() -> None:
    """However long it has been there, and while it is needed in any case."""
    demand = Demand()
    for at in (0.0, 3 * SHRINK_S):
        for _ in range(100):
            demand.asked("a", at)
        assert demand.copies("a", 4, at) == 4
    for _ in range(10_000):
        demand.asked("b", 3 * SHRINK_S)
    assert demand.copies("a", 4, 4 * SHRINK_S - 0.1) == 4
    assert demand.copies("a", 4, 4 * SHRINK_S) == 3


def test_a_share_counts_once_there_is_evidence() -> None:
    """Until then, and with a small share, an adapter has one home."""
    demand = Demand()
    assert demand.copies("a", 4, 0.0) == 1
    for _ in range(int(EVIDENCE) - 1):
        demand.asked("a", 0.0)
    assert demand.copies("a", 4, 0.0) == 1
    demand.asked("a", 0.0)
    assert demand.copies("a", 4, 0.0) == 4
    for number in range(400):
        demand.asked(f"b{number}", 0.0)
    assert demand.copies("b1", 4, 0.0) == 1
    assert demand.copies("c", 4, 0.0) == 1


def test_a_request_counts_half_after_each_half_life() -> None:
    """Also across the moment at which all is counted anew."""
    demand = Demand()
    for lives, adapter in enumerate("abc"):
        demand.asked(adapter, lives * HALF_LIFE_S)
    assert [demand.share(one) for one in "abc"] == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    for lives in (63, 65, 66):
        demand.asked(f"d{lives}", lives * HALF_LIFE_S)
    shares = [demand.share(f"d{lives}") for lives in (63, 65, 66)]
    assert shares == pytest.approx([1 / 13, 4 / 13, 8 / 13])


def test_the_demand_of_old_adapters_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it was of all requests, and with the homes that it gave."""
    monkeypatch.setattr(homes, "KEPT", 10)
    demand = Demand()
    for _ in range(100):
        demand.asked("a", 0.0)
    assert demand.copies("a", 4, 0.0) == 4
    for number in range(10):
        demand.asked(f"b{number}", 0.0)
    assert (demand.share("a"), demand.copies("a", 4, 0.0)) == (0.0, 1)
    assert [demand.share(f"b{number}") for number in range(10)] == [0.1] * 10


def test_demand_survives_a_year_without_a_request() -> None:
    """The decayed counts neither overflow nor lose the newest requests."""
    demand = Demand()
    demand.asked("a", 0.0)
    for at in range(50):
        demand.asked("b", 3.2e7 + at)
    assert demand.share("a") < 1e-6 < 0.99 < demand.share("b")
