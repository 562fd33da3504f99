"""The copy of an adapter's served files that the registry keeps: made beside its place, then renamed."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import Conflict
from lora_fs.sidecar.model import AdapterKey, FileEntry, Record
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.mending import mend_files
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic


class Taken(Conflict):
    """The revision has other bytes, on record or in its place."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Of ``files`` of ``source``, whose digest is ``digest``, at the place of ``key``.

    Attributes:
        moved: ``source`` lies in ``.incoming/`` and is moved, not copied.
        follow: whether ``source``, or a folder on its way, may be a symlink.
    """

    registry: Registry
    key: AdapterKey
    source: Path
    files: tuple[str, ...]
    digest: str
    progress: Progress | None
    moved: bool
    follow: bool

    @property
    def target(self) -> Path:
        """Its place."""
        return self.registry.layout.artifact(self.key)

    def is_there(self) -> bool:
        """Whether a folder lies in its place."""
        return atomic.is_folder(self.target)

    def make(self) -> None:
        """Copy, and place, what a record names. Raises as ``made`` and ``place`` do."""
        with self.made() as incoming:
            self.place(incoming, recorded=True)

    def lost(self, record: Record) -> bool:
        """Whether a file is gone that the registry keeps for a record of these bytes, or has another size.

        Of a dropped folder: whether all of it is gone. What lies in it its owner may be changing.
        """
        if self.registry.layout.resolve(record.spec.path) != self.target:
            return False  # it refers to a folder that is its owner's
        if record.origin == "folder":
            return not self.is_there()
        return not all(self._lies(entry) for entry in record.spec.files)

    def restore(self, record: Record) -> bool:
        """Bring back what is lost; False if nothing is. Raises as ``make`` and ``mend_files`` do."""
        lost = self.lost(record)
        if lost and (record.origin == "folder" or not self.is_there()):
            self.make()
        elif lost:
            with self.made() as incoming:
                mend_files(self.registry.layout, incoming, record)
        artifacts.unmark(self.target)
        return lost

    def _lies(self, entry: FileEntry) -> bool:
        try:
            status = (self.target / entry.path).lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise atomic.unavailable(error, f"cannot look at {self.target / entry.path}") from error
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.size_bytes

    @contextmanager
    def made(self) -> Iterator[Path]:
        """The files under a temporary name, for as long as the block lasts.

        Raises:
            Conflict: they changed while they were copied.
            InputError, VolumeUnavailable: see ``artifacts.copy_files``.
        """
        if self.moved:
            yield self.source
            return
        incoming = artifacts.temporary_in(self.registry.layout.incoming(self.key.scope))
        try:
            copied = artifacts.copy_files(
                self.source, incoming, self.files, self.progress, follow=self.follow
            )
            if artifacts.digest_of(copied) != self.digest:
                raise Conflict(f"{self.source} changed while it was copied: try again")
            yield incoming
        finally:
            artifacts.discard(incoming)

    def place(self, incoming: Path, *, recorded: bool) -> None:
        """Give the copy its name.

        Args:
            recorded: see ``artifacts.place``.
        Raises:
            Taken: other bytes lie there.
            VolumeUnavailable: it cannot be moved.
        """
        if artifacts.place(incoming, self.target, recorded=recorded):
            return
        there = artifacts.hash_files(self.target, self.files)
        if artifacts.digest_of(there) != self.digest:
            raise Taken(f"{self.target} holds other bytes: revisions never change; register a new one")
