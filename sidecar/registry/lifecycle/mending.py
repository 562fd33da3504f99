"""Replaces files of a registered adapter that hold other bytes than its record names."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from lora_fs.sidecar.errors import Conflict, InputError, VolumeUnavailable
from lora_fs.sidecar.model import FileEntry, Record
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.volume import atomic, permissions


def is_whole(layout: Layout, record: Record, folder: Path | None = None) -> bool:
    """Whether the record's files lie on the volume with the bytes that it names.

    Args:
        folder: where to look; None: where the record says.
    Raises:
        VolumeUnavailable: the volume does not answer.
    """
    folder = folder or layout.resolve(record.spec.path)
    names = atomic.list_names(folder)
    if names is None or any(entry.path not in names for entry in record.spec.files):
        return False
    try:
        found = artifacts.hash_files(folder, [entry.path for entry in record.spec.files])
    except InputError:
        return False  # no regular file
    return artifacts.digest_of(found) == record.spec.digest


def lies(folder: Path, entry: FileEntry) -> bool:
    """Whether a regular file of its size is there; raises VolumeUnavailable if the volume does not say."""
    with atomic.explained(f"cannot look at {folder / entry.path}"):
        try:
            status = (folder / entry.path).lstat()
        except FileNotFoundError:
            return False
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.size_bytes


def mend_files(layout: Layout, good: Path, record: Record) -> list[str]:
    """Put the files of ``good`` in the place of those that hold other bytes in the record's own folder.

    Copies them aside, and replaces them one by one, each in one step. Other files there stay. It follows
    no symlink. Returns the names replaced.

    Raises:
        Conflict: the folder is a symlink, or no folder; the files of ``good`` changed during the copy.
        VolumeUnavailable: the volume did not take one.
    """
    target = layout.artifact(record.key)
    draft = artifacts.new_draft(layout, record.key.scope)
    try:
        with artifacts.entered(target) as folder:
            bad = [entry for entry in record.spec.files if not _holds(target, entry)]
            if not bad:
                return []
            with artifacts.drafted(atomic.real_path(good), draft, bad, root=layout.root, carried=()):
                for entry in bad:
                    permissions.share_file(draft / entry.path, target)
                    os.rename(draft / entry.path, entry.path, dst_dir_fd=folder)
                atomic.sync_folder(target)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Conflict(f"{target} is a symlink, or no folder: remove it, and try again") from error
        raise atomic.unavailable(error, f"cannot mend {target}") from error
    return [entry.path for entry in bad]


def _holds(folder: Path, entry: FileEntry) -> bool:
    with suppress(InputError, VolumeUnavailable):  # absent or unreadable: replace it
        return artifacts.hash_files(folder, [entry.path])[0].sha256 == entry.sha256
    return False
