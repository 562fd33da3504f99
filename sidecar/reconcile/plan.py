"""What to load and unload next. Pure: both sides and the clock come in, actions come out.

*Unknown* never reaches this module: it is called only with an engine that answered. Nothing
is unloaded for being absent from the volume; a name leaves the catalog by a tombstone alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_fs.sidecar.model import Policy, PolicyKind, Record

ALWAYS = frozenset({PolicyKind.EAGER, PolicyKind.PINNED})


@dataclass(frozen=True, slots=True)
class Resident:
    """A name the engine holds. ``wanted`` is the record it should serve, None if withdrawn.

    ``current``: what is loaded are that record's bytes. ``idle_s``: since its last request.
    """

    name: str
    wanted: Record | None
    current: bool
    in_flight: int
    idle_s: float
    policy: Policy


@dataclass(frozen=True, slots=True)
class Absent:
    """A name to be loaded unasked. ``may_try``: no failure is waiting out its delay."""

    name: str
    policy: Policy
    may_try: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Names to unload with the reason, names that wait for their requests, names to load in order."""

    unload: Mapping[str, str]
    draining: tuple[str, ...]
    load: tuple[str, ...]


def decide(resident: list[Resident], absent: list[Absent], capacity: int | None) -> Plan:
    """Decide one pass.

    Args:
        capacity: how many may be loaded at once; None is unbounded. Pinned adapters take at
            most all but one of it and make room for themselves; eager ones take what is free.
    """
    unload: dict[str, str] = {}
    draining: list[str] = []
    for entry in resident:
        reason = _reason_to_unload(entry)
        if reason is not None and entry.in_flight:
            draining.append(entry.name)
        elif reason is not None:
            unload[entry.name] = reason
    kept = {entry.name: entry for entry in resident if entry.name not in unload}
    swaps = [e for e in resident if e.name in unload and e.wanted is not None and e.policy.kind in ALWAYS]
    wanting = sorted(
        [*((e.policy, e.name) for e in swaps), *((e.policy, e.name) for e in absent if e.may_try)],
        key=lambda one: (one[0].kind is not PolicyKind.PINNED, -one[0].priority, one[1]),
    )
    pinned = [name for policy, name in wanting if policy.kind is PolicyKind.PINNED]
    eager = [name for policy, name in wanting if policy.kind is not PolicyKind.PINNED]
    if capacity is None:
        return Plan(unload, tuple(draining), (*pinned, *eager))
    holding = sum(entry.policy.kind is PolicyKind.PINNED for entry in kept.values())
    pinned = pinned[: max(0, capacity - 1 - holding)]
    free = capacity - len(kept)
    evictable = (e for e in kept.values() if not e.in_flight and e.policy.kind is not PolicyKind.PINNED)
    for entry in sorted(evictable, key=lambda e: -e.idle_s):
        if free >= len(pinned):
            break
        unload[entry.name] = "Evicted: the least recently used makes room"
        free += 1
    return Plan(unload, tuple(draining), (*pinned, *eager)[: max(free, 0)])


def _reason_to_unload(entry: Resident) -> str | None:
    if entry.wanted is None:
        return "Withdrawn: unregistered"
    if not entry.current:
        return "Superseded: the name serves another revision"
    if entry.policy.kind is PolicyKind.LAZY and entry.idle_s >= entry.policy.ttl_s:
        return f"Idle: no request for {entry.policy.ttl_s} s"
    return None
