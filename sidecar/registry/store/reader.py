"""Reading a registry: which one it is, the names in it, and their bodies.

A *series* is the generations of one name in one folder. Readers never return a damaged body, or one that
belongs elsewhere. A missing folder is empty; one that the volume does not list raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from lora_fs.sidecar.errors import CorruptRecord, RegistryLost, RegistryMissing, VolumeUnavailable
from lora_fs.sidecar.model import RESERVED_NAMESPACES, AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.format.layout import (
    ACTIVE,
    Generation,
    Layout,
    Listing,
    generation_name,
    is_segment,
    pack,
    parse_generation,
)
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.store.marker import Marker, is_registry, missing, read_marker
from lora_fs.sidecar.registry.volume import atomic, folders
from lora_fs.sidecar.registry.volume.atomic import NotRegular

Body = TypeVar("Body", Record, Pointer)
Known = AdapterKey | tuple[Scope, str]  # of a record, of a pointer


@dataclass(frozen=True, slots=True)
class Series(Generic[Body]):
    """The generations of ``name`` in ``folder``, each a ``kind`` that says it belongs there.

    ``revision`` is None for pointers, whose revision is what they point to.
    """

    kind: type[Body]
    folder: Path
    scope: Scope
    revision: str | None
    name: str

    @property
    def key(self) -> Known:
        """Whose generations they are."""
        if self.revision is None:
            return self.scope, self.name
        return AdapterKey(*self.scope, self.revision, self.name)

    def file(self, generation: Generation) -> Path:
        """The file of a generation."""
        return self.folder / generation_name(self.name, *generation)


@dataclass(frozen=True, slots=True)
class ScopeListing:
    """The names in a scope, bodies unread."""

    revisions: Mapping[str, Listing] = field(default_factory=dict)
    active: Listing = field(default_factory=Listing)

    @property
    def pointers(self) -> Mapping[str, Generation]:
        """The newest pointer of each name."""
        return self.active.records

    def of(self, revision: str) -> Listing:
        """The names in a revision's folder; none if there is no such folder."""
        return self.revisions.get(revision) or Listing()


