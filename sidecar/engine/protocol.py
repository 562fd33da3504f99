"""What the reconciler needs from an engine. *Loaded* is what it says; silence is *unknown*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lora_fs.sidecar.model import Policy, Record


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of itself; None where it does not say.

    Attributes:
        max_lora_rank: its ``--max-lora-rank``.
        dtype: what it computes in, such as ``bfloat16``.
    """

    max_lora_rank: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine's answer.

    Attributes:
        base_cards: its model cards that are not adapters.
        adapters: lora_name → the path of its load.
        cards: the adapters' cards by name.
        tiers: lora_name → ``gpu`` (in a slot) or ``host``, of those of which it says so.
        cannot_load: why it can load no adapter, and the cure; it serves its base models all the same.
        facts: what it says of itself.
    """

    base_cards: tuple[Mapping[str, Any], ...]
    adapters: Mapping[str, str]
    cards: Mapping[str, Mapping[str, Any]]
    tiers: Mapping[str, str] = field(default_factory=dict)
    cannot_load: str | None = None
    facts: Facts = Facts()


@dataclass(frozen=True, slots=True)
class Queue:
    """An engine's requests, as its metrics count them: in a batch, and waiting for one."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What the engine is busy with, whoever sent the requests.

    Attributes:
        busy: adapters that running or waiting requests name.
        max_loras: adapters one batch may mix; None if it does not say.
        queue: None if it does not say.
        is_new: else ``busy`` is as of an earlier look.
    """

    busy: frozenset[str] = frozenset()
    max_loras: int | None = None
    queue: Queue | None = None
    is_new: bool = True


class Engine(Protocol):
    """One engine. Every call has a bound in time.

    Attributes:
        rereads: it may read a loaded adapter's copy again while it serves, and dies if it cannot.
        is_own: it is of this process: its version is fixed, and never another one's.
    """

    rereads: bool
    is_own: bool

    async def version(self) -> str | None:
        """What it says its version is, in its own words; None if it says none.

        Raises EngineUnavailable: it did not answer.
        """

    async def holds_most(self) -> int | None:
        """How many adapters it surely keeps in memory, and need not read again; None if it does not say.

        Raises EngineUnavailable: it did not answer, and may yet say a number.
        """

    async def loaded(self) -> Loaded:
        """Raises EngineUnavailable: the loaded adapters are unknown."""

    async def activity(self) -> Activity:
        """Raises EngineUnavailable: the adapters in use are unknown. Without such a route it is idle."""

    def prefer(self, policies: Mapping[str, Policy]) -> None:
        """Say by what policy to keep each loaded name, for an engine that makes room by itself."""

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        """Load the bytes of ``record``, which lie at ``path``. An engine that makes room by itself makes
        none for what is ``spare``.

        Raises EngineRejected with the engine's reason, NoSpareRoom, EngineUnavailable (it may have loaded).
        """

    async def unload(self, name: str) -> None:
        """Unload; a name it does not have is fine. Raises as ``load``."""
