"""Who gets a request: the production gateway, and what it is compared with."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Protocol

from replicas import Clock, Replica, Request

from lora_fs.sidecar.gateway.choice import LOADS, Choice
from lora_fs.sidecar.gateway.routing import Router, Ticket

POINTS = 100  # of each replica on the ring
AGAIN_S = 0.01  # in which the oracle looks again for a replica that may load
BOUND = 1.25  # times the mean of requests in flight: HAProxy's hash-balance-factor 125


class Policy(Protocol):
    """Gives requests to replicas. ``fleet`` holds the replicas that are ready."""

    fleet: Mapping[str, Replica]

    def ask(self, request: Request) -> None:
        """Give it to a replica, now or later."""

    def over(self, request: Request, *, served: bool) -> None:
        """Note that it is over."""

    def report(self, replica: Replica, resident: list[str], asked_at: float) -> None:
        """Learn what a replica held at ``asked_at``."""

    def lost(self, name: str) -> None:
        """Learn that a replica is gone."""


class Gateways:
    """Production routers side by side, each with what it alone knows."""

    def __init__(self, clock: Clock, fleet: Mapping[str, Replica], count: int = 1) -> None:
        self.fleet, self._clock = fleet, clock
        self.routers = [Router(clock) for _ in range(count)]
        self._tickets: dict[Request, tuple[Router, Ticket]] = {}
        self._turn = 0

    def ask(self, request: Request) -> None:
        """As ``Policy.ask``."""
        self._turn += 1
        self._send(request, self.routers[self._turn % len(self.routers)], frozenset())

    def _send(self, request: Request, router: Router, tried: frozenset[str]) -> None:
        def start(choice: Choice) -> None:
            if choice.peer is None:
                self._clock.after(1.0, lambda: self._send(request, router, frozenset()))
                return
            name = choice.peer.name
            replica = self.fleet.get(name)
            if replica is None:  # it takes no connection
                self._clock.after(0.0, lambda: self._elsewhere(request, router, ticket, name))
                return
            self._tickets[request] = router, ticket
            replica.take(request)

        ticket = Ticket(request.adapter, start, tried=tried)
        router.ask(ticket)

    def _elsewhere(self, request: Request, router: Router, ticket: Ticket, name: str) -> None:
        router.lost(name, emptied=True)
        router.leave(ticket)
        self._send(request, router, ticket.tried | {name})

    def over(self, request: Request, *, served: bool) -> None:
        """As ``Policy.over``."""
        router, ticket = self._tickets.pop(request)
        router.answered(ticket, served=served)
        router.leave(ticket)

    def report(self, replica: Replica, resident: list[str], asked_at: float) -> None:
        """As ``Policy.report``."""
        if self.fleet.get(replica.name) is replica:
            for router in self.routers:
                router.report(replica.name, resident, replica.pace.places, asked_at, replica.pace.load_s)

    def lost(self, name: str) -> None:
        """As ``Policy.lost``: it says so itself. One that dies is found out."""
        for router in self.routers:
            router.lost(name, emptied=True)


class _AtOnce:
    """A policy that chooses from the fleet as it is, and learns nothing."""

    def __init__(self, fleet: Mapping[str, Replica]) -> None:
        self.fleet = fleet

    def choose(self, adapter: str) -> Replica:
        raise NotImplementedError

    def ask(self, request: Request) -> None:
        """As ``Policy.ask``."""
        self.choose(request.adapter).take(request)

    def over(self, request: Request, *, served: bool) -> None:
        """As ``Policy.over``."""

    def report(self, replica: Replica, resident: list[str], asked_at: float) -> None:
        """As ``Policy.report``."""

    def lost(self, name: str) -> None:
        """As ``Policy.lost``."""


class Random(_AtOnce):
    """Any replica."""

    def __init__(self, fleet: Mapping[str, Replica], seed: int) -> None:
        super().__init__(fleet)
        self._random = random.Random(seed)

    def choose(self, adapter: str) -> Replica:
        """Return any replica."""
        return self._random.choice([*self.fleet.values()])


class Hashing(_AtOnce):
    """Consistent hashing on a ring; with ``bound``, the next replica whose load is below bound × mean."""

    def __init__(self, fleet: Mapping[str, Replica], bound: float = math.inf) -> None:
        super().__init__(fleet)
        self._bound = bound
        self._names: frozenset[str] = frozenset()
        self._ring: list[tuple[bytes, str]] = []

    def choose(self, adapter: str) -> Replica:
        """Return the first replica on the ring from the adapter's point that is not above the bound."""
        if self.fleet.keys() != self._names:
            self._names = frozenset(self.fleet)
            self._ring = sorted((_hash(f"{one}/{n}"), one) for one in self._names for n in range(POINTS))
        total = sum(len(one.under_way) for one in self.fleet.values()) if self._bound < math.inf else 0
        most = self._bound if total == 0 else math.ceil(self._bound * (total + 1) / len(self.fleet))
        at = bisect.bisect(self._ring, (_hash(adapter), ""))
        for step in range(len(self._ring)):
            replica = self.fleet[self._ring[(at + step) % len(self._ring)][1]]
            if len(replica.under_way) < most:
                return replica
        raise AssertionError("one is below the mean")


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


class Oracle(_AtOnce):
    """Knows what each replica holds and does now. With eviction by true demand it is near the optimum.

    One that holds the adapter answers, the least busy. A copy is added where all of these have over twice
    the mean of requests under way. Loads go where fewest are pending, and wait until that is below ``LOADS``.
    """

    def __init__(self, clock: Clock, fleet: Mapping[str, Replica]) -> None:
        super().__init__(fleet)
        self._clock = clock

    def ask(self, request: Request) -> None:
        """As ``Policy.ask``."""
        replica = self.choose(request.adapter)
        if replica.holds(request.adapter) or replica.pending < LOADS:
            replica.take(request)
        else:
            self._clock.after(AGAIN_S, lambda: self.ask(request))

    def choose(self, adapter: str) -> Replica:
        """Return the least busy replica that holds the adapter, else the one that loads it soonest."""
        holders = [one for one in self.fleet.values() if one.holds(adapter)]
        soonest = min(self.fleet.values(), key=lambda one: (one.pending, len(one.under_way)))
        if not holders:
            return soonest
        best = min(holders, key=lambda one: len(one.under_way))
        mean = sum(len(one.under_way) for one in self.fleet.values()) / len(self.fleet)
        busy = len(best.under_way)
        return soonest if busy > 2 * mean + 1 and 2 * len(soonest.under_way) < busy else best


Make = Callable[[Clock, Mapping[str, Replica], int], Policy]
POLICIES: Mapping[str, Make] = {
    "random": lambda clock, fleet, seed: Random(fleet, seed),
    "consistent hashing": lambda clock, fleet, seed: Hashing(fleet),
    "bounded-load hashing": lambda clock, fleet, seed: Hashing(fleet, BOUND),
    "gateway": lambda clock, fleet, seed: Gateways(clock, fleet),
    "3 gateways": lambda clock, fleet, seed: Gateways(clock, fleet, 3),
    "oracle": lambda clock, fleet, seed: Oracle(clock, fleet),
}
