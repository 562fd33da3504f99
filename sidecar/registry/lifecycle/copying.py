"""Reads the bytes of a registration once: it judges, hashes and keeps the same bytes.

A source that its owner may change is copied into ``.incoming/`` during its validation. One read serves all
three: validation, hash and copy. So they never differ. Files that lie in ``.incoming/`` already, or stay
where they are, get one pass of validation and hashing. They must look as they did before. This module opens
the source once, and reads nothing of it by its path again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import Conflict, InputError, InvalidAdapter, Taken, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, FileEntry, Record
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.mending import lies, mend_files
from lora_fs.sidecar.registry.lifecycle.taking import Taker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.trust import BUNDLE, Refusal, read_bundle
from lora_fs.sidecar.validate import Expectation, Report, looks_preallocated, open_adapter, validate

ENDS_BYTES = 64 << 10  # compared to tell whether a source is likely what its name serves


class NotWhole(InputError):
    """A dropped folder has its full size while some of its bytes have not arrived."""


@dataclass(frozen=True, slots=True)
class Held:
    """A source, opened once: every read of it goes through this handle.

    So a folder that somebody swaps for another or for a link, and back, never passes for the first one.

    Attributes:
        folder: the handle.
        called: what its sender calls it.
    """

    path: Path
    folder: int
    called: str

    @classmethod
    @contextmanager
    def opened(cls, path: Path, called: str, *, follow: bool) -> Iterator[Held]:
        """Open a source. ``follow``: whether it, or a folder on its way, may be a symlink.

        Raises:
            InvalidAdapter: the source is absent or unreadable. SymbolicLink: it is a link.
            VolumeUnavailable: the volume did not answer.
        """
        with open_adapter(path, called) if follow else artifacts.opened(path) as folder:
            yield cls(path, folder, called)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of its files, by a new look."""
        return artifacts.fingerprint(self.path, self.folder)

    def check_still(self, still: str | None) -> None:
        """Raise VolumeUnavailable if the open folder, or its path now, looks otherwise than ``still``."""
        if still is not None and {self.fingerprint, artifacts.fingerprint(self.path)} != {still}:
            raise VolumeUnavailable(f"{self.path} changed while it was read: it is looked at again")

    def check_whole(self) -> None:
        """Raise NotWhole for a copy that is under way."""
        if looks_preallocated(self.path, self.folder):
            raise NotWhole("its tensors end in zeros, as an unfinished copy does")

    def looks_like(self, artifact: Path, record: Record) -> bool:
        """Whether its files have a record's sizes and last bytes: a look before the copy."""
        with suppress(OSError, InputError):
            return all(
                _end(one.path, one, self.folder) == _end(artifact / one.path, one) != b""
                for one in record.spec.files
            )
        return False


