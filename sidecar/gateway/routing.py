"""A gateway's view of its replicas, and the requests that wait for one. No I/O.

A replica's report says what it holds. Between two reports a gateway counts what it sent and got answered: an
adapter is loading from its first request to that request's answer, and then resident.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lora_fs.sidecar.gateway.choice import Choice, Peer, Reason, choose
from lora_fs.sidecar.gateway.homes import Demand, order
from lora_fs.sidecar.gateway.outliers import Outcome, Outliers
from lora_fs.sidecar.gateway.prefix import Chain, Prefixes
from lora_fs.sidecar.reconcile.placement import rendezvous

REPORT_LAG_S: Final = 0.2  # a report may be older than its request by so much
UNTOLD_S: Final = 300.0  # so long an adapter counts as loaded where a report may leave it out
_NO_PEERS: Final[frozenset[str]] = frozenset()
_COLD: Final = (Reason.COLD, Reason.WAIT)  # no replica holds the adapter


@dataclass(slots=True, eq=False)
class _Replica(Peer):
    resident: OrderedDict[str, float] = field(default_factory=OrderedDict)  # → last use by this gateway
    in_use: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from its arrival to its end.

    Attributes:
        adapter: None: the base model.
        start: called once, with the choice; its peer is None if no replica is ready.
        tried: replicas that it did not reach.
        peer: the replica that it is at, also once that one is lost; None while it waits.
    """

    adapter: str | None
    start: Callable[[Choice], None]
    chain: Chain = ()
    tried: frozenset[str] = _NO_PEERS
    peer: _Replica | None = None


