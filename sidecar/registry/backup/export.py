"""Exports the newest good generation of every record and pointer, evaluations and files, as one tar.

Writers go on meanwhile. The export reads pointers before records, so it has every revision that a name
serves. It reports a file that changes while it reads it, and counts its adapter as left out. The tar stays
well formed whatever the volume does; only its last member says that it is whole.
"""

from __future__ import annotations

import datetime
import errno
import glob
import hashlib
import io
import os
import secrets
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lora_fs.sidecar.errors import CorruptRecord, InputError, OperatorError
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.backup.archive import BEGIN, END, Begin, End, Tally, check
from lora_fs.sidecar.registry.format.layout import Generation, Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle.artifacts import CARRIED, open_regular
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

KILLED_AFTER_S = 3600  # an export under way writes to its draft more often
RACES = 8  # reads of one series, each of which met another generation
FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(slots=True)
class Exported:
    """Counts of what an export holds. ``left_out``: a sentence for each thing that it lacks."""

    records: int = 0
    pointers: int = 0
    adapters: int = 0
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)


def _snapshot(
    registry: Registry, scopes: Iterable[Scope], left_out: list[str]
) -> dict[str, tuple[Record | Pointer, bytes]]:
    """Read the newest good generation of every series, with its bytes, by its path in the registry.

    Raises:
        VolumeUnavailable: the volume does not list a folder or read a file, so the contents are unknown.
    """
    found: dict[str, tuple[Record | Pointer, bytes]] = {}

    def take(series: Series[Any], listed: Generation) -> None:
        newest, body, data = _newest(registry, series, listed)
        if newest.generation and (body is None or body.generation != newest.generation):
            instead = f"generation {body.generation} is exported instead" if body else ""
            left_out.append(f"{series.file(newest)} cannot be read: {instead or 'nothing of it is exported'}")
        if body is None:
            return
        path = registry.path(series, body)
        name = str(path.relative_to(registry.layout.root))
        try:
            check(name, body)
            found[name] = (body, data)
        except (CorruptRecord, InputError) as error:  # with this body, import would refuse the whole export
            left_out.append(f"{path} is left out, since no restore takes it: {error}")

    for scope in scopes:
        for name, newest in sorted(registry.scan(scope).pointers.items()):
            take(registry.pointers(scope, name), newest)
        for revision, entries in sorted(registry.scan(scope).revisions.items()):
            for name, newest in sorted(entries.records.items()):
                take(registry.records(AdapterKey(*scope, revision, name)), newest)
    return found


def _newest(
    registry: Registry, series: Series[Body], listed: Generation
) -> tuple[Generation, Body | None, bytes]:
    """The greatest generation, the newest good body and its bytes.

    List and read again if the body in ``listed`` is damaged, or gc removed its file: a newer generation
    exists, or none.
    """
    with suppress(CorruptRecord):
        found = registry.read(series, listed)
        if (bytes_of := atomic.read_bytes(registry.path(series, found))) is not None:
            return listed, found, bytes_of
    for _ in range(RACES):
        newest, body = registry.latest(series)
        data = atomic.read_bytes(registry.path(series, body)) if body is not None else None
        if data is not None:
            return newest, body, data
        if body is None and (not newest.generation or not registry.is_gone(series.file(newest))):
            break
    return newest, None, b""


def write(registry: Registry, scopes: Iterable[Scope], out: IO[bytes], *, artifacts: bool) -> Exported:
    """Write an export to a stream that need not seek.

    Raises:
        TemporaryError: the volume did not answer. The tar has no end, so every reader refuses it.
    """
    done, now = Exported(), datetime.datetime.now(datetime.UTC)
    seen = _snapshot(registry, scopes, done.left_out)
    records = {name: body for name, (body, _) in seen.items() if isinstance(body, Record)}
    begin = Begin(
        registry_uuid=registry.marker.registry_uuid,
        epoch=registry.marker.epoch,
        exported_at=now.isoformat(timespec="seconds"),
        artifacts=artifacts,
    )
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        members = _Members(tar, int(now.timestamp()))
        members.add(BEGIN, seal(begin))
        for name in records:
            members.add(name, seen[name][1])
        for record in records.values():
            if record.present:
                _add_evaluation(members, registry, record, done)
        for record in records.values():
            if artifacts and record.present:
                _add_files(members, registry.layout, record, done)
        for name, (_, data) in seen.items():
            if name not in records:
                members.add(name, data)
        done.records, done.pointers = len(records), len(seen) - len(records)
        tally = members.tally
        end = End(members=tally.members, digest=tally.digest, left_out=len(done.left_out))
        members.add(END, seal(end))
    return done


