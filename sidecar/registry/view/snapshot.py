"""The volume's state in memory: immutable, so that any thread may read it.

Kept by scope, so that a change copies what its own scope has and shares the rest with the state
before it: what a change costs does not grow with the number of scopes. A mapping carries which keys
the last changes touched, so that who knew an earlier one looks at those alone (``touched``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, Generic, TypeVar

from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.store.reader import ScopeListing

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

TRAIL = 64  # changes that a mapping carries
TRAIL_KEYS = 4096  # of one change; who knew the mapping before a greater one looks at everything

_editions = count()


class ByScope(Mapping[Key, Value], Generic[Key, Value]):
    """An immutable mapping in parts, one a scope.

    Args:
        scope_of: tells a key's part.
        before: the mapping that this one was made from; its other keys have the values they had.
        keys: those that came, went, or may have another value than before.
    """

    __slots__ = ("_edition", "_trail", "parts", "scope_of")

    def __init__(
        self,
        scope_of: Callable[[Key], Scope],
        parts: Mapping[Scope, Mapping[Key, Value]] | None = None,
        before: ByScope[Key, Value] | None = None,
        keys: Collection[Key] = (),
    ) -> None:
        self.scope_of = scope_of
        self.parts: Mapping[Scope, Mapping[Key, Value]] = {} if parts is None else parts
        self._edition = next(_editions)
        self._trail: tuple[tuple[int, Collection[Key]], ...] = ()
        if before is not None and len(keys) <= TRAIL_KEYS:
            self._trail = (*before._trail[1 - TRAIL :], (before._edition, keys))

    def __getitem__(self, key: Key) -> Value:
        return self.parts[self.scope_of(key)][key]

    def get(self, key: Key, default: Any = None) -> Any:
        """As ``dict.get``: that of ``Mapping`` raises, and catches, a KeyError."""
        part = self.parts.get(self.scope_of(key))
        return default if part is None else part.get(key, default)

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self.parts.values())

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def items(self) -> ItemsView[Key, Value]:
        return _Items(self)

    def values(self) -> ValuesView[Value]:
        return _Values(self)

    def since(self, before: ByScope[Key, Value]) -> Collection[Key] | None:
        """The keys touched since ``before``, the first ones first; None if no longer known."""
        if before._edition == self._edition:
            return ()
        editions = [edition for edition, _ in self._trail]
        if before._edition not in editions:
            return None
        made_since = self._trail[editions.index(before._edition) :]
        return dict.fromkeys(key for _, keys in made_since for key in keys)


class Growing(Generic[Key, Value]):
    """A mapping under construction. It copies a scope's part before the first addition to it."""

    def __init__(self, before: ByScope[Key, Value]) -> None:
        self._before = before
        self._parts: dict[Scope, Mapping[Key, Value]] = dict(before.parts)
        self._own: dict[Scope, dict[Key, Value]] = {}
        self._keys: dict[Key, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    @property
    def grew(self) -> bool:
        return bool(self._own)

    def get(self, key: Key) -> Value | None:
        return self.part(self._before.scope_of(key)).get(key)

    def part(self, scope: Scope) -> Mapping[Key, Value]:
        return self._parts.get(scope, {})

    def put(self, key: Key, value: Value) -> None:
        self._own_part(key)[key] = value

    def drop(self, key: Key) -> None:
        del self._own_part(key)[key]

    def set(self, key: Key, value: Value | None) -> None:
        """Put a value; None drops the one that is there."""
        if value is not None:
            self.put(key, value)
        elif self.get(key) is not None:
            self.drop(key)

    def _own_part(self, key: Key) -> dict[Key, Value]:
        scope = self._before.scope_of(key)
        if scope not in self._own:
            self._parts[scope] = self._own[scope] = dict(self.part(scope))
        self._keys[key] = None
        return self._own[scope]

    def whole(self) -> ByScope[Key, Value]:
        """The finished mapping; the very one it began from if nothing changed."""
        before = self._before
        return ByScope(before.scope_of, self._parts, before, self._keys) if self._own else before


class _Items(ItemsView[Key, Value]):
    _mapping: ByScope[Key, Value]

    def __iter__(self) -> Iterator[tuple[Key, Value]]:
        return chain.from_iterable(part.items() for part in self._mapping.parts.values())


class _Values(ValuesView[Value]):
    _mapping: ByScope[Hashable, Value]

    def __iter__(self) -> Iterator[Value]:
        return chain.from_iterable(part.values() for part in self._mapping.parts.values())


def no_records() -> ByScope[AdapterKey, Record]:
    """None yet."""
    return ByScope(lambda key: key.scope)


def no_pointers() -> ByScope[tuple[Scope, str], Pointer]:
    """None yet."""
    return ByScope(lambda key: key[0])


@dataclass(frozen=True, slots=True)
class Desired:
    """The volume's state at one moment.

    Attributes:
        records: the newest good record of every revision, tombstones included.
        pointers: the newest good pointer of every name.
        problems: files that cannot be read, and why; the state before them is in force. Also
            generations that two writers published at once, on volumes without link().
        frozen: why the view does not believe an absence, or None.
    """

    records: ByScope[AdapterKey, Record] = field(default_factory=no_records)
    pointers: ByScope[tuple[Scope, str], Pointer] = field(default_factory=no_pointers)
    listings: Mapping[Scope, ScopeListing] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    frozen: str | None = None

    def records_of(self, scope: Scope) -> Mapping[AdapterKey, Record]:
        """The records of one scope."""
        return self.records.parts.get(scope, {})

    def active(self) -> Iterator[tuple[Scope, str, Record]]:
        """Every plain name that serves, with the record it serves."""
        for (scope, name), pointer in self.pointers.items():
            if pointer.revision is not None:
                record = self.records.get(AdapterKey(*scope, pointer.revision, name))
                if record is not None and record.present:
                    yield scope, name, record


def touched(before: Mapping[Key, Value], after: Mapping[Key, Value]) -> list[Key]:
    """Every key that came, went, or has another value.

    If ``after`` came from ``before`` by few changes, this looks only at the keys they touched.
    """
    found: Collection[Key] | None = None
    if isinstance(before, ByScope) and isinstance(after, ByScope):
        found = after.since(before)
    keys = {**dict.fromkeys(before), **dict.fromkeys(after)} if found is None else found
    return [key for key in keys if before.get(key) is not after.get(key)]
