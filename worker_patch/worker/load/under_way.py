"""Loads from their start to their admission. Calls alone decide, so that all ranks of an engine agree. Pure.

Each rank loads its share of an adapter in its own time; calls and steps reach all ranks in one order. A rank
that evicted adapters when its own load ended would evict others than the next rank does. So an ended load
waits, and keeps its reserved room, until a call says that every rank has its share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lora_fs.worker_patch.worker.load.loader import Done

Prepared = TypeVar("Prepared")


@dataclass(slots=True)
class Load(Generic[Prepared]):
    """One load that was begun, and neither admitted nor given up for good.

    Attributes:
        number: of the call that began it, the same on every rank that it began.
        asked: what that call said, or the last one of who took the load over.
        user: who wants what it brings; None once that one gave it up.
        done: once it ended.
        caller: the user whose call waits for the load and answers how it ended.
    """

    number: str
    asked: Mapping[str, Any]
    user: str | None
    done: Done[Prepared] | None = None
    caller: str | None = None

    @property
    def adapter(self) -> Prepared | None:
        """The loaded adapter, once the load ended well."""
        return self.done.adapter if self.done is not None else None

    @property
    def took_s(self) -> float:
        return self.done.took_s if self.done is not None else 0.0

    @property
    def failed(self) -> bool:
        return self.done is not None and self.done.adapter is None


class UnderWay(Generic[Prepared]):
    """One rank's loads, by adapter. The caller keeps the reservations: one for each load here."""

    def __init__(self) -> None:
        self._loads: dict[int, Load[Prepared]] = {}

    def __contains__(self, adapter: int) -> bool:
        return adapter in self._loads

    def __iter__(self) -> Iterator[int]:
        return iter(self._loads)

    def get(self, adapter: int) -> Load[Prepared] | None:
        return self._loads.get(adapter)

    def begin(self, adapter: int, asked: Mapping[str, Any]) -> Load[Prepared]:
        """Begin a load, or begin one that failed anew."""
        number = f"{asked['user']} {asked['sequence']}"
        self._loads[adapter] = Load(number, asked, asked["user"])
        return self._loads[adapter]

    def want(self, adapter: int, asked: Mapping[str, Any]) -> None:
        """Take over a load that its user gave up."""
        load = self._loads.get(adapter)
        if load is not None and load.user is None:
            load.asked, load.user = asked, asked["user"]

    def give_up(self, adapter: int, user: str) -> None:
        """``user`` wants it no more. It ends at the next ``given_up``, unless somebody wants it before."""
        load = self._loads.get(adapter)
        if load is not None and load.user == user:
            load.user = None

    def give_up_unmeant(self, user: str, meant: Collection[int], sequence: int) -> None:
        """Give up ``user``'s loads older than ``sequence``, except those of ``meant``."""
        for adapter, load in self._loads.items():
            if load.user == user and adapter not in meant and load.asked["sequence"] < sequence:
                load.user = None

    def given_up(self) -> list[int]:
        """The adapters that nobody wants any more."""
        return [adapter for adapter, load in self._loads.items() if load.user is None]

    def ended(self, done: Done[Prepared]) -> None:
        """A load ended, well or not."""
        if done.id in self._loads:
            self._loads[done.id].done = done

    def take(self, adapter: int, numbers: Collection[str]) -> Load[Prepared] | None:
        """Remove and return a load that ended well, if its number is one of ``numbers``; else None."""
        load = self._loads.get(adapter)
        if load is None or load.adapter is None or load.number not in numbers:
            return None
        return self._loads.pop(adapter)

    def forget(self, adapter: int) -> None:
        self._loads.pop(adapter, None)