def _add_evaluation(members: _Members, registry: Registry, record: Record, done: Exported) -> None:
    path = registry.layout.evaluation(record.key)
    if path.name not in registry.names(path.parent):
        return
    try:
        data = atomic.read_bytes(path)
        if data is not None:  # else gc removed it meanwhile
            evaluations.parse(record.key, data)
            members.add(str(path.relative_to(registry.layout.root)), data)
    except (CorruptRecord, atomic.NotRegular) as error:
        done.left_out.append(f"{path} is left out: {error}")


def _add_files(members: _Members, layout: Layout, record: Record, done: Exported) -> None:
    folder, before = layout.resolve(record.spec.path), len(done.left_out)
    wanted = {entry.path: (entry.size_bytes, entry.sha256) for entry in record.spec.files}
    for file in (*wanted, *(name for name in CARRIED if name not in wanted)):
        path = folder / file
        try:
            handle = open_regular(path)
        except (OSError, InputError) as error:
            unread = isinstance(error, OSError) and error.errno not in ABSENT
            if file in wanted or unread:
                done.left_out.append(f"{record.key}: {path} is not there or cannot be read: {error}")
            continue
        with open(handle, "rb") as reader:
            size_bytes, sha256 = wanted.get(file, (os.fstat(handle).st_size, None))
            found = members.stream(f"{record.key}/{file}", reader, size_bytes)
        if found is None or sha256 not in (None, found):
            done.left_out.append(f"{record.key}: {path} does not hold the bytes registered")
        done.size_bytes += size_bytes
    done.adapters += before == len(done.left_out)


class _Members:
    """The members of an export: counts and hashes each as it is written.

    Args:
        at: seconds since 1970, for people.
    """

    def __init__(self, tar: tarfile.TarFile, at: int) -> None:
        self._tar, self._at, self.tally = tar, at, Tally()

    def add(self, name: str, data: bytes) -> None:
        self.stream(name, io.BytesIO(data), len(data))

    def stream(self, name: str, reader: IO[bytes], size_bytes: int) -> str | None:
        """Write a member of a fixed size. Returns its hash; None if the reader had less, and zeros follow."""
        member, data = tarfile.TarInfo(name), _Hashing(reader, size_bytes)
        member.size, member.mtime, member.mode = size_bytes, self._at, 0o644
        self._tar.addfile(member, data)
        self.tally.add(name, size_bytes, data.sha256)
        return None if data.short else data.sha256


class _Hashing:
    """A file of a fixed length: hashed as it is read, and padded with zeros if it is too short."""

    def __init__(self, reader: IO[bytes], size_bytes: int) -> None:
        self._reader, self._left = reader, size_bytes
        self._digest = hashlib.sha256()
        self.short = False

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
        return data

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def to_file(registry: Registry, scopes: Iterable[Scope], target: Path, *, artifacts: bool) -> Exported:
    """Write an export to a file. The file gets its name once it is whole and synced.

    Removes what killed exports to the same file left beside it.

    Raises:
        InputError: no file can be written there. OperatorError: its disk is full or fails.
        TemporaryError: the volume did not answer.
    """
    draft = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")  # another export may be under way
    try:
        with draft.open("xb") as out:
            _remove_killed(target, os.fstat(out.fileno()).st_mtime - KILLED_AFTER_S)
            done = write(registry, scopes, out, artifacts=artifacts)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(target)
        atomic.sync_folder(target.parent)
    except OSError as error:
        kind = OperatorError if error.errno in FAULTS else InputError
        raise kind(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        atomic.discard(draft)
    return done


def _remove_killed(target: Path, before: float) -> None:
    """Remove drafts of exports to ``target`` last written to ``before``, in seconds since 1970."""
    for draft in target.parent.glob(f"{glob.escape(target.name)}.{'[0-9a-f]' * 8}.part"):
        with suppress(OSError):
            if draft.lstat().st_mtime < before:
                draft.unlink()
