"""The bytes that are registered: read once, and what is judged is what is hashed and kept.

A source that its owner may change is copied into ``.incoming/`` as it is validated: each part that was
read is validated, hashed and written, so the three never differ. What lies in ``.incoming/`` already, or
stays where it is, is validated and hashed in one pass alike, and compared with how it looked before. The
source is opened once, and nothing of it is looked for by its path again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import Conflict, InputError, InvalidAdapter, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, FileEntry, Record, Scope
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.mending import lies, mend_files
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.validate import Expectation, Report, open_adapter, validate

ENDS_BYTES = 64 << 10  # compared to tell whether a source is likely what its name serves


class NotWhole(InputError):
    """A dropped folder has its full size while some of its bytes have not arrived."""


class Taken(Conflict):
    """The revision has other bytes, on record or in its place."""


@dataclass(slots=True)
class Judged:
    """A valid adapter's bytes.

    Attributes:
        source: where they were read.
        folder: ``source``, open: what is read of it later is read there.
        draft: the private copy of them; None: there is none yet.
    """

    source: Path
    folder: int
    report: Report
    files: tuple[FileEntry, ...]
    draft: Path | None

    @property
    def digest(self) -> str:
        return artifacts.digest_of(self.files)


class _Taker:
    """Writes the parts of files, each in turn, into ``folder``, and hashes them in a thread beside."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._name, self._size = folder, "", 0
        self._digest = hashlib.sha256()
        self._write: artifacts.Write = len
        self._beside, self._file = ThreadPoolExecutor(1, "lora-fs-hash"), ExitStack()
        self._doing: Future[None] | None = None
        self.files: list[FileEntry] = []

    def __enter__(self) -> _Taker:
        return self

    def __exit__(self, *_: object) -> None:
        self._beside.shutdown()
        with suppress(LoraFsError):  # what was taken whole was closed by ``end``
            self._file.close()

    def __call__(self, name: str, part: memoryview) -> None:
        self._wait()
        if name != self._name:
            self.end()
            self._name, self._size, self._digest = name, 0, hashlib.sha256()
            if self._folder is not None:
                if not self.files:
                    artifacts.make_draft(self._folder, marked=True)
                self._write = self._file.enter_context(artifacts.written(self._folder / name, sync=True))
        self._size += len(part)
        if len(part) >= artifacts.LEAST_BYTES:
            self._doing = self._beside.submit(self._digest.update, part)
        else:
            self._digest.update(part)
        self._write(part)  # here: what hangs is the caller's thread, and none that an exit waits for

    def _wait(self) -> None:
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.result()

    def end(self) -> None:
        """See that the file under way is whole and on the volume."""
        self._wait()
        if self._name:
            self._file.close()
            entry = FileEntry(path=self._name, size_bytes=self._size, sha256=self._digest.hexdigest())
            self.files.append(entry)
            self._name = ""


def opened(source: Path, called: str, *, follow: bool) -> AbstractContextManager[int]:
    """Open a source once: all that is asked of it is asked through this handle.

    A folder that is swapped for another and back, or for a link, is so never read for the one that it was.

    Args:
        called: what its sender calls it.
        follow: whether ``source``, or a folder on its way, may be a symlink.
    Raises:
        InvalidAdapter: it is not there, or may not be read. SymbolicLink: it is not followed.
        VolumeUnavailable: the volume did not answer.
    """
    return open_adapter(source, called) if follow else artifacts.opened(source, follow=False)


@contextmanager
def judged(
    source: Path,
    folder: int,
    expectation: Expectation,
    draft: Path | None,
    *,
    called: str,
    still: str | None,
    progress: Progress | None = None,
) -> Iterator[Judged]:
    """Validate, hash and, into ``draft``, copy an adapter. The draft is gone afterwards, unless it was moved.

    Args:
        folder: ``source``, opened.
        draft: a folder that is not there; None: the bytes stay where they are.
        called: what its sender calls it.
        still: the fingerprint that the folder has before and after, also at its place; None: any.
    Raises:
        InvalidAdapter: it cannot be served.
        TargetUnavailable: writing failed. VolumeUnavailable: reading did, or the folder changed.
    """
    try:
        if still is not None:
            _check_still(source, folder, still)
        with _Taker(draft) as taker:
            report = validate(source, expectation, progress=progress, taking=taker, folder_fd=folder)
            if not report.ok or report.shape is None:
                raise InvalidAdapter(called, report.errors)
            taker.end()
        if draft is not None:
            artifacts.carry(source, draft, folder)
        if still is not None:
            _check_still(source, folder, still)
        yield Judged(source, folder, report, tuple(taker.files), draft)
    finally:
        if draft is not None:
            artifacts.discard(draft)


