"""What to load and unload next. Pure: both sides and the clock come in, actions come out.

*Unknown* never reaches this module: the caller has an engine that answered. The plan unloads nothing for
being absent from the volume; a name leaves the catalog by a tombstone alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TypeVar

from lora_fs.sidecar.model import Policy, PolicyKind, Record

ALWAYS = frozenset({PolicyKind.EAGER, PolicyKind.PINNED})

_Entry = TypeVar("_Entry", bound="Resident | Absent")


@dataclass(frozen=True, slots=True)
class Resident:
    """A name the engine holds. ``wanted`` is the record it should serve, None if withdrawn.

    ``current``: the engine has that record's bytes. ``idle_s``: since its last request.
    ``tenant``: whose share of the places it takes. ``leaving``: an unload of it is under way, or failed and
    waits out its delay. It takes a place, and the plan decides nothing about it. ``unknown``: the volume says
    nothing of it, as while its record is unreadable, or when its namespace is no longer served. It takes a
    place, and goes when it is idle or makes room, and not for being absent. ``outdated``: its name in the
    engine does not tell its bytes, as of an older lora-fs: no request goes to it.
    """

    name: str
    wanted: Record | None
    current: bool
    in_flight: int
    idle_s: float
    policy: Policy
    tenant: str = ""
    leaving: bool = False
    unknown: bool = False
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """A name to load before any request. ``may_try``: no failure waits out its delay."""

    name: str
    policy: Policy
    may_try: bool
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Engine's names to unload with the reason, those that wait for their requests; public names to load.

    ``spare``: those for which nobody makes room in an engine that has a bound of its own either.
    """

    unload: Mapping[str, str]
    draining: tuple[str, ...]
    load: tuple[str, ...]
    spare: frozenset[str]


def decide(
    resident: list[Resident],
    absent: list[Absent],
    capacity: int | None,
    weights: Mapping[str, int] | None = None,
) -> Plan:
    """Decide one pass.

    Args:
        capacity: how many the engine may have at once; None: no bound. Pinned adapters take at
            most all but one of it and make room for themselves; eager ones take free places only.
        weights: of tenants; 1 by default. The tenant that has most for its weight gives way
            first and loads last. None or empty: compare adapters across tenants.
    """
    unload: dict[str, str] = {}
    draining: list[str] = []
    for entry in resident:
        reason = None if entry.leaving else _reason_to_unload(entry)
        if reason is not None and entry.in_flight:
            draining.append(entry.name)
        elif reason is not None:
            unload[entry.name] = reason
    kept = {entry.name: entry for entry in resident if entry.name not in unload}
    shares = _Shares(weights or {}, kept.values())
    wanting = [one for one in absent if one.may_try]
    wanting.sort(key=lambda one: (-one.policy.priority, one.name))
    pinned = [one for one in wanting if one.policy.kind is PolicyKind.PINNED]
    eager = [one for one in wanting if one.policy.kind is not PolicyKind.PINNED]
    spare = frozenset(one.name for one in eager)
    if capacity is None:
        return Plan(unload, tuple(draining), tuple(one.name for one in (*pinned, *eager)), spare)
    firm = _firm(kept.values(), capacity)
    pinned = pinned[: max(0, capacity - 1 - len(firm))]
    free = capacity - len(kept)
    evictable = _evictable(kept.values(), firm)
    for gone in shares.give_way(evictable, len(pinned) - free):
        whose = f" of {gone.tenant}" if weights else ""
        unload[gone.name] = f"Evicted: the least recently used{whose} makes room"
        free += 1
    pinned = pinned[: max(free, 0)]
    load = [*pinned, *shares.take(pinned, eager, free - len(pinned))]
    return Plan(unload, tuple(draining), tuple(one.name for one in load), spare)


