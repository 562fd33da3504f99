"""Copies adapters' files out of an export: whole folders, or single files mended in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import AdapterKey, Record
from lora_fs.sidecar.registry.backup.archive import CHUNK_BYTES, opened, parse
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import CARRIED, Progress
from lora_fs.sidecar.registry.lifecycle.mending import mend_files
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.volume import atomic, permissions


def at_home(layout: Layout, record: Record) -> Record:
    """Return the record with its own folder on the volume; a linked one then owns its files."""
    if layout.resolve(record.spec.path) == layout.artifact(record.key):
        return record
    spec = record.spec.model_copy(update={"path": str(record.key)})
    return record.model_copy(update={"spec": spec, "keep_files": False})


def place_files(
    there: Reader,
    file: Path,
    wanted: Mapping[AdapterKey, Record],
    progress: Progress | None = None,
) -> dict[AdapterKey, str]:
    """Copy the files of ``wanted`` out of an export. Each folder is whole and synced before it has its name.

    Returns the adapters that were not placed because other bytes lie there, with the reason.

    Args:
        there: the volume, which has no marker yet: no other writer works on it.
    Raises:
        Conflict: a symlink, or no folder, lies where one belongs.
        InputError: the export changed since it was checked.
        VolumeUnavailable: the volume does not take them.
    """
    layout = there.layout
    drafts: dict[AdapterKey, Path] = {}
    refused: dict[AdapterKey, str] = {}
    try:
        with opened(file) as members:
            for name, reader in members:
                if name.count("/") != 4:
                    continue
                place = parse(name)
                key = AdapterKey(*place.scope, place.revision or "", place.name)
                if key not in wanted or place.file is None or not _belongs(place.file, wanted[key]):
                    continue
                if key not in drafts:
                    incoming = layout.incoming(key.scope)
                    atomic.make_folder(incoming)
                    drafts[key] = artifacts.temporary_in(incoming)
                    atomic.make_folder(drafts[key])
                _copy(reader, drafts[key] / place.file, progress)
        for key, record in wanted.items():
            if key in drafts and (why := _put(there, drafts[key], record)) is not None:
                refused[key] = why
        return refused
    finally:
        for draft in drafts.values():
            artifacts.discard(draft)


def _belongs(name: str, record: Record) -> bool:
    return name in CARRIED or any(entry.path == name for entry in record.spec.files)


def _copy(reader: IO[bytes], target: Path, progress: Progress | None) -> None:
    try:
        with target.open("xb") as out:
            while chunk := reader.read(CHUNK_BYTES):
                out.write(chunk)
                if progress is not None:
                    progress(len(chunk))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise atomic.unavailable(error, f"cannot write {target}") from error


def _put(there: Reader, draft: Path, record: Record) -> str | None:
    """Place one folder, or mend the files that lie there. Returns why not, or None."""
    found = artifacts.hash_files(draft, [entry.path for entry in record.spec.files])
    if artifacts.digest_of(found) != record.spec.digest:
        raise InputError(f"{record.key}: the export changed while it was read: restore again")
    permissions.share_copy(draft, draft.parent)
    atomic.sync_names(draft)
    target = there.layout.artifact(record.key)
    if artifacts.place(draft, target):
        return None
    newest = there.latest(there.records(record.key))[1]
    if (
        newest is not None
        and newest.spec.digest != record.spec.digest
        and newest.generation >= record.generation
    ):
        return "a later generation has other bytes, which stay"
    mend_files(there.layout, draft, record)
    return None
