"""One look at the volume: the earlier view, and what this look adds.

An unreadable body is a problem and a name to try again; the last readable one stays in force. The view
forgets nothing that a name serves for its absence. A file that somebody wrote anew, where the known one is
gone, takes its place, whatever its number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lora_fs.sidecar.errors import CorruptRecord, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State
from lora_fs.sidecar.registry.format.layout import Generation, Listing, Place, generation_name
from lora_fs.sidecar.registry.store.reader import Known, Reader, ScopeListing, Series
from lora_fs.sidecar.registry.view.snapshot import Desired, Growing

# What has no tombstone any more:
WITHDRAWN = {"writer": "somebody", "state": State.DELETED}
UNSAID = {"writer": "somebody", "revision": None, "previous_revision": None, "canary": None}
BATCH = 512  # bodies asked for at once, where several threads read


_Read = Record | Pointer | CorruptRecord | VolumeUnavailable  # a body, or why it cannot be read


class _Wanted(NamedTuple):
    """A listed generation that the view does not hold."""

    series: Series[Any]
    generation: Generation


class Learning:
    """The earlier view, and what this look adds.

    Args:
        before: the earlier view.
        unread: names not read before, or whose known generation is newer than the last listing's.
        gone: known records and pointers that the last listing lacked.
    """

    def __init__(
        self,
        registry: Reader,
        readers: int,
        before: Desired,
        unread: Mapping[Path, set[str]],
        gone: Collection[Known] = (),
    ) -> None:
        self._registry, self._readers, self._unread_before = registry, readers, unread
        self._gone = gone
        self.records, self.pointers = Growing(before.records), Growing(before.pointers)
        self.problems: dict[str, str] = {}
        self.unread: dict[Path, set[str]] = {}
        self.failures: list[VolumeUnavailable] = []

    @property
    def learned(self) -> bool:
        return self.records.grew or self.pointers.grew

    def mapping_of(self, key: Known) -> Growing[Any, Any]:
        """The mapping that a key belongs to: of records, or of pointers."""
        return self.records if isinstance(key, AdapterKey) else self.pointers

    def withdraw(self, before: Desired, unlisted: Collection[Path], told: Collection[Known]) -> list[Known]:
        """Withdraw known bodies that are absent, and keep those whose state is unknown.

        Args:
            unlisted: folders that the volume does not list.
            told: writes that HEAD named and a listing may lack.
        Returns:
            The withdrawn ones.
        """
        withdrawn: list[Known] = []
        known: Iterator[tuple[Known, Any]] = chain(before.records.items(), before.pointers.items())
        for key, body in known:
            found = self.mapping_of(key)
            now = found.get(key)
            if now is not None and now.generation >= body.generation:
                continue
            series = self._registry.series(key)
            unknown = series.folder in unlisted or series.name in self.unread.get(series.folder, ())
            if not unknown and key in told:  # a listing may lack it, or have what was before it
                unknown = now is None or not self._registry.is_gone(self._registry.path(series, body))
            if unknown:
                found.put(key, body)
            elif now is None and serves(body):
                fields = WITHDRAWN if isinstance(body, Record) else UNSAID
                found.put(key, body.model_copy(update=fields))
                withdrawn.append(key)
        return withdrawn

    def told(self, key: Known, generation: Generation) -> bool:
        """Read a generation that HEAD names; False if a listing has to tell what is in force."""
        one, held = _Wanted(self._registry.series(key), generation), self.mapping_of(key).get(key)
        if held is not None and generation.generation <= held.generation:
            return self._learn_anew(one, held)
        self._learn([one])
        return not self.problems

    def knows_what_it_names(self, place: Place) -> bool:
        """Whether the view has the revision that a pointer serves, present or withdrawn; of a record True."""
        pointer = self.pointers.get((place.scope, place.name)) if place.revision is None else None
        if pointer is None or pointer.revision is None:
            return True
        return self.records.get(AdapterKey(*place.scope, pointer.revision, place.name)) is not None

    def _learn_anew(self, one: _Wanted, held: Record | Pointer) -> bool:
        """Take a generation not above the held one, if the held file is gone: removed, and written anew.

        What the held one builds on is no news: only the newest file is lost, and stays in force.

        Returns:
            False if a listing has to tell what is in force.
        """
        own = _generation(held, one.generation)
        try:
            if own != one.generation and not self._registry.is_gone(self._registry.path(one.series, held)):
                return one.generation.generation < held.generation  # a listing shows a sibling
        except VolumeUnavailable:
            return False
        found = self._try(one)
        if isinstance(found, CorruptRecord | VolumeUnavailable):
            self._report(one, found)
            return False
        built_on = held.previous and (held.previous.generation, held.previous.sum)
        if found.token != held.token and built_on != (found.generation, found.sum):
            self.mapping_of(one.series.key).put(one.series.key, found)
        return True

    def scope(self, scope: Scope, listing: ScopeListing, last: ScopeListing) -> None:
        """Read what is new in a scope."""
        layout = self._registry.layout
        for revision, entries in listing.revisions.items():
            folder = layout.revision(scope, revision)
            news = self._news(folder, entries, last.revisions.get(revision))
            self._learn([_Wanted(Series(Record, folder, scope, revision, name), one) for name, one in news])
        folder = layout.active(scope)
        news = self._news(folder, listing.active, last.active)
        self._learn([_Wanted(Series(Pointer, folder, scope, None, name), one) for name, one in news])

    def _news(self, folder: Path, listing: Listing, last: Listing | None) -> list[tuple[str, Generation]]:
        for name, count in listing.siblings.items():
            newest = folder / generation_name(name, *listing.records[name])
            self.problems[f"{newest}: siblings"] = (
                f"Conflict: {count} writers published the same generation of {name}; {newest.name} is in "
                "force, and the next write settles it"
            )
        unread = self._unread_before.get(folder, set())
        if last is listing:
            return [(name, listing.records[name]) for name in unread if name in listing.records]
        held = last.records if last is not None else {}
        return [one for one in listing.records.items() if held.get(one[0]) != one[1] or one[0] in unread]

    def _learn(self, wanted: list[_Wanted]) -> None:
        missing = []
        for one in wanted:
            key = one.series.key
            held = self.mapping_of(key).get(key)
            if held is None or _generation(held, one.generation) < one.generation:
                missing.append(one)
            elif one.generation.generation < held.generation or key in self._gone:
                self._learn_anew(one, held)
        for one, found in zip(missing, self._read(missing), strict=True):
            good: Record | Pointer | None
            known = self.mapping_of(one.series.key)
            if isinstance(found, CorruptRecord | VolumeUnavailable):
                self._report(one, found)
                good, held = self._last_good(one.series, found), known.get(one.series.key)
                if good is None or (held is not None and held.generation >= good.generation):
                    continue
            else:
                good = found
            known.put(one.series.key, good)

    def _report(self, one: _Wanted, error: CorruptRecord | VolumeUnavailable) -> None:
        self.problems[str(one.series.file(one.generation))] = str(error)
        self.unread.setdefault(one.series.folder, set()).add(one.series.name)

    def _read(self, wanted: list[_Wanted]) -> Iterator[_Read]:
        if self._readers == 1 or len(wanted) <= self._readers:
            yield from map(self._try, wanted)
            return
        from concurrent.futures import ThreadPoolExecutor  # a command reads with one thread, its own

        with ThreadPoolExecutor(self._readers, "lora-fs-read") as threads:
            for begin in range(0, len(wanted), BATCH):
                yield from threads.map(self._try, wanted[begin : begin + BATCH])

    def _try(self, one: _Wanted) -> _Read:
        try:
            body: Record | Pointer = self._registry.read(one.series, one.generation)
            return body
        except (CorruptRecord, VolumeUnavailable) as error:
            return error

    def _last_good(
        self, series: Series[Any], error: CorruptRecord | VolumeUnavailable
    ) -> Record | Pointer | None:
        if isinstance(error, VolumeUnavailable):
            self.failures.append(error)
            return None
        try:
            newest: Record | Pointer | None = self._registry.latest(series)[1]
            return newest
        except VolumeUnavailable as failure:
            self.failures.append(failure)
            return None


def serves(body: Record | Pointer) -> bool:
    """Whether it is no tombstone, and no pointer to nothing."""
    return body.present if isinstance(body, Record) else body.revision is not None


def _generation(body: Record | Pointer, listed: Generation) -> Generation:
    """A body's own generation, comparable with a listed one: with a token where names have it."""
    return Generation(body.generation, body.token if listed.token else "")