def _end(path: str | Path, entry: FileEntry, dir_fd: int | None = None) -> bytes:
    with os.fdopen(artifacts.open_regular(path, dir_fd), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != entry.size_bytes:
            return b""
        return os.pread(file.fileno(), ENDS_BYTES, max(0, entry.size_bytes - ENDS_BYTES))


@dataclass(slots=True)
class Judged:
    """A valid adapter's bytes.

    Attributes:
        source: where they were read, still open.
        draft: the private copy of them; None: there is none yet.
        signer: who signed them; None: nobody has to.
    """

    source: Held
    report: Report
    files: tuple[FileEntry, ...]
    draft: Path | None
    signer: str | None = None

    @property
    def digest(self) -> str:
        return artifacts.digest_of(self.files)

    def check_arrived(self, hashes: Mapping[str, str]) -> None:
        """Raise VolumeUnavailable where a file is not what arrived, by its SHA-256."""
        for entry in self.files:
            if hashes.get(entry.path, entry.sha256) != entry.sha256:
                called = self.source.called
                raise VolumeUnavailable(f"{called}: {entry.path} changed after it arrived: fetch it again")


@contextmanager
def judged(
    source: Held,
    expectation: Expectation,
    draft: Path | None,
    *,
    root: Path | None = None,
    namespace: str = "",
    still: str | None,
    progress: Progress | None = None,
) -> Iterator[Judged]:
    """Validate, hash and, into ``draft``, copy an adapter. Unless somebody moved the draft, it goes.

    Args:
        draft: a folder that is not there; None: the bytes stay where they are.
        root: of the registry that the draft belongs to.
        namespace: whose signers count, where the expectation names some.
        still: the fingerprint that the folder has before and after, also at its place; None: any.
    Raises:
        InvalidAdapter: no engine can serve it, or nobody who may signed it. TrustUnreadable: nobody knows.
        TargetUnavailable: writing failed. VolumeUnavailable: reading did, or the folder changed.
    """
    try:
        source.check_still(still)
        with Taker(draft, root=root, marked=True) as taker:
            report = validate(
                source.path, expectation, progress=progress, taking=taker, folder_fd=source.folder
            )
            if not report.ok or report.shape is None:
                raise InvalidAdapter(source.called, report.errors)
            taker.end()
            files = tuple(taker.files)
            if draft is not None:
                artifacts.carry(source.path, source.folder, taker)
        source.check_still(still)
        yield Judged(source, report, files, draft, _signer(source, files, namespace, expectation))
    finally:
        if draft is not None:
            artifacts.discard(draft)


def _signer(
    source: Held, files: tuple[FileEntry, ...], namespace: str, expectation: Expectation
) -> str | None:
    """Who signed the bytes. It compares their digests, and reads nothing again."""
    if expectation.trust is None:
        return None
    try:
        return expectation.trust.check(namespace, files, read_bundle(source.path, source.folder))
    except Refusal as refusal:
        raise InvalidAdapter(source.called, [refusal.finding]) from refusal


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of judged bytes that the registry keeps at the place of ``key``.

    Attributes:
        moved: the source lies in ``.incoming/``: move it.
    """

    registry: Registry
    key: AdapterKey
    judged: Judged
    moved: bool

    @property
    def target(self) -> Path:
        """Its place."""
        return self.registry.layout.artifact(self.key)

    def lost(self, record: Record) -> bool:
        """Whether a file is gone that the registry keeps for a record of these bytes, or has another size.

        Of a dropped folder: whether all of it is gone. What lies in it its owner may be changing.
        """
        if self.registry.layout.resolve(record.spec.path) != self.target:
            return False  # it refers to a folder that is its owner's
        if record.origin == "folder":
            return not atomic.is_folder(self.target)
        return not all(lies(self.target, entry) for entry in record.spec.files)

    def restore(self, record: Record) -> bool:
        """Bring back what is lost; False if nothing is. It takes over the source's signature, too.

        Raises:
            See ``private`` and ``mend_files``.
        """
        lost = self.lost(record)
        if lost:
            with self.private() as draft:
                if record.origin == "folder" or not atomic.is_folder(self.target):
                    self.place(draft, recorded=True)
                else:
                    mend_files(self.registry.layout, draft, record)
        artifacts.unmark(self.target)
        self._take_signature(record)
        return lost

    def _take_signature(self, record: Record) -> None:
        """Put the source's signature beside a known record's bytes, if theirs is another one."""
        if record.origin == "folder" or self.registry.layout.resolve(record.spec.path) != self.target:
            return  # what lies there is its owner's
        source = self.judged.source
        raw = _bundle(source.path, source.folder)
        if raw is not None and raw != _bundle(self.target):
            atomic.replace(self.target / BUNDLE, raw, sync=True)

    def private(self) -> AbstractContextManager[Path]:
        """A folder of these bytes that nobody else changes, for as long as the block lasts.

        Raises:
            Conflict: they changed between judgement and copy.
            InputError, VolumeUnavailable: see ``artifacts.copy_files``.
        """
        source = self.judged.source
        known = source.path if self.moved else self.judged.draft
        if known is not None:
            return nullcontext(known)
        layout = self.registry.layout
        draft, files = artifacts.new_draft(layout, self.key.scope), self.judged.files
        return artifacts.drafted(source.path, draft, files, root=layout.root, folder_fd=source.folder)

    def place(self, draft: Path, *, recorded: bool) -> None:
        """Give the copy its name.

        Args:
            recorded: a record names it; if not, mark it as one that nobody dropped.
        Raises:
            Taken: other bytes lie there. Conflict: it is the folder of another name.
            VolumeUnavailable: the volume does not move it.
        """
        if self.moved:
            artifacts.mark(draft)
        if recorded:
            artifacts.unmark(draft)
        make_folder(self.target.parent, root=self.registry.layout.root)
        if artifacts.place(draft, self.target):
            return
        names = self.registry.names(self.target.parent)
        if self.target.name not in names and self.target.name.lower() in map(str.lower, names):
            raise Conflict(
                f"{self.target} is there in other letters, upper or lower: this volume takes both for one "
                "name; use another name"
            )
        there = artifacts.hash_files(self.target, [entry.path for entry in self.judged.files])
        if artifacts.digest_of(there) != self.judged.digest:
            raise Taken(f"{self.target} holds other bytes: revisions never change; register a new one")


def _bundle(folder: Path, dir_fd: int | None = None) -> bytes | None:
    with suppress(Refusal):
        return read_bundle(folder, dir_fd)
    return None


def is_home(source: Path, root: Path, own: tuple[str, str, str, str]) -> bool:
    """Whether a folder lies where its copy would, at ``own``, the parts of that place below the root: no copy
    goes onto itself."""
    return source.parts[-4:] == own and atomic.real_path(source) == atomic.real_path(root).joinpath(*own)