def next_to_go(
    resident: list[Resident], capacity: int, weights: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The name to unload, so that a request's adapter has a place; none while all are in use or firm."""
    evictable = _evictable(resident, _firm(resident, capacity))
    gone = _Shares(weights or {}, resident).give_way(evictable, 1)
    return stale(resident)[:1] or tuple(one.name for one in gone)


def _evictable(entries: Iterable[Resident], firm: frozenset[str]) -> list[Resident]:
    """The adapters that may go now, the least recently used first."""
    found = [one for one in entries if not (one.in_flight or one.leaving or one.name in firm)]
    return sorted(found, key=lambda one: -one.idle_s)


def stale(resident: list[Resident]) -> tuple[str, ...]:
    """Names that serve nothing any more and that nobody uses: they go first, as what they free is unknown."""
    return tuple(one.name for one in resident if not (one.current or one.in_flight or one.leaving))


def give_way(
    resident: list[Resident], lacks: int, weights: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """Names to unload, so that their copies make room for one that a request waits for.

    Lazy and sticky ones that nobody uses, the least recently used first. An eager one would come back. Of
    names that share a copy all go, or none: it is there as long as one of them needs it.

    Args:
        lacks: bytes. Where all that may go have less, nobody goes.
        weights: as in ``decide``.
    """
    firm = {_copy(one) for one in resident if not _may_give_way(one)}
    idle = [one for one in resident if _may_give_way(one) and _copy(one) not in firm]
    idle.sort(key=lambda one: -one.idle_s)
    copies = Counter(map(_copy, idle))
    chosen, freed = [], 0
    for one in _Shares(weights or {}, resident).give_way(idle, len(idle)):
        if freed >= lacks or one.wanted is None:
            break
        chosen.append(one)
        copies[_copy(one)] -= 1
        if not copies[_copy(one)]:  # the last of the names that share it
            freed += one.wanted.spec.size_bytes
    return tuple(one.name for one in chosen if not copies[_copy(one)]) if freed >= lacks else ()


def firm_bytes(resident: list[Resident]) -> int:
    """What the copies take that will give no room, however long one waits: of eager and pinned adapters."""
    firm = {
        _copy(one): one.wanted.spec.size_bytes
        for one in resident
        if one.wanted and one.current and one.policy.kind in ALWAYS
    }
    return sum(firm.values())


def _copy(entry: Resident) -> tuple[str, str] | None:
    return (entry.wanted.spec.digest, entry.wanted.name) if entry.wanted is not None else None


def _may_give_way(entry: Resident) -> bool:
    wanted = entry.wanted is not None and entry.current and not entry.leaving
    return wanted and not entry.in_flight and entry.policy.kind in (PolicyKind.LAZY, PolicyKind.STICKY)


def _firm(kept: Iterable[Resident], capacity: int) -> frozenset[str]:
    """The pinned adapters that stay. They leave one place to others, even if requests loaded more of them."""
    pinned = [entry for entry in kept if entry.policy.kind is PolicyKind.PINNED and not entry.leaving]
    pinned.sort(key=lambda entry: (-entry.policy.priority, entry.name))
    return frozenset(entry.name for entry in pinned[: max(0, capacity - 1)])


class _Shares:
    """How much each tenant has for its weight; without weights all are one tenant."""

    def __init__(self, weights: Mapping[str, int], held: Iterable[Resident]) -> None:
        self._weights = weights
        self._has = Counter(map(self._tenant, held))

    def give_way(self, entries: Iterable[Resident], count: int) -> Iterator[Resident]:
        """Up to ``count`` of these, in their order, each from the tenant that has most."""
        return self._in_turn(entries, count, -1)

    def take(self, before: Iterable[_Entry], entries: Iterable[_Entry], count: int) -> Iterator[_Entry]:
        """Up to ``count`` of these, in their order, each of the tenant that has least, ``before`` counted."""
        self._has.update(map(self._tenant, before))
        return self._in_turn(entries, count, 1)

    def _in_turn(self, entries: Iterable[_Entry], count: int, change: int) -> Iterator[_Entry]:
        """``change``: what a tenant has more by each; the tenant with the least of it comes next."""
        queues: dict[str, deque[_Entry]] = {}
        for entry in entries:
            queues.setdefault(self._tenant(entry), deque()).append(entry)

        def share(tenant: str) -> float:
            has = self._has[tenant] + max(change, 0)
            return change * has / self._weights.get(tenant, 1)

        turns = [(share(tenant), at, tenant) for at, tenant in enumerate(queues)]
        heapify(turns)
        for _ in range(count):
            if not turns:
                return
            _, at, tenant = turns[0]
            self._has[tenant] += change
            yield queues[tenant].popleft()
            if queues[tenant]:
                heapreplace(turns, (share(tenant), at, tenant))
            else:
                heappop(turns)

    def _tenant(self, entry: Resident | Absent) -> str:
        return entry.tenant if self._weights else ""


def _reason_to_unload(entry: Resident) -> str | None:
    if entry.outdated:
        return "Outdated: its name in the engine does not tell its bytes"
    if entry.wanted is None and not entry.unknown:
        return "Withdrawn: unregistered"
    if not entry.current and not entry.unknown:
        return "Superseded: the name serves another revision"
    is_idle = not entry.in_flight and entry.idle_s >= entry.policy.ttl_s
    if is_idle and entry.policy.kind is PolicyKind.LAZY:
        return f"Idle: no request for {entry.policy.ttl_s} s"
    return None
