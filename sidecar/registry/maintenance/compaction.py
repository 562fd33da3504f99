"""History that nobody needs any more: superseded generations, tombstones, empty revisions.

``superseded`` and ``forgettable``, which are pure, decide what may go. A series loses its lowest
generations first, and its tombstone in a later run at the earliest: what is left is the end of its
history at every moment. Ages come from the volume's own clock, and no promise rests on them. A writer that
slept finds what it built on gone (``Registry.append``). A reader that missed a tombstone finds HEAD's floor
above what it has seen (``RegistryView.refresh``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lora_fs.sidecar.errors import CorruptRecord
from lora_fs.sidecar.model import STORE_STATE, AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.format.ids import natural_order
from lora_fs.sidecar.registry.format.layout import Generation
from lora_fs.sidecar.registry.lifecycle.retention import serving
from lora_fs.sidecar.registry.maintenance.garbage import Garbage, What, age_s, remove_empty, size_of
from lora_fs.sidecar.registry.store.head import current_head, raise_floor
from lora_fs.sidecar.registry.store.reader import Body, ScopeListing, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

HISTORY_S = 7 * 24 * 3600.0


class _Newest(NamedTuple):
    """The newest generation of a series, as it was read."""

    registry: Registry
    series: Series[Any]
    generation: Generation
    body: Record | Pointer

    @property
    def path(self) -> Path:
        return self.series.file(self.generation)

    @property
    def is_tombstone(self) -> bool:
        """Whether it withdraws a revision, and is no memory of a folder that would be registered again."""
        body = self.body
        return isinstance(body, Record) and not body.present and not body.spec.labels.get(STORE_STATE)

    def is_there(self) -> bool:
        """Whether it is still what it was: a name that went and came back has others."""
        with suppress(CorruptRecord):
            now: Record | Pointer = self.registry.read(self.series, self.generation)
            return now.sum == self.body.sum
        return False


def superseded(ages: Mapping[Generation, float], older_than_s: float) -> list[Generation]:
    """The generations of one series that may go, the lowest first. Pure.

    One may go if the next is ``older_than_s`` old. Stops at the first that stays. Never the newest.

    Args:
        ages: of all listed generations, in seconds.
    """
    going: list[Generation] = []
    listed = sorted(ages)
    for one in listed:
        above = bisect_right(listed, one.generation, key=attrgetter("generation"))
        if above == len(listed) or ages[listed[above]] < older_than_s:
            break
        going.append(one)
    return going


def forgettable(revisions: Collection[str], old: Collection[str], named: Collection[str]) -> list[str]:
    """The revisions of one name whose tombstones may go. Pure.

    While any other is left the greatest stays, so that among numbered ones the next gets a higher number.

    Args:
        revisions: all that have a record. old: those of them that have an old tombstone and no more.
        named: what the name's pointer serves, served before or tries.
    """
    going = set(old) - set(named)
    if going != set(revisions):
        going.discard(max(revisions, key=natural_order))
    return sorted(going, key=natural_order)


def find(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey] | None, older_than_s: float
) -> list[Garbage]:
    """Return the parts of a scope's history that may go, in their order.

    Args:
        in_use: keys that a replica reports; None if unknown, which keeps every tombstone.
        older_than_s: by this host's clock: see ``garbage.ahead_s``.
    Raises:
        VolumeUnavailable: the volume does not list or read something.
    """
    head = current_head(registry.layout)
    listing, sync = registry.scan(scope), cache(atomic.sync_names)
    found: list[Garbage] = []
    for revision, entries in listing.revisions.items():
        for name, generations in entries.histories().items():
            series = registry.records(AdapterKey(*scope, revision, name))
            found += _superseded(registry, series, generations, older_than_s, sync)
    for name, generations in listing.active.histories().items():
        found += _superseded(registry, registry.pointers(scope, name), generations, older_than_s, sync)
    if in_use is not None:
        withdrawn = list(_withdrawn(registry, scope, listing, in_use, older_than_s))
        first = 1 + max((one.body.generation for one in withdrawn), default=0)
        floor = head.seq if head is not None else 0
        tell = partial(raise_floor, registry.layout, registry.marker.epoch, floor, first)
        for one in withdrawn:
            why = f"withdrawn at {one.body.updated_at}, and nothing is left of it"
            found.append(Garbage(one.path, What.HISTORY, why, size_of(one.path), partial(_forget, one, tell)))
    for revision, entries in listing.revisions.items():
        folder = registry.layout.revision(scope, revision)
        if not entries.packed and age_s(folder) >= older_than_s:
            remove = partial(remove_empty, folder)
            found.append(Garbage(folder, What.HISTORY, "an empty revision", 0, remove))
    return found


def _superseded(
    registry: Registry,
    series: Series[Body],
    generations: Collection[Generation],
    older_than_s: float,
    sync: Callable[[Path], None],
) -> Iterator[Garbage]:
    if len(generations) == 1:
        return
    going = superseded({one: age_s(series.file(one)) for one in generations}, older_than_s)
    newest = _read(registry, series, generations) if going else None
    if newest is None:
        return  # what is in force may be among them
    paths = [series.file(one) for one in going]
    many = f"{len(paths)} generations" if len(paths) > 1 else "a generation"
    why = f"{many} of {series.name} that {newest.body.generation} supersedes"
    remove = partial(_drop, newest, paths, sync)
    yield Garbage(paths[0], What.HISTORY, why, sum(map(size_of, paths)), remove)


def _withdrawn(
    registry: Registry,
    scope: Scope,
    listing: ScopeListing,
    in_use: Collection[AdapterKey],
    older_than_s: float,
) -> Iterator[_Newest]:
    """Tombstones that are all that is left of a revision, then the pointers of names of which nothing is."""
    revisions: dict[str, list[str]] = {}
    old: dict[str, dict[str, _Newest]] = {}
    for revision, entries in listing.revisions.items():
        for name, generations in entries.histories().items():
            revisions.setdefault(name, []).append(revision)
            key = AdapterKey(*scope, revision, name)
            if len(generations) > 1 or name in entries.folders or key in in_use:
                continue  # without its tombstone the folder beside it would be adopted
            newest = _read(registry, registry.records(key), generations)
            if newest is not None and newest.is_tombstone and age_s(newest.path) >= older_than_s:
                old.setdefault(name, {})[revision] = newest
    pointers = listing.active.histories()
    for name in old.keys() | pointers.keys() - revisions.keys():
        known, generations = old.get(name, {}), pointers.get(name, [])
        newest = _read(registry, registry.pointers(scope, name), generations) if generations else None
        if generations and newest is None:
            continue  # the revision that it names is unknown
        named = serving(newest.body) if newest is not None and isinstance(newest.body, Pointer) else ()
        going = forgettable(revisions[name], known, named) if known else []
        yield from (known[revision] for revision in going)
        alone = len(generations) == 1 and len(revisions.get(name, [])) == len(going)
        if newest is not None and alone and not named and age_s(newest.path) >= older_than_s:
            yield newest


def _drop(newest: _Newest, paths: Iterable[Path], sync: Callable[[Path], None]) -> None:
    """Remove superseded generations, once the newest survives a power loss; stops at the first that stays."""
    sync(newest.path.parent)
    if newest.is_there():
        for path in paths:
            path.unlink(missing_ok=True)


def _forget(tombstone: _Newest, tell: Callable[[], None]) -> None:
    """Remove a tombstone, once HEAD tells readers that some may be gone.

    Looks at HEAD again afterwards: a writer that read HEAD before may have replaced it meanwhile.
    """
    tell()
    if tombstone.is_there():
        tombstone.path.unlink(missing_ok=True)
        tell()


def _read(registry: Registry, series: Series[Body], generations: Collection[Generation]) -> _Newest | None:
    """The newest generation; None if it cannot be read: what is in force is another one."""
    newest = max(generations)
    with suppress(CorruptRecord):
        return _Newest(registry, series, newest, registry.read(series, newest))
    return None
