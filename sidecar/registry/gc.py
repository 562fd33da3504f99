"""What nobody needs any more: old withdrawn artifacts, temporary names, half-done copies, old hints.

Refuses: an artifact that a replica reports, that any present record names, whose newest record
cannot be read, or that its owner dropped; and every artifact while a replica's report cannot be
read, for *unknown* is not *unused*. Temporary names go before anything else, so that a writer
that slept cannot link one later.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lora_fs.sidecar.errors import CorruptRecord, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Phase, Record, ReplicaStatus, Scope
from lora_fs.sidecar.registry import artifacts, atomic
from lora_fs.sidecar.registry.codec import decode
from lora_fs.sidecar.registry.layout import INCOMING, TEMPORARY, generation_name
from lora_fs.sidecar.registry.store import Registry

HINT_S = 24 * 3600.0  # leases are refreshed every few seconds, reports every ten


@dataclass(frozen=True, slots=True)
class Garbage:
    """One thing that may go, and why. ``still``: whether that holds; asked again before it goes."""

    path: Path
    why: str
    still: Callable[[], bool] | None = field(default=None, compare=False, repr=False)


def in_use(registry: Registry) -> frozenset[AdapterKey]:
    """The keys that some replica reports.

    Raises:
        VolumeUnavailable: a report cannot be read, so it is not known what that replica uses.
    """
    found: set[AdapterKey] = set()
    for name in atomic.list_names(registry.layout.replicas) or ():
        if not name.endswith(".json") or name.startswith("."):
            continue
        path = registry.layout.replicas / name
        try:
            data = atomic.read_bytes(path)
            if data is None:
                continue  # withdrawn meanwhile
            status = decode(ReplicaStatus, data)
        except (CorruptRecord, VolumeUnavailable) as error:
            raise VolumeUnavailable(
                f"cannot tell what the replica of {path} uses: {error}; "
                "if that replica is gone for good, remove its file"
            ) from error
        found |= {AdapterKey(*one.key) for one in status.adapters.values() if one.phase is not Phase.FAILED}
    return frozenset(found)


def find(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey] | None, older_than_s: float
) -> list[Garbage]:
    """List what may go, in the order in which it may.

    Args:
        in_use: keys that some replica reports; None if that is not known, which keeps every artifact.
    """
    found = [*left_by_writers(registry, scope, older_than_s), *_old_hints(registry, older_than_s)]
    if in_use is not None:
        found += _withdrawn(registry, scope, in_use, older_than_s)
    return found


def left_by_writers(registry: Registry, scope: Scope, older_than_s: float) -> Iterator[Garbage]:
    """Temporary names, and copies that were never finished."""
    layout = registry.layout
    folders = [layout.root, layout.leases, layout.replicas, layout.active(scope)]
    folders += [layout.revision(scope, revision) for revision in registry.scan(scope).revisions]
    for folder in folders:
        for name in atomic.list_names(folder) or ():
            if name.startswith(TEMPORARY) and _older(folder / name, older_than_s):
                yield Garbage(folder / name, "a temporary name left by a writer that died")
    incoming = layout.incoming(scope)
    for name in atomic.list_names(incoming) or ():
        if _older(incoming / name, older_than_s):
            yield Garbage(incoming / name, "a copy that was never finished")


def _old_hints(registry: Registry, older_than_s: float) -> Iterator[Garbage]:
    layout = registry.layout
    for folder, suffix, why in (
        (layout.leases, ".lock", "a lease that nobody refreshes"),
        (layout.replicas, ".json", "the report of a replica that is no more"),
    ):
        for name in atomic.list_names(folder) or ():
            if name.endswith(suffix) and _older(folder / name, max(older_than_s, HINT_S)):
                yield Garbage(folder / name, why)


def _withdrawn(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey], older_than_s: float
) -> Iterator[Garbage]:
    named: frozenset[Path] | None = None
    for revision, entries in registry.scan(scope).revisions.items():
        for name in entries.records.keys() & entries.folders:
            key = AdapterKey(*scope, revision, name)
            record = _removable(registry, key, older_than_s)
            if record is None or key in in_use:
                continue
            named = _named_by_present_records(registry) if named is None else named
            artifact = registry.layout.artifact(key)
            own = artifact.resolve()
            if any(path == own or own in path.parents or path in own.parents for path in named):
                continue
            still = partial(_is_removable, registry, key, older_than_s)
            yield Garbage(artifact, f"unregistered at {record.updated_at}", still)


def _is_removable(registry: Registry, key: AdapterKey, older_than_s: float) -> bool:
    return _removable(registry, key, older_than_s) is not None


def _removable(registry: Registry, key: AdapterKey, older_than_s: float) -> Record | None:
    """The tombstone of an artifact that is ours to remove, long withdrawn and known to be."""
    series = registry.records(key)
    newest, record = registry.latest(series)
    if record is None or record.generation != newest.generation:
        return None
    if record.present or record.keep_files or record.origin == "folder":
        return None
    tombstone = series.folder / generation_name(key.name, *newest)
    return record if _older(tombstone, older_than_s) else None


def _named_by_present_records(registry: Registry) -> frozenset[Path]:
    layout = registry.layout
    found: set[Path] = set()
    for scope in registry.scopes():
        for revision, entries in registry.scan(scope).revisions.items():
            for name in entries.records:
                record = registry.latest(registry.records(AdapterKey(*scope, revision, name)))[1]
                if record is not None and record.present:
                    found.add(layout.resolve(record.spec.path).resolve())
    return frozenset(found)


def collect(garbage: Collection[Garbage]) -> None:
    """Remove it. An artifact is moved aside first and put back if it was registered meanwhile."""
    for item in garbage:
        try:
            if item.still is not None:
                _remove_artifact(item.path, item.still)
            elif item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # somebody else removed it
        except OSError as error:
            raise atomic.unavailable(error, f"cannot remove {item.path}") from error


def _remove_artifact(artifact: Path, still: Callable[[], bool]) -> None:
    """``register`` looks for its artifact once more after its record: one of the two sees the other."""
    if not still():
        return
    incoming = artifact.parent.parent / INCOMING
    atomic.make_folder(incoming)
    aside = artifacts.temporary_in(incoming)
    os.rename(artifact, aside)
    if still():
        shutil.rmtree(aside)
        return
    try:
        os.rename(aside, artifact)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(aside)  # register missed it and placed its own copy


def _older(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.lstat().st_mtime >= seconds
    except OSError:
        return False  # gone, or cannot be told: leave it
