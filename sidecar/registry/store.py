"""Reading and writing the generations of records and pointers: the compare-and-set.

A *series* is the generations of one name in one folder. To write is to take the series'
greatest generation, build on it, and publish the next one; of two writers that build on the
same generation one wins and the other is told. The acknowledgement is the return of
``append``: from then on every reader finds the generation by listing names. HEAD follows.
"""

from __future__ import annotations

import datetime
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_fs.sidecar.errors import (
    Conflict,
    CorruptRecord,
    FormatTooNew,
    InputError,
    NotFound,
    RegistryLost,
    TemporaryError,
    UnknownOutcome,
    VolumeUnavailable,
)
from lora_fs.sidecar.model import AdapterKey, Pointer, Previous, Record, Scope
from lora_fs.sidecar.registry import atomic, root
from lora_fs.sidecar.registry.atomic import Ambiguous, NotRegular, TemporaryNames
from lora_fs.sidecar.registry.codec import decode, seal
from lora_fs.sidecar.registry.layout import (
    ACTIVE,
    Generation,
    Layout,
    Listing,
    generation_name,
    is_segment,
    parse_generation,
)
from lora_fs.sidecar.registry.lock import lease

logger = logging.getLogger(__name__)

Body = TypeVar("Body", Record, Pointer)

LEASE_WAIT_S = 0.25
RACES = 8  # lost in a row before the caller is told; each means that another writer went ahead


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


@dataclass(frozen=True, slots=True)
class ScopeListing:
    """The names in a scope, bodies unread."""

    revisions: Mapping[str, Listing] = field(default_factory=dict)
    active: Listing = field(default_factory=Listing)

    @property
    def pointers(self) -> Mapping[str, Generation]:
        """The newest pointer of each name."""
        return self.active.records


