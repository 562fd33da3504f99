"""What nobody needs any more: old withdrawn artifacts, temporary names, unfinished copies, old hints,
revisions of which a name or namespace keeps no more than so many (``retention``), history (``compaction``).

Refuses: an artifact that a replica reports, that any present record names, whose newest record
cannot be read, or that its owner dropped; and every artifact while a replica's report cannot be
read, for *unknown* is not *unused*. Temporary names go before anything else, so that a writer
that slept cannot link one later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from lora_fs.sidecar.errors import CorruptRecord, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Phase, Record, ReplicaStatus, Scope
from lora_fs.sidecar.registry.format.layout import REGISTERING, TEMPORARY, Generation
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.lifecycle import retention
from lora_fs.sidecar.registry.lifecycle.artifacts import CARRIED
from lora_fs.sidecar.registry.lifecycle.mending import is_whole
from lora_fs.sidecar.registry.maintenance import compaction
from lora_fs.sidecar.registry.maintenance.compaction import HISTORY_S
from lora_fs.sidecar.registry.maintenance.garbage import Garbage, What, artifact, is_older, leftover
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

HINT_S = 24 * 3600.0  # leases are refreshed every few seconds, reports every ten

Unlisted = dict[Path, VolumeUnavailable]


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
        VolumeUnavailable: a folder cannot be listed.
    """
    ahead_s = compaction.ahead_s(registry)
    older_than_s, history_s = older_than_s + ahead_s, history_s + ahead_s
    listing, unlisted = registry.scan(scope), Unlisted()
    found = [*left_by_writers(registry, scope, listing, older_than_s, unlisted)]
    found += _old_hints(registry, older_than_s)
    if in_use is not None:
        found += unfinished(registry, scope, listing, older_than_s, unlisted)
        found += _withdrawn(registry, scope, listing, in_use, older_than_s)
        found += _too_many(registry, scope, in_use, older_than_s, writer)
    for error in unlisted.values():
        raise error
    return found + compaction.find(registry, scope, in_use, history_s)


def names_in(folder: Path, unlisted: Unlisted) -> Sequence[str]:
    """The names in a folder; of one that cannot be listed none, and ``unlisted`` takes it."""
    try:
        return atomic.list_names(folder) or ()
    except VolumeUnavailable as error:
        unlisted[folder] = error
        return ()


def left_by_writers(
    registry: Registry, scope: Scope, listing: ScopeListing, older_than_s: float, unlisted: Unlisted
) -> Iterator[Garbage]:
    """Temporary names, and copies that were never finished. ``unlisted``: see ``names_in``."""
    layout = registry.layout
    folders = [layout.root, layout.leases, layout.replicas, layout.events, layout.active(scope)]
    folders += [layout.revision(scope, revision) for revision in listing.revisions]
    left = "a temporary name left by a writer that died"
    rows = [*((folder, TEMPORARY, left) for folder in folders)]
    rows.append((layout.incoming(scope), "", "a copy that was never finished"))
    for folder, prefix, why in rows:
        for name in names_in(folder, unlisted):
            if name.startswith(prefix) and is_older(folder / name, older_than_s):
                yield leftover(folder / name, why)


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
                yield leftover(folder / name, why)


def unfinished(
    registry: Registry, scope: Scope, listing: ScopeListing, older_than_s: float, unlisted: Unlisted
) -> Iterator[Garbage]:
    """Copies in their places whose writers died before the record, unless somebody changed one since.

    ``unlisted``: see ``names_in``.
    """
    is_named = _named(registry)
    for revision, entries in listing.revisions.items():
        for name in sorted(set(entries.folders) - entries.records.keys()):
            key = AdapterKey(*scope, revision, name)
            folder = registry.layout.artifact(key)
            files = names_in(folder, unlisted)
            if REGISTERING in files and not _arrived(folder, files, older_than_s) and not is_named(folder):
                still = partial(_is_unrecorded, registry, key)
                yield artifact(folder, "a copy that no record came to name", still)


def _arrived(folder: Path, files: Sequence[str], older_than_s: float) -> bool:
    """Whether a folder, or a file in it, changed lately."""
    return not all(is_older(path, older_than_s) for path in (folder, *(folder / file for file in files)))


