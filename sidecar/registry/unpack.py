"""Adapters' files out of an export: whole folders under their names, single files mended in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from lora_fs.sidecar.errors import InputError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Record
from lora_fs.sidecar.registry import artifacts, atomic, modes
from lora_fs.sidecar.registry.archive import CHUNK_BYTES, opened, parse
from lora_fs.sidecar.registry.artifacts import CARRIED, Progress
from lora_fs.sidecar.registry.layout import TEMPORARY, Layout


def is_whole(layout: Layout, record: Record) -> bool:
    """Whether the record's files lie on the volume with the bytes that it names.

    Raises:
        VolumeUnavailable: it cannot be told.
    """
    folder = layout.resolve(record.spec.path)
    names = atomic.list_names(folder)
    if names is None or any(entry.path not in names for entry in record.spec.files):
        return False
    try:
        found = artifacts.hash_files(folder, [entry.path for entry in record.spec.files])
    except InputError:
        return False  # no regular file
    return artifacts.digest_of(found) == record.spec.digest


def at_home(layout: Layout, record: Record) -> Record:
    """The record with its own folder on the volume; a linked one owns its files there."""
    if layout.resolve(record.spec.path) == layout.artifact(record.key):
        return record
    spec = record.spec.model_copy(update={"path": str(record.key)})
    return record.model_copy(update={"spec": spec, "keep_files": False})


def place_files(
    layout: Layout,
    file: Path,
    wanted: Mapping[AdapterKey, Record],
    progress: Progress | None = None,
    *,
    recorded: bool,
) -> None:
    """Copy the files of some records out of an export, each folder whole and synced before it has its name.

    Args:
        recorded: see ``artifacts.place``.
    Raises:
        InputError: the export changed since it was checked.
        VolumeUnavailable: the volume does not take them.
    """
    drafts: dict[AdapterKey, Path] = {}
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
            if key in drafts:
                _put(drafts[key], layout.artifact(key), record, recorded=recorded)
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


def _put(draft: Path, target: Path, record: Record, *, recorded: bool) -> None:
    found = artifacts.hash_files(draft, [entry.path for entry in record.spec.files])
    if artifacts.digest_of(found) != record.spec.digest:
        raise InputError(f"{record.key}: the export changed while it was read: import again")
    atomic.sync_names(draft)
    if artifacts.place(draft, target, recorded=recorded):
        return
    mend_files(draft, target, record)


def mend_files(good: Path, target: Path, record: Record) -> list[str]:
    """Put the files of ``good`` in the place of those of ``target`` that hold other bytes, one by one.

    Each is replaced in one step; what else lies there stays. Returns the names replaced.

    Raises:
        VolumeUnavailable: the volume did not take one.
    """
    replaced = []
    for entry in record.spec.files:
        with suppress(InputError, VolumeUnavailable):  # not there, or not to be read: to be replaced
            if artifacts.hash_files(target, [entry.path])[0].sha256 == entry.sha256:
                continue
        draft = target / f"{TEMPORARY}{entry.path}"
        try:
            shutil.copyfile(good / entry.path, draft)
            with draft.open("rb+") as written:
                modes.share_file(written.fileno(), target)
                os.fsync(written.fileno())
            draft.replace(target / entry.path)
            atomic.sync_folder(target)
        except OSError as error:
            raise atomic.unavailable(error, f"cannot mend {target / entry.path}") from error
        replaced.append(entry.path)
    return replaced
