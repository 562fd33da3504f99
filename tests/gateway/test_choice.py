"""Properties of the choice: which replica answers a request, for any state of any fleet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.gateway.choice import (
    AHEAD,
    LOADS,
    PATIENCE_S,
    PREFIX_AHEAD,
    Peer,
    Reason,
    choose,
)
from lora_fs.sidecar.gateway.homes import SHRINK_S, Demand
from lora_fs.sidecar.gateway.prefix import BLOCK_BYTES, Prefixes, chain
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
    choice = choose("a", [idle, warm], copies=2, prefix={"warm": 3}, now=NOW)
    assert (choice.peer, choice.reason) == (warm, Reason.PREFIX)
    warm.in_flight += 1
    choice = choose("a", [idle, warm], copies=2, prefix={"warm": 3}, now=NOW)
    assert (choice.peer, choice.reason) == (idle, Reason.RESIDENT)


def test_a_load_that_hangs_holds_up_others_for_a_bounded_time() -> None:
    """After PATIENCE_S a load does not keep its replica from being given the next one."""
    peer = Peer("r0", loading={f"b{number}": NOW for number in range(LOADS)})
    assert choose("a", [peer], now=NOW + PATIENCE_S - 0.1).reason is Reason.WAIT
    assert choose("a", [peer], now=NOW + PATIENCE_S).reason is Reason.COLD


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


def test_demand_survives_a_year_without_a_request() -> None:
    """The decayed counts neither overflow nor lose the newest requests."""
    demand = Demand()
    demand.asked("a", 0.0)
    for at in range(50):
        demand.asked("b", 3.2e7 + at)
    assert demand.share("a") < 1e-6 < 0.99 < demand.share("b")


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_nothing_of_another_revision_matches(prompt: bytes, other: bytes) -> None:
    """The same prompt under another adapter's digest shares no block."""
    assert not set(chain("digest-1", prompt)) & set(chain("digest-2", prompt))
    same = 0
    while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
        same += 1
    shared = set(chain("d", prompt)) & set(chain("d", other))
    assert len(shared) == same // BLOCK_BYTES


def test_a_common_beginning_identifies_no_prompt() -> None:
    """A block with several successors, and one that all replicas have, are not counted."""
    prefixes, system = Prefixes(), b"s" * BLOCK_BYTES
    one, two = chain("d", system + b"1" * 2 * BLOCK_BYTES), chain("d", system + b"2" * 2 * BLOCK_BYTES)
    prefixes.sent(one, "r0")
    prefixes.sent(two, "r1")
    assert prefixes.found(one, {"r0", "r1", "r2"}) == {"r0": 2}
    assert prefixes.found(chain("d", system + b"3" * BLOCK_BYTES), {"r0", "r1", "r2"}) == {}
    prefixes.sent(one, "r1")
    assert prefixes.found(one, {"r0", "r1"}) == {}


def test_the_memory_of_prompts_is_bounded() -> None:
    """Old blocks are forgotten first."""
    prefixes = Prefixes(kept=100)
    for number in range(1000):
        prefixes.sent(chain("d", number.to_bytes(4, "big") * BLOCK_BYTES), "r0")
    assert len(prefixes) == 100
    assert prefixes.found(chain("d", (999).to_bytes(4, "big") * BLOCK_BYTES), {"r0", "r1"}) == {"r0": 4}
    prefixes.forget(["r0"])
    assert prefixes.found(chain("d", (999).to_bytes(4, "big") * BLOCK_BYTES), {"r0", "r1"}) == {}