def _is_unrecorded(registry: Registry, key: AdapterKey) -> bool:
    """Whether there is no record of it, nor ever was one."""
    return not registry.generations(registry.records(key))


def _withdrawn(
    registry: Registry,
    scope: Scope,
    listing: ScopeListing,
    in_use: Collection[AdapterKey],
    older_than_s: float,
) -> Iterator[Garbage]:
    is_named = _named(registry)
    for revision, entries in listing.revisions.items():
        for name in entries.records.keys() & entries.folders:
            key = AdapterKey(*scope, revision, name)
            if key in in_use:
                continue
            record = _tombstone(registry, key, older_than_s, entries.records[name])
            folder = registry.layout.artifact(key)
            if record is not None and not is_named(folder):
                still = partial(_is_withdrawn, registry, key, older_than_s)
                yield artifact(folder, f"unregistered at {record.updated_at}", still)


def _is_withdrawn(registry: Registry, key: AdapterKey, older_than_s: float) -> bool:
    return _tombstone(registry, key, older_than_s) is not None


def _tombstone(
    registry: Registry, key: AdapterKey, older_than_s: float, listed: Generation | None = None
) -> Record | None:
    """The tombstone of an artifact that is ours to remove, long withdrawn and known to be.

    What is being registered anew says so by its mark, which is read before the record that replaces it.

    Args:
        listed: the newest generation, where a listing told it.
    """
    series, folder = registry.records(key), registry.layout.artifact(key)
    files = atomic.list_names(folder) or ()
    is_marked = REGISTERING in files
    if is_marked and _arrived(folder, files, older_than_s):
        return None
    try:
        record = registry.read(series, listed or next(iter(registry.generations(series)), Generation(0, "")))
    except CorruptRecord:
        return None
    if record.present or record.keep_files or record.origin == "folder":
        return None
    path = registry.path(series, record)
    if not is_older(path, older_than_s) or not (is_marked or _is_left(registry, record, path, files)):
        return None
    return record


def _is_left(registry: Registry, record: Record, tombstone: Path, files: Sequence[str]) -> bool:
    """Whether a folder is what a withdrawal left: since then nothing came into it but the bytes recorded.

    Anything else is a person's. A folder that was moved there is younger than its files.
    """
    folder, served = registry.layout.artifact(record.key), {entry.path for entry in record.spec.files}
    with suppress(OSError, VolumeUnavailable):
        withdrawn_ns = tombstone.lstat().st_mtime_ns
        came = {name for name in files if _changed_ns(folder / name) > withdrawn_ns}
        if _changed_ns(folder) > withdrawn_ns:
            came |= set(files) - set(CARRIED)
        return not came or (came <= served and is_whole(registry.layout, record))
    return False


def _changed_ns(path: Path) -> int:
    """When the volume last changed it or its name, whatever time a copy gave it; 0 if it is gone."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        return max(status.st_ctime_ns, status.st_mtime_ns)
    return 0


def _named(registry: Registry) -> Callable[[Path], bool]:
    """Whether a present record of any scope names an artifact, what is in it, or what it is in."""

    @cache
    def named() -> frozenset[Path]:
        found: set[Path] = set()
        for scope in registry.scopes():
            for revision, entries in registry.scan(scope).revisions.items():
                for name, listed in entries.records.items():
                    series = registry.records(AdapterKey(*scope, revision, name))
                    record = registry.newest(series, listed)
                    if record is not None and record.present:
                        found.add(atomic.real_path(registry.layout.resolve(record.spec.path)))
        return frozenset(found)

    def is_named(folder: Path) -> bool:
        own = atomic.real_path(folder)
        return any(path == own or own in path.parents or path in own.parents for path in named())

    return is_named


def _too_many(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey], older_than_s: float, writer: str
) -> Iterator[Garbage]:
    for record, keep in retention.expired(registry, scope, in_use):
        if is_older(registry.path(registry.records(record.key), record), older_than_s):
            yield Garbage(
                registry.layout.artifact(record.key),
                What.REVISION,
                f"unregistered: {record.name} keeps {keep} revisions, and {record.revision} is an older one",
                0 if record.keep_files else record.spec.size_bytes,
                partial(retention.withdraw, registry, record, writer=writer),
            )
