"""The router's state: what is loaded where, who waits, and that nothing is lost, on a clock of its own."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lora_fs.sidecar.gateway.choice import AHEAD, LATE, LOADS, PATIENCE_S, Choice, Reason
from lora_fs.sidecar.gateway.outliers import BASE_S, FAILURES, Outcome
from lora_fs.sidecar.gateway.routing import UNTOLD_S, Router, Ticket


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(router: Router, adapter: str | None, chain: tuple[int, ...] = ()) -> tuple[Ticket, list[Choice]]:
    choices: list[Choice] = []
    ticket = Ticket(adapter, choices.append, chain)
    router.ask(ticket)
    return ticket, choices


def loading(router: Router) -> list[Ticket]:
    """Let all loads of the one replica but one be under way."""
    return [asked(router, f"busy{number}")[0] for number in range(LOADS - 1)]


def test_requests_for_one_cold_adapter_share_its_load_and_others_wait_their_turn() -> None:
    """A replica is given the next cold adapter when one of its loads ended."""
    router = Router(Clock())
    router.report("r0", [], 2, 100.0)
    loading(router)
    first, one = asked(router, "a")
    _, joined = asked(router, "a")
    _, waits = asked(router, "b")
    assert [c[0].reason for c in (one, joined)] == [Reason.COLD, Reason.RESIDENT]
    assert (waits, router.waiting) == ([], 1)
    router.answered(first, served=True)
    assert waits[0].reason is Reason.COLD
    assert router.waiting == 0


def test_a_load_that_fails_or_whose_clients_leave_lets_the_next_one_begin() -> None:
    """What waits behind a load goes on when that fails, and when nobody waits for it any more."""
    router = Router(Clock())
    router.report("r0", [], 2, 100.0)
    loading(router)
    first, _ = asked(router, "a")
    second, then = asked(router, "b")
    _, last = asked(router, "c")
    router.answered(first, served=False)
    assert then
    assert not last
    router.leave(second)
    assert last[0].reason is Reason.COLD
    assert not any(peer.holds("a") for peer in router.peers)


def test_who_leaves_while_waiting_is_forgotten() -> None:
    """A client that leaves the queue is given no replica."""
    router = Router(Clock())
    router.report("r0", [], 2, 100.0)
    loading(router)
    first, _ = asked(router, "a")
    second, choices = asked(router, "b")
    router.leave(second)
    router.answered(first, served=True)
    assert choices == []
    assert router.waiting == 0
    assert not router._waiting


def test_a_report_older_than_an_answer_does_not_hide_what_was_loaded_since() -> None:
    """An adapter that was answered after the report was asked for stays resident."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", [], 8, clock.now)
    asked_at, clock.now = clock.now, clock.now + 0.5
    ticket, _ = asked(router, "a")
    router.answered(ticket, served=True)
    router.leave(ticket)
    router.report("r0", [], 8, asked_at)
    assert asked(router, "a")[1][0].reason is Reason.RESIDENT
    clock.now += 5
    router.leave(asked(router, "b")[0])


def test_a_report_that_may_leave_adapters_out_hides_none() -> None:
    """As of a replica whose namespaces the gateway may not read: what it served lately stays resident."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", [], None, clock.now)
    ticket, _ = asked(router, "a")
    router.answered(ticket, served=True)
    router.leave(ticket)
    for capacity, reason in ((None, Reason.RESIDENT), (8, Reason.COLD)):
        clock.now += UNTOLD_S / 2
        router.report("r0", [], capacity, clock.now)
        ticket, choices = asked(router, "a")
        assert choices[0].reason is reason
        router.leave(ticket)
    router.report("r0", [], None, clock.now + 2 * UNTOLD_S)
    assert asked(router, "a")[1][0].reason is Reason.COLD


def test_a_replica_that_comes_or_goes_is_in_every_order_or_in_none() -> None:
    """Also in the order of an adapter that was asked for before."""
    router = Router(Clock())
    for name in ("r0", "r1"):
        router.report(name, [], 2, 100.0)
        assert name in router.order("a")
    router.lost("r0")
    assert router.order("a") == ["r1"]


def test_waiting_requests_are_told_when_the_last_replica_is_lost() -> None:
    """Nobody waits for a fleet that is gone."""
    router = Router(Clock())
    router.report("r0", [], 2, 100.0)
    loading(router)
    asked(router, "a")
    _, waits = asked(router, "b")
    router.lost("r0")
    assert waits[0] == Choice(None, Reason.NONE)


def test_an_adapter_that_became_resident_meanwhile_waits_behind_no_cold_one() -> None:
    """Both its request that waits and its next one start at the report, and the cold one waits on."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", [], 8, clock.now)
    for number in range(LOADS):
        asked(router, f"busy{number}")
    _, cold = asked(router, "cold")
    _, waits = asked(router, "eager")
    router.report("r0", ["eager"], 8, clock.now)
    _, then = asked(router, "eager")
    assert [one.reason for one in (*waits, *then)] == [Reason.RESIDENT, Reason.RESIDENT]
    assert (cold, router.waiting) == ([], 1)


