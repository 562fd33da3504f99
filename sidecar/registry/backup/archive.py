"""Reads an export: one tar that holds a registry and proves that it is whole.

The tar begins and ends with a sealed object. Between them lie the newest records and pointers, at their
paths on the volume, and the adapters' files. The last object counts and hashes all others, so a copy that was
cut is never read as a smaller registry. This module extracts nothing, and parses each segment of a member's
name before it becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord, InputError, InvalidName, NewerRecord
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import AdapterKey, FileEntry, Pointer, Record, Scope, check_segment
from lora_fs.sidecar.registry.format.layout import ACTIVE, Generation, generation_name, parse_generation
from lora_fs.sidecar.registry.format.sealed import MAX_SEALED_BYTES, decode
from lora_fs.sidecar.registry.lifecycle.artifacts import digest_of
from lora_fs.sidecar.validate import packed

BEGIN = "lora-fs-export.json"
END = "lora-fs-export-end.json"
CHUNK_BYTES = 1 << 20

HEADER_BYTES = 64 << 10  # of one header of a tar; a path has some hundred bytes


class Begin(BaseModel):
    """The first member: what was exported, and when."""

    model_config = ConfigDict(frozen=True, extra="allow")

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["Export"] = "Export"
    registry_uuid: str
    epoch: int = Field(default=1, ge=1)
    exported_at: str  # RFC 3339; for people
    artifacts: bool
    sum: str = ""


class End(BaseModel):
    """The last member: ``digest`` is over the path, size and hash of every other, in their order."""

    model_config = ConfigDict(frozen=True, extra="allow")

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["ExportEnd"] = "ExportEnd"
    members: int = Field(ge=0)
    digest: str
    left_out: int = Field(default=0, ge=0)  # adapters whose files could not be exported whole
    sum: str = ""


class Tally:
    """Count and hash the members of an export."""

    def __init__(self) -> None:
        self.members, self._digest = 0, hashlib.sha256()

    def add(self, path: str, size_bytes: int, sha256: str) -> None:
        self.members += 1
        self._digest.update(json.dumps([path, size_bytes, sha256], separators=(",", ":")).encode() + b"\n")

    @property
    def digest(self) -> str:
        return "sha256:" + self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """A member's name, parsed. A record has a ``revision``, a pointer has none; a file has a ``file``.

    A file has no ``generation``. The generation's token is empty if the exported volume has hard links.
    """

    scope: Scope
    revision: str | None
    name: str
    file: str | None = None
    generation: Generation | None = None


def parse(path: str) -> Place:
    """Parse a member's name.

    Raises:
        InputError: no export has such a name, for example one that leaves its folder.
    """
    parts = path.split("/")
    try:
        if len(parts) in (4, 5):
            scope = Scope(check_segment("namespace", parts[0]), check_segment("model", parts[1]))
            if len(parts) == 5:
                key = AdapterKey.checked(*scope, parts[2], parts[3])
                return Place(scope, key.revision, key.name, check_segment("file", parts[4]))
            generation = parse_generation(parts[3])
            if generation is not None:
                revision = None if parts[2] == ACTIVE else check_segment("revision", parts[2])
                return Place(scope, revision, generation[0], None, generation[1])
    except InvalidName as error:
        raise InputError(f"{path!a} has no place in an export: {error}") from error
    raise InputError(f"{path!a} has no place in an export")


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of an export. ``raw``: the sealed bytes of each record and pointer."""

    begin: Begin
    end: End
    records: dict[AdapterKey, Record] = field(default_factory=dict)
    pointers: dict[tuple[Scope, str], Pointer] = field(default_factory=dict)
    files: dict[AdapterKey, dict[str, FileEntry]] = field(default_factory=dict)
    raw: dict[AdapterKey | tuple[Scope, str], bytes] = field(default_factory=dict)

    def has_files_of(self, record: Record) -> bool:
        """Return whether the export has every served file of a record, with the recorded bytes."""
        held = self.files.get(record.key, {})
        return all(held.get(entry.path) == _bare(entry) for entry in record.spec.files)


def _bare(entry: FileEntry) -> FileEntry:
    return FileEntry(path=entry.path, size_bytes=entry.size_bytes, sha256=entry.sha256)


class _Unpacked:
    """An archive's bytes, read in pieces of a bounded size.

    tarfile reads a header whole, and a header of a few packed kilobytes can claim gigabytes.
    """

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream, self.most_bytes = stream, HEADER_BYTES

    def read(self, size: int) -> bytes:
        if size > self.most_bytes:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        return self._stream.seek(position)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()


