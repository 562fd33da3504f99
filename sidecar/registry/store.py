"""Reading and writing the generations of records and pointers: the compare-and-set.

A *series* is the generations of one name in one folder. To write is to take the series'
greatest generation, build on it, and publish the next one; of two writers that build on the
same generation one wins and the other is told. The acknowledgement is the return of
``append``: from then on every reader finds the generation by listing names. HEAD follows.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_fs.sidecar.errors import (
    Conflict,
    CorruptRecord,
    FormatTooNew,
    LoraFsError,
    RegistryLost,
    UnknownOutcome,
)
from lora_fs.sidecar.model import AdapterKey, Pointer, Previous, Record, Scope
from lora_fs.sidecar.registry import atomic, root
from lora_fs.sidecar.registry.atomic import Ambiguous, TemporaryNames
from lora_fs.sidecar.registry.codec import decode, seal
from lora_fs.sidecar.registry.layout import (
    ACTIVE,
    Generation,
    Layout,
    generation_name,
    is_segment,
    latest_by_name,
    parse_generation,
)
from lora_fs.sidecar.registry.lock import lease

Body = TypeVar("Body", Record, Pointer)

LEASE_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class Series(Generic[Body]):
    """The generations of ``name`` in ``folder``, each a ``kind``."""

    kind: type[Body]
    folder: Path
    name: str


@dataclass(frozen=True, slots=True)
class RevisionListing:
    """One revision's folder: newest generation and artifact folders, by adapter name."""

    records: dict[str, Generation]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScopeListing:
    """The names in a scope, bodies unread."""

    revisions: dict[str, RevisionListing]
    pointers: dict[str, Generation]


class Registry:
    """One registry on a volume. Thread-safe: it keeps no state but its temporary names."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.layout = Layout(path)
        self.marker = root.create(path) if create else root.read_marker(path)
        self._temporary = TemporaryNames()

    def close(self) -> None:
        """Remove this process's temporary names."""
        self._temporary.sweep(wait=True)

    def check_identity(self) -> None:
        """Raise RegistryLost unless the registry that was opened is still the one mounted."""
        try:
            marker = root.read_marker(self.layout.root)
        except LoraFsError as error:
            raise RegistryLost(f"{self.layout.root}: the registry is not there: {error}") from error
        if marker.registry_uuid != self.marker.registry_uuid:
            raise RegistryLost(
                f"{self.layout.root} holds registry {marker.registry_uuid}, "
                f"this process opened {self.marker.registry_uuid}: another volume is mounted"
            )
        self.marker = marker

    # -- reading ---------------------------------------------------------------------------

    def records(self, key: AdapterKey) -> Series[Record]:
        return Series(Record, self.layout.revision(key.scope, key.revision), key.name)

    def pointers(self, scope: Scope, name: str) -> Series[Pointer]:
        return Series(Pointer, self.layout.active(scope), name)

    def scan(self, scope: Scope) -> ScopeListing:
        """List a scope's names. A folder that is not there is an empty scope."""
        revisions: dict[str, RevisionListing] = {}
        pointers: dict[str, Generation] = {}
        for entry in atomic.list_names(self.layout.scope(scope)) or ():
            if entry == ACTIVE:
                pointers = latest_by_name(atomic.list_names(self.layout.active(scope)) or ())
            elif is_segment(entry):
                names = atomic.list_names(self.layout.revision(scope, entry)) or ()
                revisions[entry] = RevisionListing(
                    latest_by_name(names),
                    tuple(name for name in names if is_segment(name)),
                )
        return ScopeListing(revisions, pointers)

    def read(self, series: Series[Body], generation: Generation) -> Body:
        """Read one body.

        Raises:
            CorruptRecord: not there, its seal does not hold, or it is not what its name says.
            VolumeUnavailable: the volume did not answer.
        """
        path = series.folder / generation_name(series.name, *generation)
        data = atomic.read_bytes(path)
        if data is None:
            raise CorruptRecord(f"{path}: listed and not there")
        try:
            body = decode(series.kind, data)
        except CorruptRecord as error:
            raise CorruptRecord(f"{path}: {error}") from error
        if (body.name, body.generation) != (series.name, generation.generation):
            raise CorruptRecord(f"{path}: holds {body.name} generation {body.generation}")
        return body

    def latest(self, series: Series[Body]) -> tuple[Generation, Body | None]:
        """The greatest generation listed, and the newest body that can be read.

        They differ when the newest is damaged: the last good one stays in force, and the
        next write builds a generation above both.
        """
        parsed = (parse_generation(name) for name in atomic.list_names(series.folder) or ())
        found = sorted((p[1] for p in parsed if p and p[0] == series.name), reverse=True)
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
        scope: Scope,
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
                None to leave it as it is; raises to refuse.
            request_id: an id under which an unknown outcome may be retried.
            expect: the generation the caller saw; another one in force is a Conflict.
            announce: advance HEAD; False where the caller writes more before it announces.
        Raises:
            Conflict: the series moved on; nothing was written.
            UnknownOutcome: it may have been written; retry with its request_id.
            VolumeUnavailable: it was not written, or the volume is gone.
        """
        self._check_writable()
        request_id = request_id or secrets.token_hex(16)
        lww = self.marker.tier == "lww"
        if lww and expect is not None:
            raise Conflict("this volume has no hard links: a conditional write cannot be promised")
        atomic.make_folder(series.folder)
        with lease(self.layout.lease(f"{scope.namespace}--{scope.model}"), wait_s=LEASE_WAIT_S):
            top, newest = self.latest(series)
            if newest is not None and newest.request_id == request_id:
                return newest
            if expect is not None and expect != (newest.generation if newest else 0):
                seen = newest.generation if newest else 0
                raise Conflict(f"{series.name}: expected generation {expect}, found {seen}")
            fields = change(newest)
            if fields is None:
                if newest is None:
                    raise Conflict(f"{series.name}: nothing to keep")
                return newest
            token = secrets.token_hex(16)
            inherited = newest.model_dump(mode="json") if newest is not None else {}
            body = series.kind.model_validate(
                {
                    **inherited,
                    "namespace": scope.namespace,
                    "model": scope.model,
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
            sealed = seal(body)
            name = generation_name(series.name, body.generation, token if lww else "")
            try:
                if lww:
                    atomic.create_unique(series.folder / name, sealed)
                elif not atomic.publish(series.folder / name, sealed, self._temporary):
                    raise Conflict(
                        f"{series.name}: another writer published generation {body.generation} first"
                    )
            except Ambiguous as error:
                raise UnknownOutcome(str(error), request_id) from error
            if announce:
                self.announce()
        self._temporary.sweep()
        return decode(series.kind, sealed)

    def announce(self) -> None:
        """Tell every reader to look. A failure delays them until their next scan, no more."""
        root.advance_head(self.layout.root, self.marker.epoch)

    def _check_writable(self) -> None:
        if self.marker.min_writer > root.FORMAT:
            raise FormatTooNew(
                f"{self.layout.root} has format {self.marker.format}; "
                f"this lora-fs writes format {root.FORMAT}: upgrade it"
            )


def _previous(newest: Record | Pointer | None) -> Previous | None:
    return Previous(generation=newest.generation, sum=newest.sum) if newest is not None else None
