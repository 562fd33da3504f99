"""Two writers at once: who holds the lease, who wins a name, and what a writer that slept does.

Each probe does what writers of lora-fs do (``lock.lease``, ``atomic.publish``, ``Registry.append``), with
one process on each mount. It then judges what both say and both read afterwards.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_fs.sidecar.conformance.pair import ANSWER_S, Pair
from lora_fs.sidecar.errors import Conflict
from lora_fs.sidecar.model import Pointer, Scope
from lora_fs.sidecar.registry.format.layout import Generation
from lora_fs.sidecar.registry.store.marker import has_hard_links
from lora_fs.sidecar.registry.store.writer import LEASE_WAIT_S, Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import Ambiguous, LinkUnsupported, TemporaryNames
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.leases import lease

SCOPE = Scope("doctor", "probe")
HELD_S = 0.001
LEAD_S = 0.002  # from the word to both until both act
_names = TemporaryNames()  # of the process that imports this, or of its fork

Outcome = Literal["won", "lost", "no link", "unknown"]
Held = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Turns:
    """The result for a lease: takes by each mount, how often both held it, seconds a take."""

    takes: tuple[int, int]
    overlaps: int
    each_s: float | None


@dataclass(frozen=True, slots=True)
class Races:
    """The result of races for one name: how many, and the failures. ``supported``: link() exists."""

    supported: bool
    tried: int = 0
    double: int = 0
    nobody: int = 0
    disagreed: int = 0


@dataclass(frozen=True, slots=True)
class Fenced:
    """The result for a writer that slept in its lease: rounds, and those in which its write took effect."""

    tried: int
    broken: int


def take_turns(path: Path, share_s: float) -> Held:
    """Acquire the lease as often as possible; returns from when to when it was held."""
    held: Held = []
    end = time.monotonic() + share_s
    while time.monotonic() < end:
        with lease(path, wait_s=LEASE_WAIT_S) as had:
            if had:
                entered = time.monotonic()
                time.sleep(HELD_S)
                held.append((entered, time.monotonic()))
        time.sleep(random.uniform(0, 4 * HELD_S))  # a writer does something else between two writes
    return held


def overlaps(first: Held, second: Held) -> int:
    """How many holds of one lie in a hold of the other, if only in part."""
    return sum(any(begin < b and a < end for a, b in second) for begin, end in first)


def exclusion(pair: Pair, share_s: float) -> Turns:
    """Let both mounts contend for one lease."""
    here, there = pair.make("lease", ANSWER_S)
    pair.here.agent.start(take_turns, here / "a.lock", share_s)
    pair.there.agent.start(take_turns, there / "a.lock", share_s)
    held = [_held(side.agent.result(share_s + ANSWER_S)) for side in (pair.here, pair.there)]
    takes = (len(held[0]), len(held[1]))
    return Turns(takes, overlaps(*held), share_s / sum(takes) if sum(takes) else None)


def _held(value: object) -> Held:
    assert isinstance(value, list)
    return value


def publish_at(path: Path, data: bytes, at_s: float) -> Outcome:
    """Publish at a moment of the monotonic clock, which all processes of a host share."""
    _names.sweep()
    while time.monotonic() < at_s:
        pass
    try:
        return "won" if atomic.publish(path, data, _names) else "lost"
    except LinkUnsupported:
        return "no link"
    except Ambiguous:
        return "unknown"


def races(pair: Pair, share_s: float) -> Races:
    """Let both mounts publish one name at one moment, again and again."""
    here, there = pair.make("races", ANSWER_S)
    if not all(
        side.agent.call(ANSWER_S, has_hard_links, folder)
        for side, folder in ((pair.here, here), (pair.there, there))
    ):
        return Races(False)
    tried = double = nobody = disagreed = 0
    end = time.monotonic() + share_s
    while tried == 0 or time.monotonic() < end:
        name, at_s = f"race-{tried}", time.monotonic() + LEAD_S
        data = (secrets.token_bytes(16), secrets.token_bytes(16))
        pair.here.agent.start(publish_at, here / name, data[0], at_s)
        pair.there.agent.start(publish_at, there / name, data[1], at_s)
        said = [side.agent.result(ANSWER_S) for side in (pair.here, pair.there)]
        if "no link" in said:
            return Races(False)
        tried += 1
        double += said == ["won", "won"]
        nobody += "won" not in said and "unknown" not in said
        read = {
            pair.here.agent.call(ANSWER_S, atomic.read_bytes, here / name),
            pair.there.agent.call(ANSWER_S, atomic.read_bytes, there / name),
        }
        winners = {written for written, word in zip(data, said, strict=True) if word == "won"}
        disagreed += len(read) != 1 or (len(winners) == 1 and read != winners)
    return Races(True, tried, double, nobody, disagreed)


def make_registry(root: Path) -> None:
    """A registry of the suite's own."""
    with_folders = Registry(root, create=True)
    make_folder(with_folders.layout.active(SCOPE))
    with_folders.close()


def write(root: Path, name: str, writer: str, *, stop: bool = False) -> bool:
    """Write a name's first generation; with ``stop`` asleep in the midst of it, in the lease.

    Returns:
        Whether the write was acknowledged; False is a refusal.
    """
    registry = Registry(root)

    def change(_: Pointer | None) -> dict[str, Any]:
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"revision": "v1", "previous_revision": None, "canary": None}

    try:
        registry.append(registry.pointers(SCOPE, name), change, writer=writer, expect=0, announce=False)
    except Conflict:
        return False
    finally:
        registry.close()
    return True


def who_wrote(root: Path, name: str) -> str:
    """The writer of a name's first generation, looked for by its exact name."""
    registry = Registry(root)
    return registry.read(registry.pointers(SCOPE, name), Generation(1, "")).writer


def fencing(pair: Pair, roots: Sequence[Path], rounds: int) -> Fenced:
    """Stop a writer in its lease, let the other mount go ahead, let the first one go on."""
    here, there = roots
    broken = 0
    for number in range(rounds):
        name = f"fenced-{number}"
        pair.here.agent.start(write, here, name, "stale", stop=True)
        asleep = pair.here.agent.wait_stopped(ANSWER_S)
        try:
            fresh = pair.there.agent.call(ANSWER_S, write, there, name, "fresh")
        finally:
            pair.here.agent.resume()
        stale = pair.here.agent.result(ANSWER_S)
        wrote = {
            pair.here.agent.call(ANSWER_S, who_wrote, here, name),
            pair.there.agent.call(ANSWER_S, who_wrote, there, name),
        }
        broken += not (asleep and fresh and not stale and wrote == {"fresh"})
    return Fenced(rounds, broken)
