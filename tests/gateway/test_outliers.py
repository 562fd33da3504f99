"""Ejection of replicas that fail: how many, for how long, and for which answers. On a clock of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lora_fs.sidecar.gateway.choice import Choice, Reason
from lora_fs.sidecar.gateway.outliers import BASE_S, FAILURES, MAX_S, PART, Outcome, Outliers, outcome
from lora_fs.sidecar.gateway.routing import Router, Ticket

NAMES = [f"r{number}" for number in range(7)]


@pytest.mark.parametrize(
    ("status", "has_reason", "told"),
    [
        (200, False, Outcome.SERVED),
        (307, False, Outcome.SERVED),
        (400, False, Outcome.NEITHER),
        (404, True, Outcome.NEITHER),
        (429, False, Outcome.NEITHER),
        (500, False, Outcome.FAILED),
        (500, True, Outcome.FAILED),
        (501, False, Outcome.NEITHER),
        (502, False, Outcome.FAILED),
        (503, False, Outcome.FAILED),
        (503, True, Outcome.NEITHER),
        (504, True, Outcome.FAILED),
    ],
)
def test_what_an_answer_says_of_its_replica(status: int, has_reason: bool, told: Outcome) -> None:
    """A client's mistake and a reasoned 503 say nothing of a replica; every other 5xx is its failure."""
    assert outcome(status, has_reason=has_reason) is told


def fail(outliers: Outliers, replica: str, fleet: list[str], now: float) -> float | None:
    """Let a replica fail until it is ejected, or would be."""
    return [outliers.answered(replica, Outcome.FAILED, fleet, now) for _ in range(FAILURES)][-1]


def test_each_ejection_lasts_longer_than_the_one_before_and_good_times_shorten_the_next() -> None:
    """30 s, 60 s, and so on to 300 s; after good times it is 30 s once more."""
    outliers, now, lasted = Outliers(), 1000.0, []
    for _ in range(12):
        seconds = fail(outliers, "r0", NAMES, now)
        assert seconds is not None
        assert outliers.ejected(NAMES, now) == {"r0": seconds}
        assert not outliers.ejected(NAMES, now + seconds)
        lasted.append(seconds)
        now += seconds
    assert lasted[:3] == [BASE_S, 2 * BASE_S, 3 * BASE_S]
    assert lasted[-1] == MAX_S
    assert fail(outliers, "r0", NAMES, now + 20 * BASE_S) == BASE_S
    assert fail(outliers, "r0", NAMES, now + 21 * BASE_S) == 2 * BASE_S
    assert fail(outliers, "r0", NAMES, now + 24 * BASE_S) == 2 * BASE_S, "one good time is worth one ejection"


def test_what_fails_at_an_ejected_replica_makes_its_time_no_longer() -> None:
    """It had those requests before."""
    outliers = Outliers()
    assert fail(outliers, "r0", NAMES, 1000.0) == BASE_S
    assert fail(outliers, "r0", NAMES, 1000.0 + BASE_S / 2) is None
    assert outliers.ejected(NAMES, 1000.0 + BASE_S / 2) == {"r0": BASE_S / 2}
    assert outliers.answered("r0", Outcome.FAILED, NAMES, 1000.0 + BASE_S) is None
    assert outliers.ejected(NAMES, 1000.0 + BASE_S) == {}


@pytest.mark.parametrize(("size", "most"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (7, 2)])
def test_a_third_of_a_fleet_is_ejected_at_most(size: int, most: int) -> None:
    """One of two, and never the only one."""
    outliers, fleet = Outliers(), NAMES[:size]
    assert sum(fail(outliers, one, fleet, 1000.0) is not None for one in fleet) == most


def test_a_fleet_that_becomes_smaller_gets_back_whose_ejection_ends_first() -> None:
    """Of two that were ejected."""
    outliers = Outliers()
    for number in range(2):
        fail(outliers, f"r{number}", NAMES, 1000.0 + number)
    assert outliers.ejected(NAMES, 1001.0).keys() == {"r0", "r1"}
    assert outliers.ejected(NAMES[:3], 1001.0) == {"r1": BASE_S}


def test_a_request_that_it_serves_between_failures_saves_a_replica() -> None:
    """Only failures one after another eject it, however many there are in all."""
    outliers = Outliers()
    for told in [*[Outcome.FAILED] * (FAILURES - 1), Outcome.SERVED] * 3:
        assert outliers.answered("r0", told, NAMES, 1000.0) is None