class Router:
    """The replicas that are ready, and the requests under way and waiting.

    Attributes:
        ready: the names of the replicas that are ready.
        chosen: how often a request got a replica, or none, by reason: a retry counts again.
        ejections: how often it ejected a replica.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}  # those that are out, too: their requests go on
        self.ready: frozenset[str] = frozenset()
        self._demand, self._prefixes = Demand(), Prefixes()
        self._waiting: OrderedDict[str | None, list[Ticket]] = OrderedDict()  # by adapter
        self._outliers = Outliers()
        self.chosen: Counter[Reason] = Counter()
        self.ejections = 0

    @property
    def peers(self) -> Collection[Peer]:
        """The ready replicas."""
        return [one for name, one in self._replicas.items() if name in self.ready]

    @property
    def waiting(self) -> int:
        """How many requests wait for a replica that may load."""
        return sum(map(len, self._waiting.values()))

    @property
    def ejected(self) -> Mapping[str, float]:
        """The ready replicas that get no requests, since they failed, and for how many seconds more."""
        return self._outliers.ejected(self.ready, self._clock())

    def order(self, adapter: str) -> list[str]:
        """The ready replicas in an adapter's own order: its homes are the first ones."""
        return rendezvous(adapter, self.ready)

    def told(self, name: str, outcome: Outcome) -> float | None:
        """Note what an answer says of a replica. Return for how many seconds that ejects it, or None."""
        seconds = self._outliers.answered(name, outcome, self.ready, self._clock())
        if seconds is not None:
            self.ejections += 1
        return seconds

    def ask(self, ticket: Ticket) -> None:
        """Give a request a replica: at once if one holds its adapter, else when one may load it, in turn."""
        if ticket.adapter is not None and not ticket.tried:
            self._demand.asked(ticket.adapter, self._clock())
        choice = self._choose(ticket)
        if choice.reason not in _COLD:
            self._start(ticket, choice)
            return
        self._waiting.setdefault(ticket.adapter, []).append(ticket)
        if choice.reason is Reason.COLD:
            self._pump()  # others may have waited longer

    def leave(self, ticket: Ticket) -> None:
        """Forget a request that waits no longer, or end it where it is, however it ended."""
        peer, adapter, ticket.peer = ticket.peer, ticket.adapter, None
        if peer is None:
            self._wait_no_more(ticket)
            return
        peer.in_flight -= 1
        if adapter is None:
            return
        peer.in_use[adapter] -= 1
        if not peer.in_use[adapter]:
            del peer.in_use[adapter]
            if peer.loading.pop(adapter, None) is not None:
                self._pump()

    def answered(self, ticket: Ticket, *, served: bool) -> None:
        """Note that the answer of a request began: that replica has loaded its adapter, if ``served``."""
        peer, adapter = ticket.peer, ticket.adapter
        if peer is None or adapter is None:
            return
        was_loading = peer.loading.pop(adapter, None) is not None
        if served:
            self._used(peer, adapter)
            self._join(adapter)
        if was_loading:
            self._pump()

    def report(
        self,
        name: str,
        resident: Iterable[str],
        capacity: int | None,
        asked_at: float,
        load_s: float | None = None,
    ) -> None:
        """Take a replica's report: it is ready, and holds ``resident``, the one used longest ago first.

        Args:
            capacity: None: the replica may hold more than it tells this gateway.
            asked_at: when the poll began; adapters used here since then are resident as well.
            load_s: as ``Peer.load_s``.
        """
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = _Replica(name)
        if name not in self.ready:
            self.ready |= {name}
        since = asked_at - (REPORT_LAG_S if capacity is not None else UNTOLD_S)
        newer = [(one, at) for one, at in replica.resident.items() if at >= since]
        at_last = {one: replica.resident.get(one, 0.0) for one in resident}
        replica.resident.clear()
        replica.resident.update(at_last)
        for one, at in newer:
            replica.resident[one] = at
            replica.resident.move_to_end(one)
        for one in replica.resident.keys() & replica.loading.keys():
            del replica.loading[one]
        replica.capacity, replica.load_s = capacity, load_s
        for adapter in [*filter(replica.holds, self._waiting)]:
            self._join(adapter)
        self._pump()

    def lost(self, name: str, *, emptied: bool = False) -> None:
        """Take a replica out: it is not ready, or gone. Its requests go on, and count once it is back.

        Args:
            emptied: it restarted or is gone, and with it its requests and its prefix cache.
        """
        if name in self.ready:
            self.ready -= {name}
            self._replicas[name].resident.clear()
            self._pump()
        if emptied:
            self._replicas.pop(name, None)
            self._prefixes.forget(name)
            self._outliers.forget(name)

    def _choose(self, ticket: Ticket) -> Choice:
        names, now = self.ready - ticket.tried, self._clock()
        names = names.difference(self._outliers.ejected(self.ready, now)) or names
        if ticket.adapter is None:
            candidates: Iterable[str] = names
            copies = 1
        else:
            # Keeps the order of all; a retry and an ejection leave some out.
            candidates = [one for one in order(ticket.adapter, self.ready) if one in names]
            copies = self._demand.copies(ticket.adapter, len(names), now)
        prefix = self._prefixes.found(ticket.chain, names) if ticket.chain else {}
        peers = [self._replicas[name] for name in candidates]
        return choose(ticket.adapter, peers, copies=copies, prefix=prefix, now=now)

    def _start(self, ticket: Ticket, choice: Choice) -> None:
        self._wait_no_more(ticket)
        self.chosen[choice.reason] += 1
        adapter = ticket.adapter
        if choice.peer is not None:
            ticket.peer = peer = self._replicas[choice.peer.name]
            peer.in_flight += 1
            if adapter is not None:
                peer.in_use[adapter] += 1
                if not peer.holds(adapter):
                    peer.loading[adapter] = self._clock()
                    self._make_room(peer)
                elif adapter in peer.resident:
                    self._used(peer, adapter)
            if ticket.chain:
                self._prefixes.sent(ticket.chain, peer.name)
        ticket.start(choice)

    def _used(self, replica: _Replica, adapter: str) -> None:
        replica.resident[adapter] = self._clock()
        replica.resident.move_to_end(adapter)

    def _make_room(self, replica: _Replica) -> None:
        """Leave out what the replica probably evicts for a load: the adapters used longest ago."""
        if replica.capacity is None:
            return
        idle = [one for one in replica.resident if one not in replica.in_use]
        for one in idle[: max(0, len(replica.resident) + len(replica.loading) - replica.capacity)]:
            del replica.resident[one]

    def _pump(self) -> None:
        """Start the requests that waited longest, as far as replicas may load for them."""
        for adapter, tickets in [*self._waiting.items()]:
            ticket = next((one for one in tickets if not one.tried), tickets[0])
            choice = self._choose(ticket)
            if choice.reason is not Reason.WAIT:
                self._start(ticket, choice)
                self._join(adapter)
            elif not ticket.tried:  # no replica may load, for the next ones either
                return

    def _join(self, adapter: str | None) -> None:
        """Start the requests that wait for an adapter that a replica holds or loads by now."""
        for ticket in [*self._waiting.get(adapter, ())]:
            choice = self._choose(ticket)
            if choice.reason not in _COLD:
                self._start(ticket, choice)

    def _wait_no_more(self, ticket: Ticket) -> None:
        tickets = self._waiting.get(ticket.adapter, [])
        if ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del self._waiting[ticket.adapter]