class Reader:
    """The registry at ``layout.root``. Thread-safe: it keeps no state but the marker last read.

    Args:
        marker: None where there is none yet: the first that ``check_identity`` reads is this registry's.
        only: list this name alone, for whoever reads no other.
    """

    def __init__(self, layout: Layout, marker: Marker | None, *, only: str | None = None) -> None:
        self.layout, self._marker, self._only = layout, marker, only

    @classmethod
    def of(cls, path: Path, *, only: str | None = None) -> Reader:
        """Open the registry in a folder, to read it.

        Raises:
            RegistryMissing: there is none. RegistryLost, FormatTooNew, VolumeUnavailable: it cannot be read.
        """
        return Reader(Layout(path), read_marker(path), only=only)

    def sweep(self) -> None:
        """Do what is due some time after a write: a reader writes nothing."""

    @property
    def is_known(self) -> bool:
        """Whether this process saw a registry here."""
        return self._marker is not None

    @property
    def marker(self) -> Marker:
        """The marker as last read.

        Raises:
            RegistryMissing: none was ever read.
        """
        if self._marker is None:
            raise RegistryMissing(f"{self.layout.root} held no registry so far")
        return self._marker

    def check_identity(self) -> None:
        """Raise unless the volume still holds the registry that this process opened.

        Raises:
            RegistryMissing: no registry was ever here. RegistryLost: it is gone, or is another one.
            FormatTooNew, VolumeUnavailable: its state is unknown.
        """
        known = self._marker
        try:
            if known is None and not is_registry(self.layout.root):
                raise missing(self.layout)  # list a name that should be absent: never open it
            marker = read_marker(self.layout.root)
        except RegistryMissing as error:
            if known is None:
                raise
            raise RegistryLost(
                f"{self.layout.root}: the registry is not there any more: is its volume still mounted?"
            ) from error
        if known is not None and marker.registry_uuid != known.registry_uuid:
            raise RegistryLost(
                f"{self.layout.root} holds registry {marker.registry_uuid}, "
                f"this process opened {known.registry_uuid}: another volume is mounted; "
                "mount the right volume, or, if this one is meant, restart this process"
            )
        self._marker = marker

    def records(self, key: AdapterKey) -> Series[Record]:
        folder = self.layout.revision(key.scope, key.revision)
        return Series(Record, folder, key.scope, key.revision, key.name)

    def pointers(self, scope: Scope, name: str) -> Series[Pointer]:
        return Series(Pointer, self.layout.active(scope), scope, None, name)

    def series(self, key: Known) -> Series[Record] | Series[Pointer]:
        return self.records(key) if isinstance(key, AdapterKey) else self.pointers(*key)

    def namespaces(self) -> list[str]:
        """Every name in the root that a namespace may have; raises as ``scopes`` does."""
        names = filter(is_segment, self.names(self.layout.root))
        return sorted(name for name in names if name not in RESERVED_NAMESPACES)

    def scopes(self, namespace: str | None = None) -> list[Scope]:
        """Every scope there is a folder for: of one namespace, or of all.

        Raises:
            VolumeUnavailable: the volume does not list a folder.
        """
        found = []
        for name in self.namespaces() if namespace is None else [namespace]:
            models = self.names(self.layout.root / name)
            found += [Scope(name, model) for model in sorted(filter(is_segment, models))]
        return found

    def scan(
        self,
        scope: Scope,
        last: ScopeListing | None = None,
        unlisted: dict[Path, VolumeUnavailable] | None = None,
        only: Collection[Path] | None = None,
    ) -> ScopeListing:
        """List a scope's names. A folder that is not there is an empty scope.

        Args:
            last: an earlier listing. An unchanged part is the very object of ``last``.
            unlisted: receives the folders that the volume does not list, which then keep their last
                listing; without it the first one raises.
            only: revisions' folders to list; the others keep theirs if ``last`` knows all of these.
        Returns:
            ``last`` itself if nothing is new.
        Raises:
            VolumeUnavailable: the volume does not list the scope itself, or a folder in it.
        """
        last = last or ScopeListing()
        chosen = {name for name in last.revisions if self.layout.revision(scope, name) in (only or ())}
        if only is not None and len(chosen) == len(only):
            entries, kept = [*chosen], last
        else:
            entries, kept = self._entries(scope, known=last != ScopeListing()), ScopeListing()
        revisions = {name: one for name, one in kept.revisions.items() if name not in chosen}
        active = kept.active
        for entry in entries:
            if entry == ACTIVE:
                active = self._list(self.layout.active(scope), last.active, unlisted) or active
            elif is_segment(entry):
                folder = self.layout.revision(scope, entry)
                names = self._list(folder, last.revisions.get(entry), unlisted)
                if names is not None:
                    revisions[entry] = names
        found = ScopeListing(revisions, active)
        return last if found == last else found

    def _entries(self, scope: Scope, *, known: bool) -> list[str]:
        """A scope's folders. Looks up an optional one only once its parent lists it.

        NFS keeps for half a minute that a name was not there, whatever HEAD says meanwhile.
        """
        at = self.layout.root
        for name in () if known else scope:
            if name not in self.names(at):
                return []
            at = at / name
        return self.names(self.layout.scope(scope))

    def listed(self, folder: Path) -> list[str] | None:
        """The names in a folder; None if it is not there. Raises as ``folders.listed`` does."""
        return folders.listed(folder, root=self.layout.root)

    def _listed_once(self, folder: Path) -> list[str]:
        return folders.listed_once(folder, root=self.layout.root) or []

    def names(self, folder: Path) -> list[str]:
        """The names in a folder; none if it is not there. Raises as ``listed`` does."""
        return self.listed(folder) or []

    def _list(
        self, folder: Path, last: Listing | None, unlisted: dict[Path, VolumeUnavailable] | None
    ) -> Listing | None:
        try:
            names = self.listed(folder)
        except VolumeUnavailable as error:
            if unlisted is None:
                raise
            unlisted[folder] = error
            return last
        if names is None:
            return None
        if self._only is not None:
            names = _of_name(self._only, names)
        return last if last is not None and last.packed == pack(names) else Listing.of(names, last)

    def revisions(self, scope: Scope) -> list[str]:
        """The revisions' folders of a scope."""
        return [*filter(is_segment, self._listed_once(self.layout.scope(scope)))]

    def mentions(self, scope: Scope, name: str, revisions: Iterable[str]) -> dict[str, Listing]:
        """Those of the revisions in which a name has records or a folder."""
        found = {}
        for revision in revisions:
            names = self.names(self.layout.revision(scope, revision))
            if own := _of_name(name, names):
                found[revision] = Listing.of(own)
        return found

    def read(self, series: Series[Body], generation: Generation) -> Body:
        """Read one body.

        Raises:
            CorruptRecord: not there, no file, its seal does not hold, or it belongs elsewhere.
            VolumeUnavailable: the volume did not answer, or the registry is gone.
        """
        path = series.file(generation)
        try:
            data = atomic.read_bytes(path)
        except NotRegular as error:
            raise CorruptRecord(str(error)) from error
        if data is None:
            folders.check_marked(self.layout.root)
            raise CorruptRecord(f"{path}: listed and not there")
        try:
            body = decode(series.kind, data)
        except CorruptRecord as error:
            raise type(error)(f"{path}: {error}") from error
        scope = Scope(body.namespace, body.model)
        if (body.name, body.generation, scope) != (series.name, generation.generation, series.scope):
            raise CorruptRecord(f"{path}: holds generation {body.generation} of {scope}: {body.name}")
        if series.revision not in (None, body.revision):
            raise CorruptRecord(f"{path}: holds a record of revision {body.revision}")
        if generation.token not in ("", body.token):
            raise CorruptRecord(f"{path}: holds another writer's record")
        return body

    def path(self, series: Series[Record] | Series[Pointer], body: Record | Pointer) -> Path:
        """The file of a body of this series."""
        token = body.token if self.marker.tier == "lww" else ""
        return series.file(Generation(body.generation, token))

    @staticmethod
    def is_gone(path: Path) -> bool:
        """Whether opening a generation finds nothing there, which a listing that lags does not prove.

        Raises:
            VolumeUnavailable: the volume did not answer.
        """
        try:
            return atomic.read_bytes(path) is None
        except NotRegular:
            return False

    def generations(self, series: Series[Body]) -> list[Generation]:
        """The generations listed, the greatest first."""
        own = f"{series.name}.@"
        names = self._listed_once(series.folder)
        parsed = (parse_generation(name) for name in names if name.startswith(own))
        return sorted((p[1] for p in parsed if p), reverse=True)

    def latest(self, series: Series[Body]) -> tuple[Generation, Body | None]:
        """The greatest generation listed, and the newest body that can be read.

        They differ when the newest is damaged: the last good one stays in force, and the
        next write builds a generation above both.
        """
        found = self.generations(series)
        for generation in found:
            try:
                return found[0], self.read(series, generation)
            except CorruptRecord:
                continue
        return (found[0] if found else Generation(0, "")), None

    def newest(self, series: Series[Body], listed: Generation) -> Body | None:
        """The newest readable body, where a listing gave its greatest generation."""
        try:
            return self.read(series, listed)
        except CorruptRecord:
            return self.latest(series)[1]


def _of_name(name: str, entries: Iterable[str]) -> list[str]:
    """The folder and the files of one name among a revision's, or its pointers."""
    return [entry for entry in entries if entry == name or entry.startswith(f"{name}.@")]
