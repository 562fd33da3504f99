"""Which replicas load eager and pinned adapters, if not all do. No I/O.

An adapter's homes are the first of its own order of the living replicas. Every replica and gateway computes
the same order. A replica that comes or goes moves only what it is a home of. Nothing leaves before it has
arrived: a replica that is no home any more keeps its copy until the homes have theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from lora_fs.sidecar.model import Policy, PolicyKind

LABEL: Final = "replicas"  # of an adapter: how many homes it has
MOST: Final = 10_000
KEPT: Final = 65_536  # adapters whose homes a replica remembers


class Part(StrEnum):
    """What a replica is to an adapter.

    Attributes:
        HOME: it loads it unasked.
        KEEPER: it is none, and keeps its copy as a home does: a home has none yet.
        OTHER: it loads the adapter at a request.
    """

    HOME = "home"
    KEEPER = "keeper"
    OTHER = "other"


def rendezvous(adapter: str, names: Iterable[str]) -> list[str]:
    """Return the replicas' names in the order of ``adapter``."""
    key = adapter.encode(errors="surrogatepass")
    return sorted(names, key=lambda name: (_weight(key, name), name), reverse=True)


class Homes:
    """What the replica ``own`` is to each adapter.

    A pass asks for every eager adapter, so this remembers their homes for as long as the same replicas live.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._living: Mapping[str, Collection[str]] = {}
        self._follow(frozenset((own,)))

    def part(self, adapter: str, homes: int, living: Mapping[str, Collection[str]]) -> Part:
        """Return what the replica is to ``adapter``.

        Args:
            homes: how many there should be, 1 or more.
            living: the other replicas that can serve, and the adapters that each has loaded. The caller makes
                another mapping for another state.
        """
        if living is not self._living:
            self._living = living
            if (names := frozenset((self._own, *living))) != self._names:
                self._follow(names)
        first = self._first(adapter, homes)
        if self._own in first:
            return Part.HOME
        return Part.OTHER if all(adapter in living[one] for one in first) else Part.KEEPER

    def _follow(self, names: frozenset[str]) -> None:
        self._names = names
        self._first = lru_cache(KEPT)(lambda adapter, homes: rendezvous(adapter, names)[:homes])


def homes_of(labels: Mapping[str, str], default: int) -> int:
    """Return how many homes an adapter's labels ask for; ``default`` where they say no number from 1 on."""
    told = labels.get(LABEL, "")
    return int(told) if told.isascii() and told.isdigit() and 0 < int(told[:6]) <= MOST else default


def policy_there(policy: Policy, part: Part) -> Policy:
    """Return the policy of a copy on a replica. Where that is no home, it stays until its place is needed."""
    if part is not Part.OTHER or policy.kind not in (PolicyKind.EAGER, PolicyKind.PINNED):
        return policy
    return policy.model_copy(update={"kind": PolicyKind.STICKY})


def _weight(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(errors="surrogatepass") + b"\0" + key, digest_size=8).digest()