def test_cold_adapters_load_in_the_order_in_which_they_were_asked_for() -> None:
    """One that is asked for when a load has grown old does not overtake those that wait."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", [], 8, clock.now)
    for number in range(LOADS):
        asked(router, f"busy{number}")
    waiting = [asked(router, f"cold{number}")[1] for number in range(LOADS + 1)]
    clock.now += PATIENCE_S
    waiting.append(asked(router, "late")[1])
    assert [bool(choices) for choices in waiting] == [True] * LOADS + [False, False]


def test_a_replica_whose_loads_are_short_gets_the_next_one_before_the_answers_begin() -> None:
    """An answer that nobody streams begins long after its load; the replica said what a load takes."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", [], 8, clock.now, 0.01)
    for number in range(LOADS):
        asked(router, f"busy{number}")
    _, waits = asked(router, "cold")
    assert waits == []
    clock.now += 0.01 * LATE
    asked(router, "busy0")
    assert waits == []
    asked(router, "colder")
    assert [one.reason for one in waits] == [Reason.COLD]


def test_a_retry_that_must_wait_holds_up_no_other_adapter() -> None:
    """The one replica that is left for it is full; another request may load at the other one."""
    router = Router(Clock())
    for name in ("r0", "r1"):
        router.report(name, [], 8, 100.0)
    loads = [asked(router, f"busy{number}")[0] for number in range(2 * LOADS)]
    peers = {load.peer.name for load in loads if load.peer is not None}
    assert peers == {"r0", "r1"}
    free = next(load for load in loads if load.peer is not None and load.peer.name == "r0")
    retried: list[Choice] = []
    router.ask(Ticket("retried", retried.append, tried=frozenset({"r0"})))
    _, other = asked(router, "other")
    router.answered(free, served=True)
    assert retried == []
    assert [(one.peer and one.peer.name, one.reason) for one in other] == [("r0", Reason.COLD)]


@pytest.mark.parametrize("chain", [(), (1, 2)])
def test_an_adapter_that_all_ask_for_is_at_every_replica(chain: tuple[int, ...]) -> None:
    """Also with one prompt, which the first replica has."""
    router = Router(Clock())
    for number in range(4):
        router.report(f"r{number}", [], 8, 100.0)
    for _ in range(100):
        router.answered(asked(router, "a", chain)[0], served=True)
    assert all(20 <= peer.in_flight <= 30 for peer in router.peers)


def test_a_prompt_that_was_sent_before_goes_where_it_went_unless_that_replica_is_another_one() -> None:
    """The first one's cache is gone then."""
    router = Router(Clock())
    for number in range(4):
        router.report(f"r{number}", [], 8, 100.0)
    first, _ = asked(router, None, (1, 2))
    second, (choice,) = asked(router, None, (1, 2))
    assert (second.peer, choice.reason) == (first.peer, Reason.PREFIX)
    assert first.peer is not None
    router.lost(first.peer.name)
    router.report(first.peer.name, [], 8, 100.0)
    assert asked(router, None, (1, 2))[1][0].reason is Reason.PREFIX
    for number in range(4):
        router.lost(f"r{number}", emptied=True)
        router.report(f"r{number}", [], 8, 100.0)
    assert asked(router, None, (1, 2))[1][0].reason is Reason.BASE


def test_demand_gives_an_adapter_one_more_home_before_its_first_one_is_saturated() -> None:
    """Requests of before count, too; a retry is no request more."""
    for times, tried, reason in (
        (1, frozenset[str](), Reason.RESIDENT),
        (30, frozenset({"r9"}), Reason.RESIDENT),
        (30, frozenset[str](), Reason.HOME),
    ):
        router = Router(Clock())
        for number in range(2):
            router.report(f"r{number}", [], 8, 100.0)
        for _ in range(times):
            ticket = Ticket("a", lambda _: None, tried=tried)
            router.ask(ticket)
            router.answered(ticket, served=True)
            router.leave(ticket)
        reasons = [asked(router, "a")[1][0].reason for _ in range(AHEAD + 2)]
        assert reasons == [*[Reason.RESIDENT] * (AHEAD + 1), reason]