@given(st.lists(st.sampled_from([Outcome.FAILED, Outcome.NEITHER]), max_size=40))
def test_what_says_nothing_of_a_replica_neither_ejects_it_nor_saves_it(told: list[Outcome]) -> None:
    """It is ejected at the fifth failure, whatever clients' mistakes came between."""
    outliers, failed = Outliers(), 0
    for one in told:
        failed += one is Outcome.FAILED
        is_ejected = outliers.answered("r0", one, NAMES, 5.0) is not None
        assert is_ejected == (one is Outcome.FAILED and failed == FAILURES)


class Fleet(RuleBasedStateMachine):
    """Answers of all kinds, replicas that come and go, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.outliers, self.now = Outliers(), 100.0
        self.fleet = set(NAMES)
        self.failed = dict.fromkeys(NAMES, 0)  # one after another

    @rule(replica=st.sampled_from(NAMES), told=st.sampled_from(Outcome), times=st.integers(1, 2 * FAILURES))
    def answer(self, replica: str, told: Outcome, times: int) -> None:
        for _ in range(times):
            before = self.outliers.ejected(self.fleet, self.now)
            if told is Outcome.FAILED:
                self.failed[replica] += 1
            elif told is Outcome.SERVED:
                self.failed[replica] = 0
            seconds = self.outliers.answered(replica, told, self.fleet, self.now)
            after = self.outliers.ejected(self.fleet, self.now)
            if seconds is None:
                assert after == before
            else:
                assert BASE_S <= seconds <= MAX_S
                assert self.failed[replica] >= FAILURES
                assert after == pytest.approx({**before, replica: seconds})

    @rule(replica=st.sampled_from(NAMES), emptied=st.booleans())
    def leave(self, replica: str, emptied: bool) -> None:
        self.fleet.discard(replica)
        if emptied:
            self.outliers.forget(replica)
            self.failed[replica] = 0

    @rule(replica=st.sampled_from(NAMES))
    def join(self, replica: str) -> None:
        self.fleet.add(replica)

    @rule(seconds=st.floats(0, 2 * MAX_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def enough_replicas_stay(self) -> None:
        """A third is ejected at most, one of two, and never the only one; each is back in time."""
        ejected = self.outliers.ejected(self.fleet, self.now)
        assert set(ejected) <= self.fleet
        assert len(ejected) <= max(1, len(self.fleet) // PART)
        assert len(ejected) < max(1, len(self.fleet))
        assert all(0 < left <= MAX_S for left in ejected.values())
        assert not self.outliers.ejected(self.fleet, self.now + MAX_S)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(router: Router, adapter: str | None, tried: frozenset[str] = frozenset()) -> str | None:
    """Return the replica that a request is given; the request is over at once."""
    choices: list[Choice] = []
    ticket = Ticket(adapter, choices.append, tried=tried)
    router.ask(ticket)
    peer = choices[0].peer
    router.leave(ticket)
    return None if peer is None else peer.name


@pytest.mark.parametrize("adapter", ["a", None])
def test_an_ejected_replica_keeps_no_adapters_home_and_has_it_again_when_it_is_back(
    adapter: str | None,
) -> None:
    """Its adapters' requests go to the other replica, and come back after the ejection."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", ["a"], 8, clock.now)
    router.report("r1", [], 8, clock.now)
    for _ in range(FAILURES):
        router.told("r0", Outcome.FAILED)
    assert (router.ejected, router.ejections) == ({"r0": BASE_S}, 1)
    assert asked(router, adapter) == "r1"
    assert asked(router, adapter, frozenset({"r1"})) == "r0", "rather than nobody"
    clock.now += BASE_S
    router.report("r1", [], 8, clock.now)
    assert asked(router, "a") == "r0"
    assert router.chosen[Reason.NONE] == 0


def test_a_replica_that_was_started_anew_is_in_at_once() -> None:
    """What failed before is another process."""
    router = Router(Clock())
    for name in ("r0", "r1"):
        router.report(name, [], 8, 100.0)
    for _ in range(FAILURES):
        router.told("r0", Outcome.FAILED)
    router.lost("r0", emptied=True)
    router.report("r0", [], 8, 100.0)
    assert not router.ejected
