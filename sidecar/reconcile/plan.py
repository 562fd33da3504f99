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
    """A name that is served and not loaded. ``may_try``: no failure is waiting out its delay."""

    name: str
    record: Record
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
        capacity: how many may be loaded at once; None is unbounded.
    """
    unload: dict[str, str] = {}
    draining: list[str] = []
    for entry in resident:
        reason = _reason_to_unload(entry)
        if reason is None:
            continue
        if entry.in_flight:
            draining.append(entry.name)
        else:
            unload[entry.name] = reason
    staying = len(resident) - len(unload)
    eager = sorted(
        (entry for entry in absent if entry.policy.kind in ALWAYS and entry.may_try),
        key=lambda entry: (entry.policy.kind is not PolicyKind.PINNED, -entry.policy.priority, entry.name),
    )
    replaced = [e for e in resident if e.name in unload and e.wanted is not None and not e.current]
    load = [e.name for e in replaced if e.policy.kind in ALWAYS] + [entry.name for entry in eager]
    if capacity is None:
        return Plan(unload, tuple(draining), tuple(load))
    idle = sorted(
        (
            entry
            for entry in resident
            if entry.name not in unload and not entry.in_flight and entry.policy.kind not in ALWAYS
        ),
        key=lambda entry: -entry.idle_s,
    )
    room = capacity - staying
    for entry in idle:
        if room >= len(load):
            break
        unload[entry.name] = "Evicted: the least recently used makes room"
        room += 1
    return Plan(unload, tuple(draining), tuple(load[: max(room, 0)]))


def _reason_to_unload(entry: Resident) -> str | None:
    if entry.wanted is None:
        return "Withdrawn: unregistered"
    if not entry.current:
        return "Superseded: the name serves another revision"
    if entry.policy.kind is PolicyKind.LAZY and entry.idle_s >= entry.policy.ttl_s:
        return f"Idle: no request for {entry.policy.ttl_s} s"
    return None