def test_a_request_at_a_replica_that_is_lost_ends_there() -> None:
    """Whether that is out then, or is back and loads the same adapter for another request."""
    router = Router(Clock())
    tickets = []
    for _ in range(3):
        router.report("r0", [], 8, 100.0)
        tickets.append(asked(router, "a")[0])
        router.lost("r0")
    router.leave(tickets[0])
    router.report("r0", [], 8, 100.0)
    asked(router, "a")
    router.leave(tickets[1])
    router.answered(tickets[2], served=True)
    (peer,) = router.peers
    assert (peer.in_flight, [*peer.loading], [*peer.resident]) == (2, [], ["a"])
    router.report("r0", ["a"], 1, 100.0)
    asked(router, "b")
    assert [*peer.resident] == ["a"], "the request that is there now still uses it"


def test_a_report_older_than_a_request_does_not_hide_what_it_uses() -> None:
    """The replica holds it, or loads it for the request."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", ["a"], 8, 100.0)
    clock.now = 110.0
    asked(router, "a")
    router.report("r0", [], 8, 110.0)
    (peer,) = router.peers
    assert peer.holds("a")


@pytest.mark.parametrize("capacity", [8, None])
def test_a_replica_that_was_out_holds_what_it_reports_alone(capacity: int | None) -> None:
    """Its engine may have restarted meanwhile."""
    router = Router(Clock())
    router.report("r0", [], capacity, 100.0)
    ticket, _ = asked(router, "a")
    router.answered(ticket, served=True)
    router.leave(ticket)
    router.lost("r0")
    router.report("r0", [], capacity, 100.0)
    (peer,) = router.peers
    assert not peer.holds("a")


@pytest.mark.parametrize(("emptied", "left"), [(False, 3), (True, 0)])
def test_requests_at_a_replica_count_again_once_it_is_back(emptied: bool, left: int) -> None:
    """Else the busiest replica would look idle, and get the next ones. One that restarted has none."""
    router = Router(Clock())
    for name in ("r0", "r1"):
        router.report(name, [], 8, 100.0)
    for _ in range(6):
        asked(router, None)
    router.lost("r0", emptied=emptied)
    assert [(one.name, one.in_flight) for one in router.peers] == [("r1", 3)]
    router.report("r0", [], 8, 100.0)
    assert {one.name: one.in_flight for one in router.peers} == {"r0": left, "r1": 3}


def test_a_replica_that_is_back_answers_who_waits_for_what_it_still_loads() -> None:
    """Its load went on while it was out."""
    router = Router(Clock())
    router.report("r0", [], 8, 100.0)
    asked(router, "a")
    router.lost("r0")
    router.report("r1", [], 8, 100.0)
    for number in range(LOADS):
        asked(router, f"busy{number}")
    _, waits = asked(router, "a")
    assert waits == []
    router.report("r0", [], 8, 100.0)
    assert [(one.peer and one.peer.name, one.reason) for one in waits] == [("r0", Reason.RESIDENT)]


def test_a_request_that_waits_starts_at_a_report_once_a_load_has_grown_old() -> None:
    """No answer has come meanwhile."""
    clock = Clock()
    router = Router(clock)
    router.report("r0", [], 8, clock.now)
    for number in range(LOADS):
        asked(router, f"busy{number}")
    _, waits = asked(router, "b")
    clock.now += PATIENCE_S
    router.report("r0", [], 8, clock.now)
    assert [one.reason for one in waits] == [Reason.COLD]


def test_a_load_takes_the_place_of_what_was_used_longest_ago() -> None:
    """As far as this gateway knows: between two reports, too."""
    router = Router(Clock())
    router.report("r0", ["a", "b"], 2, 100.0)
    ticket, _ = asked(router, "a")
    router.answered(ticket, served=True)
    router.leave(ticket)
    asked(router, "c")
    (peer,) = router.peers
    assert [*peer.resident] == ["a"]


def test_a_load_takes_no_place_of_an_adapter_that_a_request_uses() -> None:
    """Once the last of its requests is over, it may."""
    router = Router(Clock())
    router.report("r0", ["a"], 1, 100.0)
    (peer,) = router.peers
    first, second = (asked(router, "a")[0] for _ in range(2))
    router.leave(first)
    third, _ = asked(router, "b")
    assert [*peer.resident] == ["a"]
    router.leave(third)
    router.leave(second)
    asked(router, "c")
    assert [*peer.resident] == []


def test_a_report_that_names_an_adapter_ends_its_load() -> None:
    """Before its answer: the next adapter may be loaded there."""
    router = Router(Clock())
    router.report("r0", [], 8, 100.0)
    loading(router)
    asked(router, "a")
    _, waits = asked(router, "b")
    assert waits == []
    router.report("r0", ["a"], 8, 100.0)
    assert [one.reason for one in waits] == [Reason.COLD]


def test_an_ejected_replica_gets_no_request_until_its_time_is_over() -> None:
    """A request that the other one did not take gets it nevertheless."""
    clock = Clock()
    router = Router(clock)
    for name in ("r0", "r1"):
        router.report(name, [], 8, clock.now)
    first, other = router.order("a")
    for number in range(FAILURES):
        assert router.ejections == 0
        assert (router.told(first, Outcome.FAILED) is None) == (number < FAILURES - 1)
    assert (router.ejections, dict(router.ejected)) == (1, {first: BASE_S})
    ticket, choices = asked(router, "a")
    assert [one.peer and one.peer.name for one in choices] == [other]
    retried: list[Choice] = []
    router.ask(Ticket("a", retried.append, tried=frozenset({other})))
    assert [one.peer and one.peer.name for one in retried] == [first], "no other one is left"
    router.leave(ticket)
    clock.now += BASE_S
    assert router.ejected == {}


def test_a_replica_that_was_emptied_is_ejected_no_longer() -> None:
    """It restarted, and what failed before tells nothing of it."""
    router = Router(Clock())
    for name in ("r0", "r1"):
        router.report(name, [], 8, 100.0)
    for _ in range(FAILURES):
        router.told("r0", Outcome.FAILED)
    router.lost("r0")
    router.report("r0", [], 8, 100.0)
    assert [*router.ejected] == ["r0"]
    router.lost("r0", emptied=True)
    router.report("r0", [], 8, 100.0)
    assert router.ejected == {}


class Fleet(RuleBasedStateMachine):
    """Requests, answers, reports and losses in any order."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.router = Router(self.clock)
        self.open: list[tuple[Ticket, list[Choice]]] = []

    @rule(
        target=tickets,
        adapter=st.sampled_from(["a", "b", "c", "d", None]),
        prompt=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def ask(self, adapter: str | None, prompt: tuple[int, int]) -> tuple[Ticket, list[Choice]]:
        made = asked(self.router, adapter, prompt)
        self.open.append(made)
        return made

    @rule(ticket=tickets, served=st.booleans())
    def answer(self, ticket: tuple[Ticket, list[Choice]], served: bool) -> None:
        self.router.answered(ticket[0], served=served)

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: tuple[Ticket, list[Choice]]) -> None:
        self.router.leave(ticket[0])
        self.open.remove(ticket)

    @rule(
        name=st.sampled_from(["r0", "r1", "r2"]),
        resident=st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
        lag=st.floats(0, 2),
    )
    def report(self, name: str, resident: list[str], lag: float) -> None:
        self.router.report(name, resident, 2, self.clock.now - lag)

    @rule(name=st.sampled_from(["r0", "r1", "r2"]), emptied=st.booleans())
    def lose(self, name: str, emptied: bool) -> None:
        self.router.lost(name, emptied=emptied)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def counts_hold(self) -> None:
        """What is in flight is what was started and is not over; each request is started once at most."""
        started = [ticket for ticket, choices in self.open if ticket.peer is not None]
        assert all(len(choices) <= 1 for _, choices in self.open)
        for peer in self.router.peers:
            assert peer.in_flight == sum(ticket.peer is peer for ticket in started)
            assert not set(peer.loading) - {t.adapter for t in started if t.peer is peer}
            assert not set(peer.loading) & set(peer.resident)
        waiting = sum(ticket.peer is None and not choices for ticket, choices in self.open)
        assert self.router.waiting == waiting

    @invariant()
    def nobody_waits_for_an_adapter_that_is_there(self) -> None:
        """What a replica holds or loads, it answers."""
        waiting = {ticket.adapter for ticket, choices in self.open if ticket.peer is None and not choices}
        assert not [one for one in waiting if any(peer.holds(one or "") for peer in self.router.peers)]


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
