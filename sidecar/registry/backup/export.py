"""Exports the newest good generation of every record and pointer, and the adapters' files, as one tar.

Writers go on meanwhile. Pointers are read before records, so the export has every revision that a name
serves. A file that changes while it is read is reported, and its adapter counts as left out. The tar stays
well formed whatever the volume does; only its last member says that it is whole.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lora_fs.sidecar.errors import CorruptRecord, InputError, LoraFsError, OperatorError
from lora_fs.sidecar.model import AdapterKey, FileEntry, Pointer, Record, Scope
from lora_fs.sidecar.registry.backup.archive import BEGIN, END, Begin, End, Tally, check
from lora_fs.sidecar.registry.format.layout import Layout, generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle.artifacts import CARRIED, Progress, open_regular
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


@dataclass(slots=True)
class Exported:
    """Counts of what an export holds. ``left_out``: a sentence for each thing that it lacks."""

    records: int = 0
    pointers: int = 0
    adapters: int = 0
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The newest good records and pointers of some scopes, with their bytes. ``unread``: a sentence each."""

    pointers: dict[Path, tuple[Pointer, bytes]]
    records: dict[Path, tuple[Record, bytes]]
    unread: list[str]


def snapshot(registry: Registry, scopes: Iterable[Scope]) -> Snapshot:
    """Read the newest good generation of every series.

    Raises:
        VolumeUnavailable: a folder cannot be listed or a file read, so the contents are unknown.
    """
    found = Snapshot({}, {}, [])
    for scope in scopes:
        for name in sorted(registry.scan(scope).pointers):
            _take(registry, registry.pointers(scope, name), found.pointers, found.unread)
        for revision, entries in sorted(registry.scan(scope).revisions.items()):
            for name in sorted(entries.records):
                series = registry.records(AdapterKey(*scope, revision, name))
                _take(registry, series, found.records, found.unread)
    return found


def _take(
    registry: Registry, series: Series[Body], into: dict[Path, tuple[Body, bytes]], unread: list[str]
) -> None:
    newest, body = registry.latest(series)
    if body is None or body.generation != newest.generation:
        path = series.folder / generation_name(series.name, *newest)
        kept = f"generation {body.generation} is exported instead" if body else "nothing of it is exported"
        unread.append(f"{path} cannot be read: {kept}")
    if body is None:
        return
    path = registry.path(series, body)
    data = atomic.read_bytes(path)
    if data is None:
        raise CorruptRecord(f"{path} went away while it was read")
    try:
        check(str(path.relative_to(registry.layout.root)), body)
    except (CorruptRecord, InputError) as error:  # with it the export would be refused as a whole
        unread.append(f"{path} is left out, since no restore takes it: {error}")
        return
    into[path] = (body, data)


def write(
    registry: Registry,
    scopes: Iterable[Scope],
    out: IO[bytes],
    *,
    artifacts: bool,
    progress: Progress | None = None,
) -> Exported:
    """Write an export to a stream that need not seek.

    Raises:
        TemporaryError: the volume did not answer. The tar has no end, so every reader refuses it.
    """
    done, seen, tally = Exported(), snapshot(registry, scopes), Tally()
    done.left_out += seen.unread
    now = datetime.datetime.now(datetime.UTC)
    marker = registry.marker
    begin = Begin(
        registry_uuid=marker.registry_uuid,
        epoch=marker.epoch,
        exported_at=now.isoformat(timespec="seconds"),
        artifacts=artifacts,
    )
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, data: bytes) -> None:
            tar.addfile(_member(name, len(data), now), io.BytesIO(data))
            if name != END:
                tally.add(name, len(data), hashlib.sha256(data).hexdigest())

        add(BEGIN, seal(begin))
        for path, (_, data) in seen.records.items():
            add(str(path.relative_to(registry.layout.root)), data)
            done.records += 1
        if artifacts:
            for record, _ in seen.records.values():
                if record.present:
                    _add_files(tar, registry.layout, record, now, tally, done, progress)
        for path, (_, data) in seen.pointers.items():
            add(str(path.relative_to(registry.layout.root)), data)
            done.pointers += 1
        end = End(members=tally.members, digest=tally.digest, left_out=len(done.left_out))
        add(END, seal(end))
    return done


def _add_files(
    tar: tarfile.TarFile,
    layout: Layout,
    record: Record,
    now: datetime.datetime,
    tally: Tally,
    done: Exported,
    progress: Progress | None,
) -> None:
    folder = layout.resolve(record.spec.path)
    before = len(done.left_out)
    for entry in (*record.spec.files, *_carried(folder, record)):
        try:
            handle = open_regular(folder / entry.path)
        except (OSError, LoraFsError) as error:
            done.left_out.append(
                f"{record.key}: {folder / entry.path} is not there or cannot be read: {error}"
            )
            continue
        name = f"{record.key}/{entry.path}"
        with open(handle, "rb") as reader:
            hashing = _Hashing(reader, entry.size_bytes, progress)
            tar.addfile(_member(name, entry.size_bytes, now), hashing)
        tally.add(name, entry.size_bytes, hashing.sha256)
        if hashing.short or (entry.sha256 != _ANY and hashing.sha256 != entry.sha256):
            done.left_out.append(f"{record.key}: {folder / entry.path} does not hold the bytes registered")
        done.size_bytes += entry.size_bytes
    done.adapters += before == len(done.left_out)


_ANY = "0" * 64


def _carried(folder: Path, record: Record) -> Iterator[FileEntry]:
    """Yield the files beside the served ones that are copied along."""
    served = {entry.path for entry in record.spec.files}
    for name in CARRIED:
        if name in served:
            continue
        try:
            status = (folder / name).lstat()
        except OSError:
            continue  # not there: nothing to carry
        if stat.S_ISREG(status.st_mode):
            yield FileEntry(path=name, size_bytes=status.st_size, sha256=_ANY)


def _member(name: str, size_bytes: int, now: datetime.datetime) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size_bytes, int(now.timestamp()), 0o644
    return member


class _Hashing(io.RawIOBase):
    """A file of a fixed length: hashed as it is read, and padded with zeros if it is too short."""

    def __init__(self, reader: IO[bytes], size_bytes: int, progress: Progress | None) -> None:
        self._reader, self._left, self._progress = reader, size_bytes, progress
        self._digest = hashlib.sha256()
        self.short = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        try:
            data = b"" if self.short else self._reader.read(wanted)
        except OSError:
            data = b""
        if len(data) < wanted:
            self.short = True
            data += bytes(wanted - len(data))
        self._left -= len(data)
        self._digest.update(data)
        if self._progress is not None:
            self._progress(len(data))
        return data

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def to_file(registry: Registry, scopes: Iterable[Scope], target: Path, **more: Any) -> Exported:
    """Write an export to a file. The file gets its name once it is whole and synced.

    Raises:
        InputError: the file cannot be written there. OperatorError: its disk is full or fails.
        TemporaryError: the volume did not answer.
    """
    draft = target.with_name(f"{target.name}.part")
    try:
        with draft.open("wb") as out:
            done = write(registry, scopes, out, **more)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(target)
        atomic.sync_folder(target.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        kind = OperatorError if error.errno in FAULTS else InputError
        raise kind(f"cannot write {target}: {error.strerror or error}") from error
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return done
