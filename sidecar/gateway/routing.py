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
from lora_fs.sidecar.gateway.homes import Demand, Orders
from lora_fs.sidecar.gateway.outliers import Outcome, Outliers
from lora_fs.sidecar.gateway.prefix import Chain, Prefixes

REPORT_LAG_S: Final = 0.2  # a report may be older than its request by so much
_NO_PEERS: Final[frozenset[str]] = frozenset()


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from its arrival to its end.

    Attributes:
        adapter: None: the base model.
        start: called once, with the choice; its peer is None if no replica is ready.
        tried: replicas that it did not reach.
        peer: where it is now; None while it waits.
    """

    adapter: str | None
    start: Callable[[Choice], None]
    chain: Chain = ()
    tried: frozenset[str] = _NO_PEERS
    peer: Peer | None = None


@dataclass(slots=True, eq=False)
class _Replica:
    peer: Peer
    resident: OrderedDict[str, float] = field(default_factory=OrderedDict)  # → last use by this gateway
    in_use: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.peer.resident = self.resident


class Router:
    """The replicas that are ready, and the requests under way and waiting.

    Attributes:
        chosen: how many requests got a replica, by reason.
        ejections: how often it ejected a replica.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._names: frozenset[str] = frozenset()
        self._orders, self._demand, self._prefixes = Orders(), Demand(), Prefixes()
        self._waiting: OrderedDict[str, list[Ticket]] = OrderedDict()
        self._outliers = Outliers()
        self.chosen: Counter[Reason] = Counter()
        self.ejections = 0

    @property
    def peers(self) -> Collection[Peer]:
        """The ready replicas."""
        return [one.peer for one in self._replicas.values()]

    @property
    def waiting(self) -> int:
        """How many requests wait for a replica that may load."""
        return sum(map(len, self._waiting.values()))

    @property
    def ejected(self) -> Mapping[str, float]:
        """The ready replicas that get no requests, since they failed, and for how many seconds more."""
        return self._outliers.ejected(self._names, self._clock())

    def order(self, adapter: str) -> list[str]:
        """The ready replicas in an adapter's own order: its homes are the first ones."""
        return list(self._orders.of(adapter, self._names))

    def told(self, name: str, outcome: Outcome) -> float | None:
        """Note what an answer says of a replica. Return for how many seconds that ejects it, or None."""
        seconds = self._outliers.answered(name, outcome, self._names, self._clock())
        if seconds is not None:
            self.ejections += 1
        return seconds

    def ask(self, ticket: Ticket) -> None:
        """Give a request a replica: at once, or when one may load its adapter."""
        if ticket.adapter is not None:
            if not ticket.tried:
                self._demand.asked(ticket.adapter, self._clock())
            if ticket.adapter in self._waiting and not ticket.tried:
                self._waiting[ticket.adapter].append(ticket)
                return
        choice = self._choose(ticket)
        if choice.reason is Reason.WAIT and ticket.adapter is not None:
            self._waiting.setdefault(ticket.adapter, []).append(ticket)
            return
        self._start(ticket, choice)

    def leave(self, ticket: Ticket) -> None:
        """Forget a request that waits no longer, or end it where it is."""
        if ticket.peer is not None:
            self.ended(ticket)
        elif ticket.adapter is not None and ticket in self._waiting.get(ticket.adapter, ()):
            self._waiting[ticket.adapter].remove(ticket)
            if not self._waiting[ticket.adapter]:
                del self._waiting[ticket.adapter]

    def answered(self, ticket: Ticket, *, served: bool) -> None:
        """Note that the answer of a request began: that replica has loaded its adapter, if ``served``."""
        peer, adapter = ticket.peer, ticket.adapter
        replica = self._replicas.get(peer.name) if peer is not None else None
        if replica is None or replica.peer is not peer or adapter is None:
            return
        was_loading = peer.loading.pop(adapter, None) is not None
        if served:
            self._used(replica, adapter)
        if was_loading:
            self._pump()

    def ended(self, ticket: Ticket) -> None:
        """Note that a request is over, however it ended."""
        peer, adapter, ticket.peer = ticket.peer, ticket.adapter, None
        if peer is None:
            return
        peer.in_flight -= 1
        replica = self._replicas.get(peer.name)
        if replica is None or replica.peer is not peer or adapter is None:
            return
        replica.in_use[adapter] -= 1
        if replica.in_use[adapter] <= 0:
            del replica.in_use[adapter]
            if peer.loading.pop(adapter, None) is not None:
                self._pump()

    def report(self, name: str, resident: Iterable[str], capacity: int | None, asked_at: float) -> None:
        """Take a replica's report: it is ready, and holds ``resident``, the one used longest ago first.

        Args:
            asked_at: when the poll began; adapters used here since then are resident as well.
        """
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = _Replica(Peer(name))
            self._names = frozenset(self._replicas)
        since = asked_at - REPORT_LAG_S
        newer = [(one, at) for one, at in replica.resident.items() if at >= since]
        at_last = {one: replica.resident.get(one, 0.0) for one in resident}
        replica.resident.clear()
        replica.resident.update(at_last)
        for one, at in newer:
            replica.resident[one] = at
            replica.resident.move_to_end(one)
        for one in replica.resident.keys() & replica.peer.loading.keys():
            del replica.peer.loading[one]
        replica.peer.capacity = capacity
        self._pump()

    def lost(self, name: str, *, emptied: bool = False) -> None:
        """Take a replica out: it is not ready, or gone. Its requests go on.

        Args:
            emptied: it restarted or is gone, and with it its prefix cache.
        """
        if self._replicas.pop(name, None) is not None:
            self._names = frozenset(self._replicas)
            self._pump()
        if emptied:
            self._prefixes.forget((name,))
            self._outliers.forget(name)

    def _choose(self, ticket: Ticket) -> Choice:
        names, now = self._names - ticket.tried, self._clock()
        names = names.difference(self._outliers.ejected(self._names, now)) or names
        if ticket.adapter is None:
            order: Iterable[str] = names
            copies = 1
        else:
            # Keeps the order of all; a retry and an ejection leave some out.
            order = [one for one in self._orders.of(ticket.adapter, self._names) if one in names]
            copies = self._demand.copies(ticket.adapter, max(1, len(names)), now)
        prefix = self._prefixes.found(ticket.chain, names) if ticket.chain else {}
        peers = [self._replicas[name].peer for name in order]
        return choose(ticket.adapter, peers, copies=copies, prefix=prefix, now=now)

    def _start(self, ticket: Ticket, choice: Choice) -> None:
        self.chosen[choice.reason] += 1
        peer, adapter = choice.peer, ticket.adapter
        if peer is not None:
            ticket.peer = peer
            peer.in_flight += 1
            if adapter is not None:
                replica = self._replicas[peer.name]
                replica.in_use[adapter] += 1
                if not peer.holds(adapter):
                    peer.loading[adapter] = self._clock()
                    self._make_room(replica)
                elif adapter in replica.resident:
                    self._used(replica, adapter)
            if ticket.chain:
                self._prefixes.sent(ticket.chain, peer.name)
        ticket.start(choice)

    def _used(self, replica: _Replica, adapter: str) -> None:
        replica.resident[adapter] = self._clock()
        replica.resident.move_to_end(adapter)

    def _make_room(self, replica: _Replica) -> None:
        """Leave out what the replica probably evicts for a load: the adapters used longest ago."""
        peer = replica.peer
        if peer.capacity is None:
            return
        idle = [one for one in replica.resident if one not in replica.in_use]
        for one in idle[: max(0, len(replica.resident) + len(peer.loading) - peer.capacity)]:
            del replica.resident[one]

    def _pump(self) -> None:
        """Start the requests that waited longest, as far as replicas may load for them."""
        while self._waiting:
            adapter, tickets = next(iter(self._waiting.items()))
            choice = self._choose(tickets[0])
            if choice.reason is Reason.WAIT:
                return
            del self._waiting[adapter]
            self._start(tickets[0], choice)
            for ticket in tickets[1:]:
                self.ask_again(ticket)

    def ask_again(self, ticket: Ticket) -> None:
        """Choose for a request that waited behind another for its adapter; it may wait on."""
        choice = self._choose(ticket)
        if choice.reason is Reason.WAIT and ticket.adapter is not None:
            self._waiting.setdefault(ticket.adapter, []).append(ticket)
        else:
            self._start(ticket, choice)
