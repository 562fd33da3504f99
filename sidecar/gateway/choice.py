"""Which replica answers a request: a pure function of the replicas' last reports.

An adapter has homes, the first replicas of its own order that hold it. A request goes to a home: to the one
that has its prompt's beginning, else to the least busy. An adapter that no replica holds costs a load, and
a replica loads one adapter after another: a long queue of loads would only take the places of adapters in
use. So a replica has LOADS at most, and until one has ended the request waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

AHEAD: Final = 4  # requests that a home may have more than the least busy replica before another one helps
PREFIX_AHEAD: Final = 16  # likewise, of the home that has the prompt's beginning
SATURATED: Final = 1.25  # times the mean of requests in flight, and AHEAD more
LOADS: Final = 2  # loads at one replica at once: one runs, and the next one stages
PATIENCE_S: Final = 2.0  # a load that takes longer holds up no other
LATE: Final = 4  # likewise, times what a load takes at its replica
_NONE: Final[Mapping[str, int]] = {}


class Reason(StrEnum):
    """Why a replica gets a request.

    Attributes:
        BASE: the request names no adapter; this is the least busy replica.
        PREFIX: it has the beginning of the prompt.
        RESIDENT: it holds the adapter.
        HOME: the adapter gets one more copy there, since its demand needs it.
        SPILL: every home is saturated; this is the next replica in the adapter's order.
        COLD: no replica holds the adapter; this one loads it.
        WAIT: no replica may begin a load now; the request waits.
        NONE: no replica is ready.
    """

    BASE = "base"
    PREFIX = "prefix"
    RESIDENT = "resident"
    HOME = "home"
    SPILL = "spill"
    COLD = "cold"
    WAIT = "wait"
    NONE = "none"


@dataclass(slots=True, eq=False)
class Peer:
    """A ready replica, as the choice sees it.

    Attributes:
        name: the replica's id, which the hash of an adapter's order uses.
        in_flight: requests under way there.
        resident: adapters that it holds.
        loading: adapters that it loads, and when each load began, in seconds.
        capacity: adapters that it may hold; None: no bound.
        load_s: seconds that a load takes there, by its last ones; None: it did not say.
    """

    name: str
    in_flight: int = 0
    resident: Collection[str] = ()
    loading: dict[str, float] = field(default_factory=dict)
    capacity: int | None = None
    load_s: float | None = None

    def holds(self, adapter: str | None) -> bool:
        """Return whether a request for ``adapter`` needs no load of its own here."""
        return adapter in self.resident or adapter in self.loading

    def loads(self, now: float) -> int:
        """Return how many loads are under way that another one should wait for.

        A gateway sees a load's end with the next report, or as the answer begins. An answer that is not
        streamed begins late.
        """
        most_s = PATIENCE_S if self.load_s is None else min(PATIENCE_S, LATE * self.load_s)
        return sum(now - since < most_s for since in self.loading.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, or None where the request waits or fails, and why."""

    peer: Peer | None
    reason: Reason


def choose(
    adapter: str | None,
    order: Sequence[Peer],
    *,
    copies: int = 1,
    prefix: Mapping[str, int] = _NONE,
    now: float = 0.0,
) -> Choice:
    """Choose the replica that answers a request.

    Args:
        adapter: the adapter's name; None: the request is for the base model.
        order: the ready replicas, in the adapter's own order.
        copies: how many homes its demand asks for, 1 or more.
        prefix: replica → how many blocks of this very prompt it has.
        now: seconds, on the clock of ``Peer.loading``.
    """
    if not order:
        return Choice(None, Reason.NONE)
    if adapter is None:
        return _among(order, prefix, Reason.BASE)
    holders = [peer for peer in order if peer.holds(adapter)]
    if not holders:
        return _cold(order, now)
    chosen = _among(holders[:copies], prefix, Reason.RESIDENT)
    assert chosen.peer is not None
    busy = chosen.peer.in_flight
    bound = busy - (PREFIX_AHEAD if chosen.reason is Reason.PREFIX else AHEAD)
    others = [peer for peer in holders[copies:] if peer.in_flight < bound]
    if others:  # a copy that is there costs nothing
        return Choice(min(others, key=_in_flight), Reason.RESIDENT)
    more = _helper(adapter, order, bound, now)
    if more is None:
        return chosen
    if len(holders) < copies:
        return Choice(more, Reason.HOME)
    mean = sum(map(_in_flight, order)) / len(order)
    if busy > SATURATED * mean + AHEAD and 2 * more.in_flight < busy:
        return Choice(more, Reason.SPILL)
    return chosen


def _in_flight(peer: Peer) -> int:
    return peer.in_flight


def _among(peers: Sequence[Peer], prefix: Mapping[str, int], otherwise: Reason) -> Choice:
    """Choose the peer with the longest prefix, unless it is too busy; else the least busy one."""
    least = min(peers, key=_in_flight)
    if prefix:
        best = max(peers, key=lambda peer: (prefix.get(peer.name, 0), -peer.in_flight))
        if prefix.get(best.name, 0) and best.in_flight <= least.in_flight + PREFIX_AHEAD:
            return Choice(best, Reason.PREFIX)
    return Choice(least, otherwise)


def _cold(order: Sequence[Peer], now: float) -> Choice:
    """Choose who loads: the first in order of those that have a load free and are not busier than others."""
    free = [peer for peer in order if peer.loads(now) < LOADS]
    if not free:
        return Choice(None, Reason.WAIT)
    bound = min(map(_in_flight, free)) + AHEAD
    return Choice(next(peer for peer in free if peer.in_flight <= bound), Reason.COLD)


def _helper(adapter: str, order: Sequence[Peer], bound: int, now: float) -> Peer | None:
    """Return the first replica in order that may take a copy: one load more than a cold request may.

    Args:
        bound: the replica has fewer requests in flight.
    """
    for peer in order:
        if not peer.holds(adapter) and peer.in_flight < bound and peer.loads(now) <= LOADS:
            return peer
    return None
