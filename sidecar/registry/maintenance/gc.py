"""What nobody needs any more: old withdrawn artifacts, temporary names, unfinished copies, old hints,
revisions of which a name or namespace keeps no more than so many (``retention``), history (``compaction``).

Refuses: an artifact that a replica reports, that any present record names, whose newest record
cannot be read, or that its owner dropped; and every artifact while a replica's report cannot be
read, for *unknown* is not *unused*. Temporary names go before anything else, so that a writer
that slept cannot link one later.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lora_fs.sidecar.errors import CorruptRecord, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Phase, Record, ReplicaStatus, Scope
from lora_fs.sidecar.registry.format.layout import INCOMING, REGISTERING, TEMPORARY, generation_name
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.lifecycle import artifacts, retention
from lora_fs.sidecar.registry.maintenance import compaction
from lora_fs.sidecar.registry.maintenance.compaction import HISTORY_S
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

HINT_S = 24 * 3600.0  # leases are refreshed every few seconds, reports every ten


@dataclass(frozen=True, slots=True)
class Garbage:
    """One thing that may go, and why.

    Attributes:
        size_bytes: what its going frees; of a revision that is withdrawn, what gc frees later.
        still: whether that holds; asked again before it goes.
        withdraw: unregisters the revision whose folder ``path`` is; nothing is removed yet.
        compact: removes part of a history, ``path`` first; see ``compaction``.
    """

    path: Path
    why: str
    still: Callable[[], bool] | None = field(default=None, compare=False, repr=False)
    size_bytes: int = field(default=0, compare=False)
    withdraw: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    compact: Callable[[], None] | None = field(default=None, compare=False, repr=False)


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
    registry: Registry,
    scope: Scope,
    in_use: Collection[AdapterKey] | None,
    older_than_s: float,
    *,
    history_s: float = HISTORY_S,
    writer: str = "gc",
) -> list[Garbage]:
    """List what may go, in the order in which it may.

    Args:
        in_use: keys that some replica reports; None if that is not known, which keeps every artifact.
        older_than_s, history_s: what is younger stays, by the volume's clock where this host's is ahead.
        writer: who withdraws revisions.
    Raises:
        OperatorError: how many revisions a namespace keeps cannot be told.
    """
    ahead_s = compaction.ahead_s(registry)
    older_than_s, history_s = older_than_s + ahead_s, history_s + ahead_s
    found = [*left_by_writers(registry, scope, older_than_s), *_old_hints(registry, older_than_s)]
    if in_use is not None:
        found += unfinished(registry, scope, older_than_s)
        found += _withdrawn(registry, scope, in_use, older_than_s)
        found += _too_many(registry, scope, in_use, older_than_s, writer)
    for path, why, size_bytes, remove in compaction.find(registry, scope, in_use, history_s):
        found.append(Garbage(path, why, size_bytes=size_bytes, compact=remove))
    return found


def names_in(folder: Path, unlisted: dict[Path, VolumeUnavailable] | None) -> Sequence[str]:
    """The names in a folder. ``unlisted``: takes it if it cannot be listed; without it that raises."""
    try:
        return atomic.list_names(folder) or ()
    except VolumeUnavailable as error:
        if unlisted is None:
            raise
        unlisted[folder] = error
        return ()


def left_by_writers(
    registry: Registry,
    scope: Scope,
    older_than_s: float,
    unlisted: dict[Path, VolumeUnavailable] | None = None,
) -> Iterator[Garbage]:
    """Temporary names, and copies that were never finished. ``unlisted``: see ``names_in``."""
    layout = registry.layout
    folders = [layout.root, layout.leases, layout.replicas, layout.events, layout.active(scope)]
    folders += [
        layout.revision(scope, revision) for revision in registry.scan(scope, unlisted=unlisted).revisions
    ]
    for folder in folders:
        for name in names_in(folder, unlisted):
            if name.startswith(TEMPORARY) and is_older(folder / name, older_than_s):
                why = "a temporary name left by a writer that died"
                yield Garbage(folder / name, why, size_bytes=_size_bytes(folder / name))
    incoming = layout.incoming(scope)
    for name in names_in(incoming, unlisted):
        if is_older(incoming / name, older_than_s):
            size_bytes = _size_bytes(incoming / name)
            yield Garbage(incoming / name, "a copy that was never finished", size_bytes=size_bytes)


def unfinished(
    registry: Registry,
    scope: Scope,
    older_than_s: float,
    unlisted: dict[Path, VolumeUnavailable] | None = None,
) -> Iterator[Garbage]:
    """Copies in their places whose writers died before the record, unless somebody changed one since.

    ``unlisted``: see ``names_in``.
    """
    named: frozenset[Path] | None = None
    for revision, entries in registry.scan(scope, unlisted=unlisted).revisions.items():
        for name in sorted(set(entries.folders) - entries.records.keys()):
            key = AdapterKey(*scope, revision, name)
            artifact = registry.layout.artifact(key)
            files = names_in(artifact, unlisted)
            if REGISTERING not in files or _arrived(artifact, files, older_than_s):
                continue
            named = _named_by_present_records(registry) if named is None else named
            if not _is_named(artifact, named):
                why, still = "a copy that no record came to name", partial(is_unrecorded, registry, key)
                yield Garbage(artifact, why, still, _size_bytes(artifact))


def _arrived(artifact: Path, files: Sequence[str], older_than_s: float) -> bool:
    """Whether a folder, or a file in it, changed lately."""
    return not all(is_older(path, older_than_s) for path in (artifact, *(artifact / file for file in files)))


def is_unrecorded(registry: Registry, key: AdapterKey) -> bool:
    """Whether there is no record of it, nor ever was one."""
    return not registry.generations(registry.records(key))


def _old_hints(registry: Registry, older_than_s: float) -> Iterator[Garbage]:
    layout = registry.layout
    for folder, suffix, why in (
        (layout.leases, ".lock", "a lease that nobody refreshes"),
        (layout.leases, ".json", "where a download went"),
        (layout.replicas, ".json", "the report of a replica that is no more"),
        (layout.events, ".json", "the events of a replica that is no more"),
    ):
        for name in atomic.list_names(folder) or ():
            if name.endswith(suffix) and is_older(folder / name, max(older_than_s, HINT_S)):
                yield Garbage(folder / name, why, size_bytes=_size_bytes(folder / name))


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
            if _is_named(artifact, named):
                continue
            still = partial(_is_removable, registry, key, older_than_s)
            size_bytes = _size_bytes(artifact)
            yield Garbage(artifact, f"unregistered at {record.updated_at}", still, size_bytes)


def _is_named(artifact: Path, named: Collection[Path]) -> bool:
    """Whether one of them is the artifact, in it, or around it."""
    own = atomic.real_path(artifact)
    return any(path == own or own in path.parents or path in own.parents for path in named)


def _too_many(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey], older_than_s: float, writer: str
) -> Iterator[Garbage]:
    for record, keep in retention.expired(registry, scope, in_use):
        if is_older(registry.path(registry.records(record.key), record), older_than_s):
            yield Garbage(
                registry.layout.artifact(record.key),
                f"unregistered: {record.name} keeps {keep} revisions, and {record.revision} is an older one",
                size_bytes=0 if record.keep_files else record.spec.size_bytes,
                withdraw=partial(retention.withdraw, registry, record, writer=writer),
            )


def _is_removable(registry: Registry, key: AdapterKey, older_than_s: float) -> bool:
    return _removable(registry, key, older_than_s) is not None


def _removable(registry: Registry, key: AdapterKey, older_than_s: float) -> Record | None:
    """The tombstone of an artifact that is ours to remove, long withdrawn and known to be.

    What is being registered anew says so by its mark, which is read before the record that replaces it.
    """
    series, artifact = registry.records(key), registry.layout.artifact(key)
    files = atomic.list_names(artifact) or ()
    if REGISTERING in files and _arrived(artifact, files, older_than_s):
        return None
    newest, record = registry.latest(series)
    if record is None or record.generation != newest.generation:
        return None
    if record.present or record.keep_files or record.origin == "folder":
        return None
    tombstone = series.folder / generation_name(key.name, *newest)
    return record if is_older(tombstone, older_than_s) else None


def _named_by_present_records(registry: Registry) -> frozenset[Path]:
    layout = registry.layout
    found: set[Path] = set()
    for scope in registry.scopes():
        for revision, entries in registry.scan(scope).revisions.items():
            for name in entries.records:
                record = registry.latest(registry.records(AdapterKey(*scope, revision, name)))[1]
                if record is not None and record.present:
                    found.add(atomic.real_path(layout.resolve(record.spec.path)))
    return frozenset(found)


def collect(garbage: Iterable[Garbage]) -> dict[Path, LoraFsError]:
    """Remove all of it that can be removed; returns what stays, each path with the reason.

    An artifact is moved aside first, and put back if it was registered meanwhile. An artifact beside which a
    temporary name stays is kept, too: its writer may yet link the record.
    """
    kept: dict[Path, LoraFsError] = {}
    unsafe: set[Path] = set()
    for item in garbage:
        folder = item.path.parent
        try:
            if item.still is not None and folder in unsafe:
                raise VolumeUnavailable(f"{item.path} is kept: a temporary name in {folder} was not removed")
            _remove(item)
        except FileNotFoundError:
            continue  # somebody else removed it
        except OSError as error:
            kept[item.path] = atomic.unavailable(error, f"cannot remove {item.path}")
            unsafe |= {folder} if item.path.name.startswith(TEMPORARY) else set()
        except LoraFsError as error:
            kept[item.path] = error
    return kept


def _remove(item: Garbage) -> None:
    if item.withdraw is not None:
        item.withdraw()
    elif item.compact is not None:
        item.compact()
    elif item.still is not None:
        _remove_artifact(item.path, item.still)
    elif item.path.is_dir() and not item.path.is_symlink():
        shutil.rmtree(item.path)
    else:
        item.path.unlink(missing_ok=True)


def _remove_artifact(artifact: Path, still: Callable[[], bool]) -> None:
    """``register`` looks for its artifact once more after its record: one of the two sees the other."""
    if not still():
        return
    incoming = artifact.parent.parent / INCOMING
    atomic.make_folder(incoming)
    aside = artifacts.temporary_in(incoming)
    os.rename(artifact, aside)
    try:
        if still():
            shutil.rmtree(aside)
            return
    except LoraFsError:
        with suppress(OSError):
            os.rename(aside, artifact)
        raise
    try:
        os.rename(aside, artifact)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(aside)  # register missed it and placed its own copy


def is_older(path: Path, seconds: float) -> bool:
    """Whether it was last changed so long ago, the volume's times against this host's clock."""
    return compaction.age_s(path) >= seconds


def _size_bytes(path: Path) -> int:
    """Of a file, or of all in a folder; what goes away meanwhile counts nothing."""
    try:
        found = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise atomic.unavailable(error, f"cannot list {path}") from error
    total = 0
    for one in found:
        with suppress(OSError):
            status = one.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
