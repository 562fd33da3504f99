"""A whole registry: every newest good body, and each path that the volume does not show.

Read anew from every file, whatever HEAD says; changes nothing. A pointer's key has no revision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lora_fs.sidecar.errors import CorruptRecord, NewerRecord, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.format.layout import Listing
from lora_fs.sidecar.registry.store.reader import ScopeListing, Series
from lora_fs.sidecar.registry.store.writer import Registry


class Unread(NamedTuple):
    """The newest generation of a series, which cannot be read. ``is_newer``: a newer lora-fs wrote it."""

    path: Path
    is_newer: bool


@dataclass(slots=True)
class State:
    """Every newest good body of a registry, and how far the listings are beyond them."""

    records: dict[AdapterKey, Record] = field(default_factory=dict)
    pointers: dict[AdapterKey, Pointer] = field(default_factory=dict)
    listings: dict[Scope, ScopeListing] = field(default_factory=dict)
    unread: dict[AdapterKey, Unread] = field(default_factory=dict)
    unknown: dict[Path, VolumeUnavailable] = field(default_factory=dict)  # neither listed nor opened
    namespaces: list[str] = field(default_factory=list)

    @property
    def bodies(self) -> dict[AdapterKey, Record | Pointer]:
        return {**self.records, **self.pointers}

    def folders(self) -> Iterator[tuple[Scope, str, Listing]]:
        """Each folder of records and, without a revision, each of pointers."""
        for scope, listing in self.listings.items():
            yield scope, "", listing.active
            for revision, entries in listing.revisions.items():
                yield scope, revision, entries


def look(registry: Registry) -> State:
    """Read every scope. Keep as ``unknown`` what the volume does not show, and read the rest."""
    state, layout = State(), registry.layout
    with noted(state, layout.root):
        state.namespaces += registry.namespaces()
    for namespace in state.namespaces:
        with noted(state, layout.root / namespace):
            for scope in registry.scopes(namespace):
                with noted(state, layout.scope(scope)):
                    state.listings[scope] = registry.scan(scope, unlisted=state.unknown)
    for scope, revision, entries in state.folders():
        for name, listed in entries.records.items():
            key = AdapterKey(*scope, revision, name)
            series = series_of(registry, key)
            with noted(state, series.file(listed)):
                try:
                    body = registry.read(series, listed)
                except CorruptRecord as error:
                    newest, body = registry.latest(series)
                    if newest.generation and (body is None or body.generation != newest.generation):
                        state.unread[key] = Unread(series.file(newest), isinstance(error, NewerRecord))
                if isinstance(body, Record):
                    state.records[key] = body
                elif isinstance(body, Pointer):
                    state.pointers[key] = body
    return state


def series_of(registry: Registry, key: AdapterKey) -> Series[Any]:
    """The series of a record, or of a pointer."""
    return registry.records(key) if key.revision else registry.pointers(key.scope, key.name)


def names_in(registry: Registry, state: State, folder: Path) -> Sequence[str]:
    """The names in a folder. If the volume does not list it: no names, and keep it as ``unknown``."""
    names: Sequence[str] = ()
    with noted(state, folder):
        names = registry.names(folder)
    return names


@contextmanager
def noted(state: State, path: Path) -> Iterator[None]:
    """If the volume does not show ``path`` inside the block, keep it as ``unknown``, and continue."""
    try:
        yield
    except VolumeUnavailable as error:
        state.unknown[path] = error
