"""What nobody needs any more: old withdrawn artifacts, temporary names, unfinished copies, old hints,
revisions of which a name or namespace keeps no more than so many (``retention``), history (``compaction``).

Refuses: an artifact that a replica reports, that any present record names, whose newest record
cannot be read, or that its owner dropped; and every artifact while a replica's report cannot be
read, for *unknown* is not *unused*. Temporary names go before anything else, so that a writer
that slept cannot link one later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from lora_fs.sidecar.errors import CorruptRecord, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Phase, Record, Scope
from lora_fs.sidecar.registry.format.layout import REGISTERING, TEMPORARY, Generation
from lora_fs.sidecar.registry.lifecycle import retention
from lora_fs.sidecar.registry.lifecycle.artifacts import CARRIED
from lora_fs.sidecar.registry.lifecycle.mending import is_whole
from lora_fs.sidecar.registry.maintenance import compaction, evaluated, survey
from lora_fs.sidecar.registry.maintenance.compaction import HISTORY_S
from lora_fs.sidecar.registry.maintenance.evaluated import ListNames
from lora_fs.sidecar.registry.maintenance.garbage import Garbage, What, ahead_s, artifact, is_older, leftover
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import read_reports
from lora_fs.sidecar.registry.volume import atomic

HINT_S = 24 * 3600.0  # holders refresh leases every few seconds, reports every ten
_TAKEOVER = re.compile(r"\.(break|restore)\.\d+\.[0-9a-f]{32}$")  # filelock's, while it breaks a lease


def in_use(registry: Registry) -> frozenset[AdapterKey]:
    """The keys that some replica reports.

    Raises:
        VolumeUnavailable: a report is unreadable, so what that replica uses is unknown.
    """
    reports = read_reports(registry.layout)
    for replica, why in reports.unreadable.items():
        raise VolumeUnavailable(
            f"cannot tell what the replica of {registry.layout.replica(replica)} uses: {why}; "
            "if that replica is gone for good, remove its file"
        )
    adapters = (one for status in reports.replicas for one in status.adapters.values())
    return frozenset(AdapterKey(*one.key) for one in adapters if one.phase is not Phase.FAILED)


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
        in_use: keys that a replica reports; None if unknown, which keeps every artifact.
        older_than_s, history_s: anything younger stays, by the volume's clock where this host's is ahead.
        writer: who withdraws revisions.
    Raises:
        OperatorError: how many revisions a namespace keeps is unknown.
        VolumeUnavailable: the volume does not list a folder.
    """
    ahead = ahead_s(registry.layout)
    older_than_s, history_s = older_than_s + ahead, history_s + ahead
    listing, names = registry.scan(scope), registry.names
    found = [*left_by_writers(registry, scope, listing, older_than_s, names)]
    found += evaluated.orphans(registry, scope, listing, older_than_s, names)
    found += _old_hints(registry, older_than_s)
    if in_use is not None:
        found += unfinished(registry, scope, listing, older_than_s, names)
        found += _withdrawn(registry, scope, listing, in_use, older_than_s)
        found += _too_many(registry, scope, in_use, older_than_s, writer)
    return found + compaction.find(registry, scope, in_use, history_s)


def left_by_writers(
    registry: Registry,
    scope: Scope,
    listing: ScopeListing,
    older_than_s: float,
    list_names: ListNames,
) -> Iterator[Garbage]:
    """Temporary names, and copies that their writers never finished."""
    layout = registry.layout
    folders = [layout.root, layout.leases, layout.replicas, layout.events, layout.active(scope)]
    folders += [layout.revision(scope, revision) for revision in listing.revisions]
    folders += evaluated.folders(layout, scope, list_names)
    left = "a temporary name left by a writer that died"
    rows = [*((folder, TEMPORARY, left) for folder in folders)]
    rows.append((layout.incoming(scope), "", "a copy that was never finished"))
    for folder, prefix, why in rows:
        for name in list_names(folder):
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
        for name in registry.names(folder):
            of = _TAKEOVER.sub("", name)
            if of.endswith(suffix) and is_older(folder / name, max(older_than_s, HINT_S)):
                yield leftover(folder / name, why)


def unfinished(
    registry: Registry,
    scope: Scope,
    listing: ScopeListing,
    older_than_s: float,
    list_names: ListNames,
) -> Iterator[Garbage]:
    """Copies in their places whose writers died before the record, unless somebody changed one since."""
    is_named = _named(registry)
    for revision, entries in listing.revisions.items():
        for name in sorted(entries.folders - entries.records.keys()):
            key = AdapterKey(*scope, revision, name)
            folder = registry.layout.artifact(key)
            files = list_names(folder)
            if REGISTERING in files and not _arrived(folder, files, older_than_s) and not is_named(folder):
                still = partial(_is_unrecorded, registry, key)
                yield artifact(registry.layout, key, "a copy that no record came to name", still)


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
            if record is not None and not is_named(registry.layout.artifact(key)):
                still = partial(_is_withdrawn, registry, key, older_than_s)
                yield artifact(registry.layout, key, f"unregistered at {record.updated_at}", still)


def _is_withdrawn(registry: Registry, key: AdapterKey, older_than_s: float) -> bool:
    return _tombstone(registry, key, older_than_s) is not None


def _tombstone(
    registry: Registry, key: AdapterKey, older_than_s: float, listed: Generation | None = None
) -> Record | None:
    """The tombstone of an artifact that is ours to remove, long withdrawn and known to be.

    A registration in progress sets a mark, which this reads before the record that it replaces.

    Args:
        listed: the newest generation, where a listing has it.
    """
    series, folder = registry.records(key), registry.layout.artifact(key)
    files = registry.names(folder)
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

    Anything else is a person's. A folder that somebody moved there is younger than its files.
    """
    folder, served = registry.layout.artifact(record.key), {entry.path for entry in record.spec.files}
    with suppress(OSError, VolumeUnavailable):
        withdrawn_ns = tombstone.lstat().st_mtime_ns
        came = {name for name in files if _changed_ns(folder / name, name in CARRIED) > withdrawn_ns}
        if _changed_ns(folder) > withdrawn_ns:
            came |= set(files) - set(CARRIED)
        return not came or (came <= served and is_whole(registry.layout, record))
    return False


def _changed_ns(path: Path, is_carried: bool = False) -> int:
    """When the volume last changed it or its name, whatever time a copy gave it; 0 if it is gone.

    A copy of the volume and a ``chown`` (fsGroup) change every ctime. So compare the served files with
    the record. No record knows the other files: for them the mtime counts.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        return status.st_mtime_ns if is_carried else max(status.st_ctime_ns, status.st_mtime_ns)
    return 0


def _named(registry: Registry) -> Callable[[Path], bool]:
    """Whether a present record of any scope names an artifact, what is in it, or what it is in.

    It looks paths up, however many records there are. To compare two ``Path`` costs microseconds.
    """

    @cache
    def named() -> tuple[frozenset[str], frozenset[str]]:
        """The folders that records name, and all that they are in."""
        state = survey.look(registry)
        for error in state.unknown.values():
            raise error
        present = (record for record in state.records.values() if record.present)
        folders = {atomic.real_path(registry.layout.resolve(one.spec.path)) for one in present}
        return frozenset(map(str, folders)), frozenset(str(above) for one in folders for above in one.parents)

    def is_named(folder: Path) -> bool:
        own = atomic.real_path(folder)
        folders, above = named()
        return str(own) in above or not folders.isdisjoint(map(str, (own, *own.parents)))

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
