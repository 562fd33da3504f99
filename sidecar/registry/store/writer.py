"""Writing the generations of records and pointers: the compare-and-set.

To write is to take the series' greatest generation, build on it, and publish the next one; of
two writers that build on the same generation one wins and the other gets ``Conflict``. The
acknowledgement is the return of ``append``: from then on every reader finds the generation by
listing names. HEAD follows.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import (
    Conflict,
    CorruptRecord,
    FormatTooNew,
    NewerRecord,
    OperatorError,
    RegistryMissing,
    UnknownOutcome,
    VolumeUnavailable,
)
from lora_fs.sidecar.model import Pointer, Previous, Record
from lora_fs.sidecar.registry.format.layout import Generation, Layout, generation_name, parse_generation
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.head import Announcer, current_head
from lora_fs.sidecar.registry.store.quota import Accounts
from lora_fs.sidecar.registry.store.reader import Body, Reader, Series
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import Ambiguous, TemporaryNames
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.leases import lease

LEASE_WAIT_S = 0.25
SYNCED = 1024  # folders that a writer knows to survive a power loss: each next revision may have one
_OF_ONE_WRITE = {"undone"}  # fields that the next generation does not take over
Change = Callable[[Body | None], dict[str, Any] | None]  # from the newest body to fields of the next one
RACES = 8  # lost in a row before the caller gets ``Conflict``; each means that another writer won


class Registry(Reader):
    """One registry on a volume, to read and to write. Its only state are its temporary names.

    Args:
        create: make the registry if there is none.
        awaited: open it also where there is none: the first registry that comes is this one.
    Attributes:
        accounts: what each namespace may register, and has.
    Raises:
        RegistryMissing: there is none. RegistryLost, FormatTooNew, VolumeUnavailable: it cannot be read.
    """

    def __init__(self, path: Path, *, create: bool = False, awaited: bool = False) -> None:
        found: marker.Marker | None = None
        try:
            found = marker.create(path).marker if create else marker.read_marker(path)
        except RegistryMissing:
            if not awaited:
                raise
        super().__init__(Layout(path), found)
        self._temporary = TemporaryNames()
        self._sync_once = lru_cache(SYNCED)(lambda folder: atomic.sync_names(folder.parent))
        self._announcer = Announcer(self.layout)
        self.accounts = Accounts(self)

    def sweep(self) -> None:
        """Do the chores that are due some time after a write. Any caller may do them."""
        self._temporary.sweep()
        self._announcer.check()

    def close(self) -> None:
        """Remove this process's temporary names, and announce what it wrote."""
        self._temporary.sweep(wait=True)
        self._announcer.check(wait=True)

    def check_writable(self) -> None:
        """Raise unless this is the registry that this object opened, in a format this lora-fs may write."""
        self.check_identity()
        if self.marker.min_writer > marker.FORMAT:
            raise FormatTooNew(
                f"{self.layout.root} needs a writer of format {self.marker.min_writer}; "
                f"this lora-fs writes format {marker.FORMAT}: upgrade it"
            )

    def append(
        self,
        series: Series[Body],
        change: Change[Body],
        *,
        writer: str,
        expect: int | None = None,
        announce: bool = True,
        checked: bool = False,
    ) -> Body:
        """Publish the generation after the newest one, built by ``change``.

        Args:
            change: given the newest body (or None) returns the fields of the next one. None leaves it as it
                is, and writes nothing unless a newer file is damaged. Raises to refuse. Runs again
                after a lost race.
            expect: the generation the caller saw; another one in force is a Conflict.
            announce: advance HEAD; False where the caller writes more before it announces.
            checked: the caller called ``check_writable`` for this write.
        Raises:
            Conflict: the series moved on; nothing of this write is in force.
            UnknownOutcome: the write may be there; look before you repeat it.
            RegistryLost, FormatTooNew: this is not the registry that we opened, or not ours to write,
                as where the newest generation is of another apiVersion.
            OperatorError: the newest generation is the last there can be.
            VolumeUnavailable: nothing is there, or the volume is gone.
        """
        if not checked:
            self.check_writable()
        if self.marker.tier == "lww" and expect is not None:
            raise Conflict("this volume has no hard links: a conditional write cannot be promised")
        for _ in range(RACES):
            with lease(
                self.layout.lease(f"{series.scope.namespace}--{series.scope.model}"), wait_s=LEASE_WAIT_S
            ):
                try:
                    body = self._append_once(series, change, writer, expect)
                except VolumeUnavailable as error:
                    if not isinstance(error.__cause__, FileNotFoundError):
                        raise
                    self._sync_once.cache_clear()  # gc removed a folder, since it was empty
                    continue
            if body is not None:
                break
            if expect is not None:  # what the caller saw is no longer in force
                raise Conflict(f"{series.name}: another writer published first")
        else:
            raise Conflict(f"{series.name}: other writers published first, time and again")
        if announce:
            self.announce()
        self.sweep()
        return body

    def check_changeable(self, series: Series[Body]) -> None:
        """Before the first of several appends: raise if the volume refuses this one, whatever it says.

        Raises:
            FormatTooNew: a newer lora-fs wrote the newest generation. VolumeUnavailable: no answer.
        """
        self.check_writable()
        self._latest_of_ours(series)

    def _next(
        self, series: Series[Body], change: Change[Body], writer: str, expect: int | None
    ) -> tuple[Generation, Body | None, Body | None]:
        """The greatest generation, the newest good body, and the one to write; None: the newest one stays."""
        top, newest = self._latest_of_ours(series)
        seen = newest.generation if newest is not None else 0
        if expect not in (None, seen):
            raise Conflict(f"{series.name}: expected generation {expect}, found {seen}")
        fields = change(newest)
        if fields is None and newest is not None and newest.generation < top.generation:
            fields = {}  # write the good body again, above the unreadable file
        if fields is None:
            if newest is None:
                raise Conflict(f"{series.name}: nothing to keep")
            return top, newest, None
        inherited = newest.model_dump(mode="json", exclude=_OF_ONE_WRITE) if newest is not None else {}
        body = series.kind.model_validate(
            {
                **inherited,
                "namespace": series.scope.namespace,
                "model": series.scope.model,
                "name": series.name,
                "generation": top.generation + 1 if top.generation else self._first(),
                "previous": _previous(newest),
                "epoch": self.marker.epoch,
                "request_id": secrets.token_hex(16),
                "token": secrets.token_hex(16),
                "writer": writer,
                "updated_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                **fields,
            }
        )
        if isinstance(body, Record):
            body = body.following(newest if isinstance(newest, Record) else None)
        return top, newest, body

    def _append_once(
        self, series: Series[Body], change: Change[Body], writer: str, expect: int | None
    ) -> Body | None:
        """One try; None if another writer took the generation."""
        top, newest, body = self._next(series, change, writer, expect)
        if body is None:
            if newest is None or self._listed_anew(series) != top:
                return None
            self.confirm(series, newest)
            return newest
        lww = self.marker.tier == "lww"
        name = generation_name(series.name, body.generation, body.token if lww else "")
        if parse_generation(name) is None:
            raise OperatorError(
                f"{series.folder} holds generation {top.generation} of {series.name}, the last there can "
                "be: remove that file if nobody wrote it on purpose"
            )
        sealed = seal(body)
        if top.generation == 0:  # the maker of these folders may have died before it synced them
            made = make_folder(series.folder, root=self.layout.root)
            for folder in (series.folder, *series.folder.parents)[made:]:
                if folder.parent.is_relative_to(self.layout.root):
                    self._sync_once(folder)
        body = decode(series.kind, sealed)
        try:
            if lww:
                atomic.create_unique(series.folder / name, sealed)
            elif not atomic.publish(series.folder / name, sealed, self._temporary):
                return None
            stands = self._stands(series, top, body)
        except Ambiguous as error:
            with suppress(CorruptRecord, VolumeUnavailable):
                if self._is_passed_over(series, body):
                    return None  # written or not, it is not in force and never will be
            told = f"{error}: {name} may have been written; look with `lora-fs list` before you repeat it"
            raise UnknownOutcome(told) from error
        if not stands:
            atomic.discard(series.folder / name)  # below what is in force nobody reads it
            return None
        self._announcer.note(self.path(series, body))
        return body

    def _first(self) -> int:
        """The generation that a series begins with, so that no number of one that is gone comes again.

        Raises:
            VolumeUnavailable: HEAD, which tells it, cannot be read.
        """
        head = current_head(self.layout)
        return head.first if head is not None else 1

    def _stands(self, series: Series[Body], top: Generation, body: Body) -> bool:
        """Whether a published generation counts: gc may have freed its name while the writer slept.

        gc removes the lowest generations first. So while the one before it is there, gc never freed the name.
        Otherwise every generation above it must build on it.

        Raises:
            Ambiguous: the volume does not say.
        """
        try:
            if top.generation and self._is_there(series, top):
                return True
            return not self._is_passed_over(series, body)
        except CorruptRecord:
            return False
        except VolumeUnavailable as error:
            raise Ambiguous(str(error)) from error

    def _is_passed_over(self, series: Series[Body], body: Body) -> bool:
        """Whether another generation lies above it, and the lowest of these does not build on it.

        Raises:
            CorruptRecord, VolumeUnavailable: the volume does not say.
        """
        above = [one for one in self.generations(series) if one.generation > body.generation]
        return bool(above) and self.read(series, above[-1]).previous != _previous(body)

    def _is_there(self, series: Series[Body], top: Generation) -> bool:
        """Whether a generation is on the server. Tier lww reuses no name: there an open is enough.

        GlusterFS, NFS and sshfs answer an open for seconds after another client removed the file.
        ``link()`` reaches the server.
        """
        path = series.file(top)
        return not self.is_gone(path) if self.marker.tier == "lww" else atomic.is_on_server(path)

    def _listed_anew(self, series: Series[Body]) -> Generation:
        """The greatest generation, in no listing that this client kept from before another's write.

        A client that keeps listings (sshfs: for 20 s) drops that of a folder in which it made a name.
        """
        if self.marker.tier != "lww":
            with suppress(VolumeUnavailable):  # full or read-only: write nothing
                self._temporary.add(atomic.write_temporary(series.folder, b"", sync=False))
        return next(iter(self.generations(series)), Generation(0, ""))

    def _latest_of_ours(self, series: Series[Body]) -> tuple[Generation, Body | None]:
        """Do ``latest``. The next generation goes over a damaged one, and not over a newer lora-fs's."""
        top, newest = self.latest(series)
        if top.generation > (newest.generation if newest is not None else 0):
            try:
                self.read(series, top)
            except NewerRecord as error:
                raise FormatTooNew(f"{error}: upgrade this lora-fs to change {series.name}") from error
            except CorruptRecord:
                pass
        return top, newest

    def confirm(self, series: Series[Body], body: Body) -> None:
        """Make a body survive a power loss, and announce it: its writer may have died before.

        Raises:
            VolumeUnavailable: it may not survive one, so nobody may acknowledge it once more.
        """
        atomic.sync_names(series.folder)
        self._announcer.note(self.path(series, body), found=True)

    def announce(self) -> None:
        """Tell every reader of what this thread wrote, or found written. A failure delays them, no more."""
        self._announcer.announce(self.marker.epoch)


def _previous(newest: Record | Pointer | None) -> Previous | None:
    return Previous(generation=newest.generation, sum=newest.sum) if newest is not None else None