@contextmanager
def opened(path: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """Yield an export's members in order; each reader is valid until the next member.

    Raises:
        InputError: it is no tar, was cut, or holds something other than regular files.
    """

    def members(archive: tarfile.TarFile, unpacked: _Unpacked) -> Iterator[tuple[str, IO[bytes]]]:
        while True:
            unpacked.most_bytes = HEADER_BYTES
            member = archive.next()
            if member is None:
                return
            plain = member.isreg() and not member.issparse()  # a sparse one may claim terabytes
            reader = archive.extractfile(member) if plain else None
            if reader is None:
                raise InputError(f"{path}: {member.name!a} is not a regular file")
            unpacked.most_bytes = 2 * MAX_SEALED_BYTES
            yield member.name, reader

    try:
        with path.open("rb") as file:
            unpacked = _Unpacked(packed.unpacked(file) or file)
            with tarfile.open(fileobj=cast(IO[bytes], unpacked), mode="r:") as archive:
                yield members(archive, unpacked)
    except packed.OtherPacking as error:
        raise InputError(f"{path}: {error}") from error
    except (tarfile.TarError, OverflowError, RecursionError, *packed.BROKEN) as error:
        why = _first_line(error)
        raise InputError(f"{path} is no export, or was cut: {why}; take another copy") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise InputError(
            f"{path} is no export, or was cut: {_first_line(error)}; take another copy"
        ) from error


def read(path: Path) -> Contents:
    """Read and check a whole export.

    Raises:
        InputError: it is not a whole export; the message says why.
    """
    tally, begin, end = Tally(), None, None
    records: dict[AdapterKey, Record] = {}
    pointers: dict[tuple[Scope, str], Pointer] = {}
    files: dict[AdapterKey, dict[str, FileEntry]] = {}
    raw: dict[AdapterKey | tuple[Scope, str], bytes] = {}
    seen: set[str] = set()
    with opened(path) as members:
        for name, reader in members:
            if end is not None or name in seen:
                raise InputError(f"{path}: {name!a} is there twice, or behind the end")
            if not seen and name != BEGIN:
                raise InputError(f"{path} is no export: it does not begin with {BEGIN}")
            seen.add(name)
            try:
                if name == END:
                    end = decode(End, _whole(path, name, reader))
                    continue
                place = None if name == BEGIN else parse(name)
                if place is not None and place.file is not None and place.revision is not None:
                    key = AdapterKey(*place.scope, place.revision, place.name)
                    entry = _hashed(place.file, reader)
                    files.setdefault(key, {})[place.file] = entry
                    tally.add(name, entry.size_bytes, entry.sha256)
                    continue
                data = _whole(path, name, reader)
                tally.add(name, len(data), hashlib.sha256(data).hexdigest())
                if place is None:
                    begin = decode(Begin, data)
                elif place.revision is None:
                    pointer = decode(Pointer, data)
                    check(name, pointer)
                    _alone((place.scope, place.name), raw)
                    pointers[place.scope, place.name] = pointer
                    raw[place.scope, place.name] = data
                else:
                    record = decode(Record, data)
                    key = AdapterKey(*place.scope, place.revision, place.name)
                    check(name, record)
                    _alone(key, raw)
                    records[key], raw[key] = record, data
            except CorruptRecord as error:
                what = "" if isinstance(error, NewerRecord) else "; take another copy"
                raise InputError(f"{path}: {name}: {error}{what}") from error
    if begin is None or end is None:
        raise InputError(f"{path} is no whole export: it does not end with {END}; take another copy")
    if (end.members, end.digest) != (tally.members, tally.digest):
        raise InputError(f"{path}: its members are not those that were exported; take another copy")
    return Contents(begin, end, records, pointers, files, raw)


def _first_line(error: Exception) -> str:
    return shown(str(error).partition("\n")[0])


def check(name: str, body: Record | Pointer) -> None:
    """Check that an export can hold ``body`` under ``name``, and that a volume of either tier can store it.

    Raises:
        CorruptRecord: it cannot; the message says why. InputError: no export has such a name.
    """
    place = parse(name)
    says = [body.namespace, body.model, *([body.revision] if isinstance(body, Record) else []), body.name]
    lies = [*place.scope, *([place.revision] if place.revision is not None else []), place.name]
    if says != lies:
        raise CorruptRecord(f"holds {'/'.join(says)}, which is not what {name} says")
    following = Generation(body.generation + 1, body.token)  # there has to be one: it can be withdrawn
    if not body.token or parse_generation(generation_name(body.name, *following)) != (body.name, following):
        raise CorruptRecord("its generation or its token is none that a file's name can have")
    if place.generation not in (Generation(body.generation, body.token), Generation(body.generation, "")):
        raise CorruptRecord(f"holds generation {body.generation}, or a token, that its name does not say")
    if isinstance(body, Record):
        _sound(body)


def _alone(what: AdapterKey | tuple[Scope, str], known: Container[object]) -> None:
    if what in known:
        raise CorruptRecord("an export has one generation of each, and this is the second one")


def _sound(record: Record) -> None:
    """Check that a present record agrees with itself about its files; a tombstone has none."""
    spec = record.spec
    if not record.present:
        return
    if record.name == record.model:
        raise CorruptRecord("no adapter has the name of its model's folder")
    if not spec.files or len({entry.path for entry in spec.files}) < len(spec.files):
        raise CorruptRecord("spec.files is empty, or names a file twice")
    if digest_of(spec.files) != spec.digest:
        raise CorruptRecord("spec.digest is not that of spec.files")
    if sum(entry.size_bytes for entry in spec.files) != spec.size_bytes:
        raise CorruptRecord("spec.size_bytes is not that of spec.files together")


def _whole(path: Path, name: str, reader: IO[bytes]) -> bytes:
    data = reader.read(MAX_SEALED_BYTES + 1)
    if len(data) > MAX_SEALED_BYTES:
        raise InputError(f"{path}: {name} is larger than any record")
    return data


def _hashed(name: str, reader: IO[bytes]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    while chunk := reader.read(CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return FileEntry(path=name, size_bytes=size, sha256=digest.hexdigest())
