"""One look at the volume: what was known before, and what is read on top of it.

A body that cannot be read is a problem and a name to be tried again; the last one that can be read
stays in force. Nothing that is served is forgotten for an absence; a file written anew where the known one
is gone takes its place, whatever its number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple

from lora_fs.sidecar.errors import CorruptRecord, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State
from lora_fs.sidecar.registry.format.layout import Generation, Listing, Place, generation_name
from lora_fs.sidecar.registry.store.reader import Body, ScopeListing, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.snapshot import Growing, Key

UNKNOWN = "somebody"  # who withdrew what has no tombstone any more
BATCH = 512  # bodies asked for at once, where several threads read


class _Wanted(NamedTuple, Generic[Key, Body]):
    """A generation that is listed and not held."""

    key: Key
    series: Series[Body]
    generation: Generation


class Learning:
    """What was known before, and what is read on top of it.

    Args:
        unread: names not read before, or of which more is known than the last listing had.
        gone: records and pointers that are known, and that the last listing had not.
    """

    def __init__(
        self,
        registry: Registry,
        readers: int,
        known: tuple[Growing[AdapterKey, Record], Growing[tuple[Scope, str], Pointer]],
        unread: Mapping[Path, set[str]],
        gone: Collection[Hashable] = (),
    ) -> None:
        self._registry, self._readers, self._unread_before = registry, readers, unread
        self._gone = gone
        self.records, self.pointers = known
        self.problems: dict[str, str] = {}
        self.unread: dict[Path, set[str]] = {}
        self.failures: list[VolumeUnavailable] = []
        self.learned = False

    def refuse(self, failures: Iterable[VolumeUnavailable]) -> None:
        """Raise what keeps the first state from being known. No permission is a lasting answer."""
        for error in failures:
            if not isinstance(error.__cause__, PermissionError):
                raise error

    def withdraw(
        self,
        records: Mapping[AdapterKey, Record],
        pointers: Mapping[tuple[Scope, str], Pointer],
        is_unknown: Callable[[AdapterKey | tuple[Scope, str]], bool],
    ) -> list[AdapterKey | tuple[Scope, str]]:
        """Take what was known and is not there for withdrawn, and keep what is unknown.

        Returns:
            What was withdrawn.
        """
        gone = [key for key in self._keep_unknown(self.records, records, is_unknown) if records[key].present]
        names = self._keep_unknown(self.pointers, pointers, is_unknown)
        served = [name for name in names if pointers[name].revision is not None]
        for key in gone:
            self.records.put(key, records[key].model_copy(update={"state": State.DELETED, "writer": UNKNOWN}))
        for name in served:
            unsaid = {"revision": None, "previous_revision": None, "canary": None, "writer": UNKNOWN}
            self.pointers.put(name, pointers[name].model_copy(update=unsaid))
        return [*gone, *served]

    def _keep_unknown(
        self, found: Growing[Key, Body], before: Mapping[Key, Body], is_unknown: Callable[[Key], bool]
    ) -> list[Key]:
        """Keep the newest known of what cannot be listed or read; returns the others that are not there."""
        absent = []
        for key, body in before.items():
            now = found.get(key)
            if now is None and not is_unknown(key):
                absent.append(key)
            elif (now is None or now.generation < body.generation) and is_unknown(key):
                found.put(key, body)
        return absent

    def forget(self, records: Iterable[AdapterKey], pointers: Iterable[tuple[Scope, str]]) -> None:
        """Keep these tombstones no longer."""
        for key in records:
            self.records.drop(key)
            self.learned = True
        for name in pointers:
            self.pointers.drop(name)
            self.learned = True

    def told(self, place: Place) -> bool:
        """Read a generation that HEAD names; False if a listing has to tell what is in force."""
        scope, revision, name, generation = place
        if revision is None:
            series = self._registry.pointers(scope, name)
            return self._learn_told(self.pointers, _Wanted((scope, name), series, generation))
        key = AdapterKey(*scope, revision, name)
        return self._learn_told(self.records, _Wanted(key, self._registry.records(key), generation))

    def _learn_told(self, known: Growing[Key, Body], one: _Wanted[Key, Body]) -> bool:
        held = known.get(one.key)
        if held is not None and one.generation.generation <= held.generation:
            return self._learn_anew(known, one, held)
        self._learn(known, [one])
        return not self.problems

    def _learn_anew(self, known: Growing[Key, Body], one: _Wanted[Key, Body], held: Body) -> bool:
        """Take what is not above what is held, where that is gone: it was removed, and written anew.

        What the held one builds on is no news: the newest file alone was lost, and is not taken back.

        Returns:
            False if a listing has to tell what is in force.
        """
        own = Generation(held.generation, held.token if one.generation.token else "")
        try:
            if own != one.generation and not self._registry.is_gone(one.series, own):
                return one.generation.generation < held.generation  # a sibling is for listings to tell of
        except VolumeUnavailable:
            return False
        found = self._try(one)
        if isinstance(found, CorruptRecord | VolumeUnavailable):
            self._report(one, found)
            return False
        built_on = held.previous and (held.previous.generation, held.previous.sum)
        if found.token != held.token and built_on != (found.generation, found.sum):
            known.put(one.key, found)
            self.learned = True
        return True

    def scope(self, scope: Scope, listing: ScopeListing, last: ScopeListing) -> None:
        """Read what is new in a scope."""
        layout = self._registry.layout
        for revision, entries in listing.revisions.items():
            folder = layout.revision(scope, revision)
            news = self._news(folder, entries, last.revisions.get(revision))
            found = entries.records
            wanted = (
                (AdapterKey(*scope, revision, name), Series(Record, folder, scope, revision, name))
                for name in news
            )
            self._learn(self.records, [_Wanted(key, series, found[key.name]) for key, series in wanted])
        folder, found = layout.active(scope), listing.active.records
        news = self._news(folder, listing.active, last.active)
        series_of = {name: Series(Pointer, folder, scope, None, name) for name in news}
        self._learn(self.pointers, [_Wanted((scope, n), one, found[n]) for n, one in series_of.items()])

    def _news(self, folder: Path, listing: Listing, last: Listing | None) -> list[str]:
        for name, count in listing.siblings.items():
            newest = folder / generation_name(name, *listing.records[name])
            self.problems[f"{newest}: siblings"] = (
                f"Conflict: {count} writers published the same generation of {name}; {newest.name} is in "
                "force, and the next write settles it"
            )
        unread = self._unread_before.get(folder, set())
        if last is listing:
            return [name for name in unread if name in listing.records]
        held = last.records if last is not None else {}
        return [name for name, found in listing.records.items() if held.get(name) != found or name in unread]

    def _learn(self, known: Growing[Key, Body], wanted: list[_Wanted[Key, Body]]) -> None:
        missing = []
        for one in wanted:
            held = known.get(one.key)
            if held is None or _generation(held, one.generation) < one.generation:
                missing.append(one)
            elif one.generation.generation < held.generation or one.key in self._gone:
                self._learn_anew(known, one, held)
        for one, found in zip(missing, self._read(missing), strict=True):
            if not isinstance(found, CorruptRecord | VolumeUnavailable):
                known.put(one.key, found)
                self.learned = True
                continue
            self._report(one, found)
            good = self._last_good(one.series, found)
            held = known.get(one.key)
            if good is not None and (held is None or held.generation < good.generation):
                known.put(one.key, good)
                self.learned = True

    def _report(self, one: _Wanted[Key, Body], error: CorruptRecord | VolumeUnavailable) -> None:
        self.problems[str(one.series.folder / generation_name(one.series.name, *one.generation))] = str(error)
        self.unread.setdefault(one.series.folder, set()).add(one.series.name)

    def _read(self, wanted: list[_Wanted[Key, Body]]) -> Iterator[Body | CorruptRecord | VolumeUnavailable]:
        if self._readers == 1 or len(wanted) <= self._readers:
            yield from map(self._try, wanted)
            return
        with ThreadPoolExecutor(self._readers, "lora-fs-read") as threads:
            for begin in range(0, len(wanted), BATCH):
                yield from threads.map(self._try, wanted[begin : begin + BATCH])

    def _try(self, one: _Wanted[Key, Body]) -> Body | CorruptRecord | VolumeUnavailable:
        try:
            return self._registry.read(one.series, one.generation)
        except (CorruptRecord, VolumeUnavailable) as error:
            return error

    def _last_good(self, series: Series[Body], error: LoraFsError) -> Body | None:
        if isinstance(error, VolumeUnavailable):
            self.failures.append(error)
            return None
        try:
            return self._registry.latest(series)[1]
        except VolumeUnavailable as failure:
            self.failures.append(failure)
            return None


def _generation(body: Record | Pointer, listed: Generation) -> Generation:
    """A body's own generation, to be compared with a listed one: with a token where names have it."""
    return Generation(body.generation, body.token if listed.token else "")