def _check_still(source: Path, folder: int, still: str) -> None:
    """Of both: the bytes come from the folder that is open, and a record names the one at its place."""
    if {artifacts.fingerprint(source, folder), artifacts.fingerprint(source)} != {still}:
        raise VolumeUnavailable(f"{source} changed while it was read: it is looked at again")


def looks_like(folder: int, artifact: Path, record: Record) -> bool:
    """Whether an open folder has a record's sizes and the last bytes of its files."""
    with suppress(OSError, InputError):
        return all(
            _end(one.path, one, folder) == _end(artifact / one.path, one) != b"" for one in record.spec.files
        )
    return False


def _end(path: str | Path, entry: FileEntry, dir_fd: int | None = None) -> bytes:
    with os.fdopen(artifacts.open_regular(path, dir_fd), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != entry.size_bytes:
            return b""
        return os.pread(file.fileno(), ENDS_BYTES, max(0, entry.size_bytes - ENDS_BYTES))


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of judged bytes that the registry keeps at the place of ``key``.

    Attributes:
        moved: ``judged.source`` lies in ``.incoming/``: it is moved there.
    """

    registry: Registry
    key: AdapterKey
    judged: Judged
    moved: bool

    @property
    def target(self) -> Path:
        """Its place."""
        return self.registry.layout.artifact(self.key)

    def is_there(self) -> bool:
        """Whether a folder lies in its place."""
        return atomic.is_folder(self.target)

    def lost(self, record: Record) -> bool:
        """Whether a file is gone that the registry keeps for a record of these bytes, or has another size.

        Of a dropped folder: whether all of it is gone. What lies in it its owner may be changing.
        """
        if self.registry.layout.resolve(record.spec.path) != self.target:
            return False  # it refers to a folder that is its owner's
        if record.origin == "folder":
            return not self.is_there()
        return not all(lies(self.target, entry) for entry in record.spec.files)

    def restore(self, record: Record) -> bool:
        """Bring back what is lost; False if nothing is. Raises as ``private`` and ``mend_files`` do."""
        lost = self.lost(record)
        if lost:
            with self.private() as draft:
                if record.origin == "folder" or not self.is_there():
                    self.place(draft, recorded=True)
                else:
                    mend_files(self.registry.layout, draft, record)
        artifacts.unmark(self.target)
        return lost

    @contextmanager
    def private(self) -> Iterator[Path]:
        """A folder of these bytes that nobody else changes, for as long as the block lasts.

        Raises:
            Conflict: they were judged where they lay, and changed before they were copied.
            InputError, VolumeUnavailable: see ``artifacts.copy_files``.
        """
        known = self.judged.source if self.moved else self.judged.draft
        if known is not None:
            yield known
            return
        draft = new_draft(self.registry, self.key.scope)
        names, source = [entry.path for entry in self.judged.files], self.judged.source
        try:
            copied = artifacts.copy_files(source, draft, names, folder_fd=self.judged.folder)
            if artifacts.digest_of(copied) != self.judged.digest:
                raise Conflict(f"{source} changed while it was copied: try again")
            yield draft
        finally:
            artifacts.discard(draft)

    def place(self, draft: Path, *, recorded: bool) -> None:
        """Give the copy its name.

        Args:
            recorded: a record names it; if not, it is marked as one that nobody dropped.
        Raises:
            Taken: other bytes lie there.
            VolumeUnavailable: it cannot be moved.
        """
        if self.moved:
            artifacts.mark(draft)
        if recorded:
            artifacts.unmark(draft)
        if artifacts.place(draft, self.target):
            return
        there = artifacts.hash_files(self.target, [entry.path for entry in self.judged.files])
        if artifacts.digest_of(there) != self.judged.digest:
            raise Taken(f"{self.target} holds other bytes: revisions never change; register a new one")


def new_draft(registry: Registry, scope: Scope) -> Path:
    """A fresh name for a private copy."""
    return artifacts.temporary_in(registry.layout.incoming(scope))
