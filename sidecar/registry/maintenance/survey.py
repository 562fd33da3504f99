"""A whole registry as it can be read: every newest good body, and what could not be looked at.

Read anew from every file, whatever HEAD says; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.store.writer import Registry


@dataclass(slots=True)
class State:
    """Every newest good body of a registry, and how far the listings are beyond them."""

    records: dict[AdapterKey, Record]
    pointers: dict[tuple[Scope, str], Pointer]
    listings: dict[Scope, ScopeListing]
    unread: dict[AdapterKey, Path]  # the newest generation, damaged; of a pointer without a revision
    unknown: dict[Path, VolumeUnavailable] = field(default_factory=dict)  # not to be listed or opened
    namespaces: list[str] = field(default_factory=list)


def look(registry: Registry) -> State:
    """Read every scope. What cannot be looked at is kept as ``unknown``, and the rest is read."""
    state, layout = State({}, {}, {}, {}), registry.layout
    with noted(state, layout.root):
        state.namespaces += registry.namespaces()
    for namespace in state.namespaces:
        with noted(state, layout.root / namespace):
            for scope in registry.scopes(namespace):
                with noted(state, layout.scope(scope)):
                    state.listings[scope] = registry.scan(scope, unlisted=state.unknown)
    for scope, listing in state.listings.items():
        for name, listed in listing.pointers.items():
            pointers = registry.pointers(scope, name)
            with noted(state, pointers.folder / generation_name(name, *listed)):
                newest, pointer = registry.latest(pointers)
                if pointer is not None:
                    state.pointers[scope, name] = pointer
                if pointer is None or pointer.generation != newest.generation:
                    at = pointers.folder / generation_name(name, *newest)
                    state.unread[AdapterKey(*scope, "", name)] = at
        for revision, entries in listing.revisions.items():
            for name, listed in entries.records.items():
                key = AdapterKey(*scope, revision, name)
                records = registry.records(key)
                with noted(state, records.folder / generation_name(name, *listed)):
                    newest, record = registry.latest(records)
                    if record is not None:
                        state.records[key] = record
                    if record is None or record.generation != newest.generation:
                        state.unread[key] = records.folder / generation_name(name, *newest)
    return state


@contextmanager
def noted(state: State, path: Path) -> Iterator[None]:
    """Keep that ``path`` could not be looked at, and go on behind the block."""
    try:
        yield
    except VolumeUnavailable as error:
        state.unknown[path] = error