class Registry:
    """One registry on a volume. Thread-safe: it keeps no state but its temporary names."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.layout = Layout(path)
        self.marker = root.create(path) if create else root.read_marker(path)
        self._temporary = TemporaryNames()

    def sweep(self) -> None:
        """Remove this process's temporary names that are due: for who comes by anyway."""
        self._temporary.sweep()

    def close(self) -> None:
        """Remove this process's temporary names."""
        self._temporary.sweep(wait=True)

    def check_identity(self) -> None:
        """Raise RegistryLost unless the registry that was opened is still the one mounted.

        Raises:
            FormatTooNew, VolumeUnavailable: nothing is known of it.
        """
        try:
            marker = root.read_marker(self.layout.root)
        except NotFound as error:
            raise RegistryLost(f"{self.layout.root}: the registry is not there: {error}") from error
        if marker.registry_uuid != self.marker.registry_uuid:
            raise RegistryLost(
                f"{self.layout.root} holds registry {marker.registry_uuid}, "
                f"this process opened {self.marker.registry_uuid}: another volume is mounted"
            )
        self.marker = marker

    def check_writable(self) -> None:
        """Raise unless this is the registry that was opened, in a format this lora-fs may write."""
        self.check_identity()
        if self.marker.min_writer > root.FORMAT:
            raise FormatTooNew(
                f"{self.layout.root} has format {self.marker.format}; "
                f"this lora-fs writes format {root.FORMAT}: upgrade it"
            )

    # -- reading ---------------------------------------------------------------------------

    def records(self, key: AdapterKey) -> Series[Record]:
        folder = self.layout.revision(key.scope, key.revision)
        return Series(Record, folder, key.scope, key.revision, key.name)

    def pointers(self, scope: Scope, name: str) -> Series[Pointer]:
        return Series(Pointer, self.layout.active(scope), scope, None, name)

    def scan(
        self,
        scope: Scope,
        last: ScopeListing | None = None,
        unlisted: dict[Path, VolumeUnavailable] | None = None,
    ) -> ScopeListing:
        """List a scope's names. A folder that is not there is an empty scope.

        Args:
            last: an earlier listing: what is the same is taken over from it, the very object.
            unlisted: takes the folders that cannot be listed, which then keep their last
                listing; without it the first one raises.
        Raises:
            VolumeUnavailable: the scope itself, or a folder in it, cannot be listed.
        """
        last = last or ScopeListing()
        revisions: dict[str, Listing] = {}
        active = Listing()
        for entry in atomic.list_names(self.layout.scope(scope)) or ():
            if entry == ACTIVE:
                active = _list(self.layout.active(scope), last.active, unlisted) or active
            elif is_segment(entry):
                folder = self.layout.revision(scope, entry)
                listing = _list(folder, last.revisions.get(entry), unlisted)
                if listing is not None:
                    revisions[entry] = listing
        return ScopeListing(revisions, active)

    def mentions(self, scope: Scope, name: str) -> dict[str, Listing]:
        """The revisions in which a name has records or a folder."""
        found = {}
        for revision in atomic.list_names(self.layout.scope(scope)) or ():
            if is_segment(revision):
                names = atomic.list_names(self.layout.revision(scope, revision)) or ()
                own = [entry for entry in names if entry == name or entry.startswith(f"{name}.@")]
                if own:
                    found[revision] = Listing.of(own)
        return found

    def read(self, series: Series[Body], generation: Generation) -> Body:
        """Read one body.

        Raises:
            CorruptRecord: not there, no file, its seal does not hold, or it belongs elsewhere.
            VolumeUnavailable: the volume did not answer.
        """
        path = series.folder / generation_name(series.name, *generation)
        try:
            data = atomic.read_bytes(path)
        except NotRegular as error:
            raise CorruptRecord(str(error)) from error
        if data is None:
            raise CorruptRecord(f"{path}: listed and not there")
        try:
            body = decode(series.kind, data)
        except CorruptRecord as error:
            raise CorruptRecord(f"{path}: {error}") from error
        scope = Scope(body.namespace, body.model)
        if (body.name, body.generation, scope) != (series.name, generation.generation, series.scope):
            raise CorruptRecord(f"{path}: holds generation {body.generation} of {scope}: {body.name}")
        if series.revision not in (None, body.revision):
            raise CorruptRecord(f"{path}: holds a record of revision {body.revision}")
        if generation.token not in ("", body.token):
            raise CorruptRecord(f"{path}: holds another writer's record")
        return body

    def generations(self, series: Series[Body]) -> list[Generation]:
        """The generations listed, the greatest first."""
        own = f"{series.name}.@"
        names = atomic.list_names(series.folder) or ()
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

    # -- writing ---------------------------------------------------------------------------

    def append(
        self,
        series: Series[Body],
        change: Callable[[Body | None], dict[str, Any] | None],
        *,
        writer: str,
        request_id: str | None = None,
        expect: int | None = None,
        announce: bool = True,
    ) -> Body:
        """Publish the generation after the newest one, built by ``change``.

        Args:
            change: given the newest body (or None) returns the fields of the next one, or
                None to leave it as it is; raises to refuse. Called again if a race is lost.
            request_id: the id of an UnknownOutcome that is retried: if that write landed, it is
                returned and nothing is written.
            expect: the generation the caller saw; another one in force is a Conflict.
            announce: advance HEAD; False where the caller writes more before it announces.
        Raises:
            Conflict: the series moved on; nothing was written.
            UnknownOutcome: it may have been written; retry with its request_id.
            RegistryLost, FormatTooNew: this is not the registry that was opened, or not ours to write.
            VolumeUnavailable: it was not written, or the volume is gone.
        """
        self.check_writable()
        if self.marker.tier == "lww" and expect is not None:
            raise Conflict("this volume has no hard links: a conditional write cannot be promised")
        atomic.make_folder(series.folder)
        for _ in range(RACES if expect is None or request_id is not None else 1):
            with lease(
                self.layout.lease(f"{series.scope.namespace}--{series.scope.model}"), wait_s=LEASE_WAIT_S
            ):
                body = self._append_once(series, change, writer, request_id, expect)
            if body is not None:
                break
        else:
            raise Conflict(f"{series.name}: other writers published first, time and again")
        if announce:
            self.announce()
        self.sweep()
        return body

    def _append_once(
        self,
        series: Series[Body],
        change: Callable[[Body | None], dict[str, Any] | None],
        writer: str,
        request_id: str | None,
        expect: int | None,
    ) -> Body | None:
        """One try; None if another writer took the generation."""
        if request_id is not None:
            earlier = self._written_under(series, request_id)
            if earlier is not None:
                return earlier
        top, newest = self.latest(series)
        if expect is not None and expect != (newest.generation if newest else 0):
            seen = newest.generation if newest else 0
            raise Conflict(f"{series.name}: expected generation {expect}, found {seen}")
        fields = change(newest)
        if fields is None:
            if newest is None:
                raise Conflict(f"{series.name}: nothing to keep")
            return newest
        token, request_id = secrets.token_hex(16), request_id or secrets.token_hex(16)
        inherited = newest.model_dump(mode="json") if newest is not None else {}
        body = series.kind.model_validate(
            {
                **inherited,
                "namespace": series.scope.namespace,
                "model": series.scope.model,
                "name": series.name,
                "generation": top.generation + 1,
                "previous": _previous(newest),
                "epoch": self.marker.epoch,
                "request_id": request_id,
                "token": token,
                "writer": writer,
                "updated_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                **fields,
            }
        )
        lww = self.marker.tier == "lww"
        name = generation_name(series.name, body.generation, token if lww else "")
        if parse_generation(name) is None:
            raise InputError(
                f"{series.folder} holds generation {top.generation} of {series.name}, the last there can "
                "be: remove that file if nobody wrote it on purpose"
            )
        sealed = seal(body)
        try:
            if lww:
                atomic.create_unique(series.folder / name, sealed)
            elif not atomic.publish(series.folder / name, sealed, self._temporary):
                return None
        except Ambiguous as error:
            raise UnknownOutcome(str(error), request_id) from error
        return decode(series.kind, sealed)

    def _written_under(self, series: Series[Body], request_id: str) -> Body | None:
        for generation in self.generations(series):
            try:
                body = self.read(series, generation)
            except CorruptRecord:
                continue
            if body.request_id == request_id:
                return body
        return None

    def announce(self) -> None:
        """Tell every reader to look. A failure delays them until their next scan, no more."""
        try:
            root.advance_head(self.layout.root, self.marker.epoch)
        except TemporaryError as error:
            logger.warning("written, and seen by others at their next scan only: %s", error)


def _list(
    folder: Path, last: Listing | None, unlisted: dict[Path, VolumeUnavailable] | None
) -> Listing | None:
    try:
        names = atomic.list_names(folder)
    except VolumeUnavailable as error:
        if unlisted is None:
            raise
        unlisted[folder] = error
        return last
    if names is None:
        return None
    return last if last is not None and last.names == names else Listing.of(names, last)


def _previous(newest: Record | Pointer | None) -> Previous | None:
    return Previous(generation=newest.generation, sum=newest.sum) if newest is not None else None
