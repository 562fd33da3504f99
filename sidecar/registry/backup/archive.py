"""Reads an export: one tar that holds a registry and proves that it is whole.

The tar begins and ends with a sealed object. Between them lie the newest records, evaluations and pointers,
at their paths on the volume, and the adapters' files. The last object counts and hashes all others, so a copy
that was cut is never read as a smaller registry. This module extracts nothing, and parses each segment of a
member's name before it becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord, InputError, InvalidName, NewerRecord
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, check_segment
from lora_fs.sidecar.registry.format.layout import (
    Generation,
    generation_name,
    parse_evaluation,
    parse_generation,
    parse_place,
)
from lora_fs.sidecar.registry.format.sealed import MAX_SEALED_BYTES, decode
from lora_fs.sidecar.registry.lifecycle.artifacts import digest_of
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.validate import packed

BEGIN = "lora-fs-export.json"
END = "lora-fs-export-end.json"
CHUNK_BYTES = 1 << 20


class Begin(BaseModel):
    """The first member: what the export holds, and when it began."""

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
    left_out: int = Field(default=0, ge=0)  # adapters whose files the export holds in part or not at all
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


def parse(path: str) -> tuple[AdapterKey, Generation | str]:
    """Parse a member's name: whose it is, and which generation or which file. A pointer's has no revision.

    The generation's token is empty if the exported volume has hard links.

    Raises:
        InputError: no export has such a name, for example one that leaves its folder.
    """
    parts, place = path.split("/"), parse_place(path)
    try:
        if len(parts) == 5:
            return AdapterKey.checked(*parts[:4]), check_segment("file", parts[4])
        if place is not None:
            check_segment("namespace", place.scope.namespace)
            return AdapterKey(*place.scope, place.revision or "", place.name), place.generation
    except InvalidName as error:
        raise InputError(f"{path!a} has no place in an export: {error}") from error
    raise InputError(f"{path!a} has no place in an export")


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of an export. A pointer's key has no revision.

    Attributes:
        bodies: every record, then every pointer. raw: their sealed bytes.
        files: the size in bytes and the hash of each file.
        evaluations: their sealed bytes.
    """

    begin: Begin
    end: End
    bodies: dict[AdapterKey, Record | Pointer]
    raw: dict[AdapterKey, bytes]
    files: dict[AdapterKey, dict[str, tuple[int, str]]]
    evaluations: dict[AdapterKey, bytes]

    @property
    def records(self) -> dict[AdapterKey, Record]:
        return {key: body for key, body in self.bodies.items() if isinstance(body, Record)}

    def has_files_of(self, record: Record) -> bool:
        """Return whether the export has every served file of a record, with the recorded bytes."""
        held = self.files.get(record.key, {})
        return all(held.get(entry.path) == (entry.size_bytes, entry.sha256) for entry in record.spec.files)


@contextmanager
def opened(path: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """Yield an export's members in order; each reader is valid until the next member.

    Raises:
        InputError: it is no tar, was cut, or holds something other than regular files.
    """

    def members(tar: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
        for member in tar:
            reader = tar.extractfile(member) if member.isreg() else None
            if reader is None:
                raise InputError(f"{path}: {member.name!a} is not a regular file")
            yield member.name, reader

    try:
        with packed.tar(path) as tar:
            yield members(tar)
    except packed.OtherPacking as error:
        raise InputError(f"{path}: {error}") from error
    except packed.NotTar as error:
        raise InputError(f"{path} is no export, or was cut: {error}; take another copy") from error


def read(path: Path) -> Contents:
    """Read and check a whole export.

    Raises:
        InputError: it is not a whole export; the message says why.
    """
    tally, begin, end = Tally(), None, None
    bodies: dict[AdapterKey, Record | Pointer] = {}
    raw: dict[AdapterKey, bytes] = {}
    files: dict[AdapterKey, dict[str, tuple[int, str]]] = {}
    found_evaluations: dict[AdapterKey, bytes] = {}
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
                if (evaluated := parse_evaluation(name)) is not None:
                    data = _whole(path, name, reader)
                    tally.add(name, len(data), hashlib.sha256(data).hexdigest())
                    evaluations.parse(evaluated, data)
                    if evaluated not in bodies:
                        raise CorruptRecord(f"is of {evaluated}, which is not in the export")
                    found_evaluations[evaluated] = data
                    continue
                key, what = parse(name) if name != BEGIN else (None, "")
                if key is not None and isinstance(what, str):
                    files.setdefault(key, {})[what] = found = _size_and_hash(reader)
                    tally.add(name, *found)
                    continue
                data = _whole(path, name, reader)
                tally.add(name, len(data), hashlib.sha256(data).hexdigest())
                if key is None:
                    begin = decode(Begin, data)
                    continue
                body = decode(Record, data) if key.revision else decode(Pointer, data)
                check(name, body)
                if key in bodies:
                    raise CorruptRecord("an export has one generation of each, and this is the second one")
                bodies[key], raw[key] = body, data
            except CorruptRecord as error:
                what = "" if isinstance(error, NewerRecord) else "; take another copy"
                raise InputError(f"{path}: {name}: {error}{what}") from error
    if begin is None or end is None:
        raise InputError(f"{path} is no whole export: it does not end with {END}; take another copy")
    if (end.members, end.digest) != (tally.members, tally.digest):
        raise InputError(f"{path}: its members are not those that were exported; take another copy")
    return Contents(begin, end, bodies, raw, files, found_evaluations)


def check(name: str, body: Record | Pointer) -> None:
    """Check that an export can hold ``body`` under ``name``, and that a volume of either tier can store it.

    Raises:
        CorruptRecord: it cannot; the message says why. InputError: no export has such a name.
    """
    key, generation = parse(name)
    revision = body.revision if isinstance(body, Record) else ""
    says = AdapterKey(body.namespace, body.model, revision, body.name)
    if says != key:
        raise CorruptRecord(f"holds {says}, which is not what {name} says")
    following = Generation(body.generation + 1, body.token)  # must exist: a withdrawal writes it
    if not body.token or parse_generation(generation_name(body.name, *following)) != (body.name, following):
        raise CorruptRecord("its generation or its token is none that a file's name can have")
    if generation not in (Generation(body.generation, body.token), Generation(body.generation, "")):
        raise CorruptRecord(f"holds generation {body.generation}, or a token, that its name does not say")
    if isinstance(body, Record):
        _sound(body)


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


def _size_and_hash(reader: IO[bytes]) -> tuple[int, str]:
    digest, size_bytes = hashlib.sha256(), 0
    while chunk := reader.read(CHUNK_BYTES):
        digest.update(chunk)
        size_bytes += len(chunk)
    return size_bytes, digest.hexdigest()
