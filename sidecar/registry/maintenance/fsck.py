"""Finds the faults of a volume, and says how to mend them without losing or guessing anything.

It reads a ``survey``, and changes nothing; ``mend`` does. A finding without a mend needs a person: where two
states are possible (is the adapter withdrawn, or not?) fsck chooses none. A folder that it cannot look at is
a finding, for unknown is not healthy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from lora_fs.sidecar.errors import (
    CorruptRecord,
    InputError,
    LoraFsError,
    OperatorError,
    VolumeUnavailable,
)
from lora_fs.sidecar.model import AdapterKey, FileEntry, Record, Scope
from lora_fs.sidecar.registry.backup.archive import check
from lora_fs.sidecar.registry.format.ids import new_ids
from lora_fs.sidecar.registry.format.layout import REGISTERING
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.mending import lies
from lora_fs.sidecar.registry.maintenance import evaluated, gc
from lora_fs.sidecar.registry.maintenance.garbage import Garbage, is_older
from lora_fs.sidecar.registry.maintenance.survey import State, names_in, noted, series_of
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.head import READ_BYTES, Head
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import read_reports
from lora_fs.sidecar.registry.volume import atomic


class Kind(StrEnum):
    """The kinds of findings."""

    UNREADABLE = "unreadable"  # the newest generation of a record or pointer
    SIBLINGS = "siblings"  # two writers published the same generation (tier lww)
    NO_FILES = "no-files"  # a registered adapter whose files are gone
    BAD_FILES = "bad-files"  # … or hold other bytes
    NO_RECORD = "no-record"  # a folder that nobody registered
    SAME_ID = "same-id"  # two adapters with one integer id
    DANGLING = "dangling"  # a name serves a revision that is not registered
    NO_EXPORT = "no-export"  # it is in force, and no export holds it
    HALF = "half-upload"
    HEAD = "head"
    QUOTA = "quota"  # its limits are unreadable, so its namespace registers nothing
    MARKER = "marker"  # of the registry: nobody may write
    REPORT = "report"
    EVALUATION = "evaluation"  # it cannot be read, so it passes no gate; or no record is of it
    UNKNOWN = "unknown"  # the volume did not show it


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        mend: what ``mend`` would do; empty if it takes a person, and then ``text`` says what.
        key: the adapter, or None. A pointer's has no revision: its third segment is empty.
        garbage: what ``mend`` removes.
    """

    kind: Kind
    path: Path
    text: str
    mend: str = ""
    key: AdapterKey | None = None
    garbage: Garbage | None = None


def find(registry: Registry, state: State, *, older_than_s: float, hash_files: bool) -> Iterator[Finding]:
    """Return all findings.

    Args:
        older_than_s: pass over anything younger: a writer or an owner may be at work on it.
        hash_files: read every adapter's files; else their sizes alone are compared.
    """
    yield from _kept_from_writing(registry, state)
    yield from _unreadable(state)
    yield from _siblings(registry, state)
    yield from _dangling(registry, state)
    yield from _same_ids(registry, state)
    yield from _not_exported(registry, state)
    for key, record in state.records.items():
        if record.present:
            yield from _files(registry, key, record, hash_files=hash_files)
    yield from _unregistered(registry, state, older_than_s)
    yield from _left(registry, state, older_than_s)
    yield from _evaluations(registry, state, older_than_s)
    yield from _hints(registry, state)
    for path, error in state.unknown.items():
        yield Finding(Kind.UNKNOWN, path, str(error))


def _kept_from_writing(registry: Registry, state: State) -> Iterator[Finding]:
    """The faults that stop every writer, or every writer of a namespace."""
    try:
        registry.check_writable()
    except LoraFsError as error:
        yield Finding(Kind.MARKER, registry.layout.marker, f"nothing can be written: {error}")
    for namespace in state.namespaces:
        with noted(state, registry.layout.root / namespace):
            try:
                registry.accounts.quota(namespace)
            except OperatorError as error:
                yield Finding(Kind.QUOTA, registry.layout.quota(namespace), str(error))


def _unreadable(state: State) -> Iterator[Finding]:
    for key, (path, is_newer) in state.unread.items():
        said, mend = _certain(state, key), ""
        if is_newer:
            text = "is of a newer lora-fs, which alone can read and change it: upgrade this one"
        elif said is not None:
            text, mend = f"cannot be read; {said}", "the last good one is written again"
        else:
            advice = (
                f"`lora-fs register` its bytes again to keep {key.revision} of {key.name}, or unregister it"
                if key.revision
                else f"`lora-fs promote {key.name} REVISION`, or unregister it"
            )
            text = f"cannot be read, and whether it withdrew something is not known: {advice}"
        yield Finding(Kind.UNREADABLE, path, text, mend, key)


def _certain(state: State, key: AdapterKey) -> str | None:
    """Why the newest good record must equal the damaged one, in what it serves; None if that is not certain.

    A withdrawal first points the name elsewhere. So if a readable pointer still serves this revision, nobody
    withdrew it. What a damaged pointer said is unknown.
    """
    named = key._replace(revision="")
    record, pointer = state.records.get(key), state.pointers.get(named)
    if record is None or not record.present or pointer is None or named in state.unread:
        return None
    return f"{key.name} serves {key.revision}" if pointer.revision == key.revision else None


def _siblings(registry: Registry, state: State) -> Iterator[Finding]:
    for scope, revision, entries in state.folders():
        for name in entries.siblings:
            key = AdapterKey(*scope, revision, name)
            path = series_of(registry, key).file(entries.records[name])
            text = "two writers published this generation, and this one is in force"
            mend = "" if key in state.unread else "the one in force is written again"
            yield Finding(Kind.SIBLINGS, path, text, mend, key)


def _dangling(registry: Registry, state: State) -> Iterator[Finding]:
    for named, pointer in state.pointers.items():
        key = named._replace(revision=pointer.revision or "")
        record = state.records.get(key)
        if not key.revision or (record is None and _is_unknown(registry, state, key)):
            continue
        if record is None or not record.present:
            path = registry.layout.active(key.scope) / f"{key.name}.@*"
            text = f"serves {key.revision}, which is not registered: promote another one, or register it"
            yield Finding(Kind.DANGLING, path, text, key=key)


def without_pointer(registry: Registry, state: State) -> list[tuple[Scope, str]]:
    """Registered names that no pointer file is of.

    Somebody registered them with ``--no-activate``, or ``.active/`` was lost. Nothing shows which, so it is
    no finding.
    """
    present = {(key.scope, key.name) for key, record in state.records.items() if record.present}
    return sorted(
        (scope, name)
        for scope, name in present
        if name not in state.listings[scope].pointers and registry.layout.active(scope) not in state.unknown
    )


def _is_unknown(registry: Registry, state: State, key: AdapterKey) -> bool:
    """Whether it may have a record that the volume did not show."""
    folder, own = registry.records(key).folder, f"{key.name}.@"
    return any(
        path == folder or (path.parent == folder and path.name.startswith(own)) for path in state.unknown
    )


def _same_ids(registry: Registry, state: State) -> Iterator[Finding]:
    for key, fresh in new_ids(state.records, registry.marker.registry_uuid).items():
        path = registry.layout.revision(key.scope, key.revision) / f"{key.name}.@*"
        shared = state.records[key].spec.int_id
        yield Finding(Kind.SAME_ID, path, f"shares the id {shared} with another", f"it is given {fresh}", key)


def _not_exported(registry: Registry, state: State) -> Iterator[Finding]:
    """What a backup would leave out: a warning before the backup is needed."""
    for key, body in state.bodies.items():
        path = registry.path(series_of(registry, key), body)
        try:
            check(str(path.relative_to(registry.layout.root)), body)
        except (CorruptRecord, InputError) as error:
            what = "`lora-fs register` its bytes as another revision" if key.revision else "promote it again"
            yield Finding(Kind.NO_EXPORT, path, f"no export holds it: {error}; {what}", key=key)


def _files(registry: Registry, key: AdapterKey, record: Record, *, hash_files: bool) -> Iterator[Finding]:
    folder = registry.layout.resolve(record.spec.path)
    linked = folder != registry.layout.artifact(key)
    mend = "" if linked else "they are taken from the same bytes elsewhere, where there are some"
    try:
        names = registry.listed(folder)
        if names is None:
            yield Finding(Kind.NO_FILES, folder, f"the files of {key} are gone", mend, key)
            return
        bad = [entry.path for entry in record.spec.files if not _holds(folder, entry, hash_files)]
    except LoraFsError as error:
        yield Finding(Kind.UNKNOWN, folder, f"the files of {key} cannot be read: {error}", key=key)
        return
    if bad:
        text = f"{', '.join(bad)} of {key}: missing, or not the bytes registered"
        yield Finding(Kind.BAD_FILES, folder, text, mend, key)


def _holds(folder: Path, entry: FileEntry, hash_files: bool) -> bool:
    if not hash_files:
        return lies(folder, entry)
    try:
        return lies(folder, entry) and artifacts.hash_files(folder, [entry.path])[0].sha256 == entry.sha256
    except InputError:
        return False


def _unregistered(registry: Registry, state: State, older_than_s: float) -> Iterator[Finding]:
    for scope, listing in state.listings.items():
        for revision, entries in listing.revisions.items():
            for name in sorted(entries.folders - entries.records.keys()):
                key = AdapterKey(*scope, revision, name)
                folder = registry.layout.artifact(key)
                with noted(state, folder):
                    if not atomic.is_folder(folder) and not folder.is_symlink():
                        continue  # a file beside adapters is somebody's own
                if is_older(folder, older_than_s) and REGISTERING not in names_in(registry, state, folder):
                    text = "no record names this folder: it was dropped and not adopted, or its writer died"
                    yield Finding(Kind.NO_RECORD, folder, text, "it is adopted, as a sidecar would", key)


def _left(registry: Registry, state: State, older_than_s: float) -> Iterator[Finding]:
    seen, list_names = set[Path](), partial(names_in, registry, state)
    for scope, listing in state.listings.items():
        with noted(state, registry.layout.scope(scope)):
            left = gc.left_by_writers(registry, scope, listing, older_than_s, list_names)
            copies = gc.unfinished(registry, scope, listing, older_than_s, list_names)
            for item in itertools.chain(left, copies):
                if item.path not in seen:
                    seen.add(item.path)
                    yield Finding(Kind.HALF, item.path, item.why, "it is removed", garbage=item)


def _evaluations(registry: Registry, state: State, older_than_s: float) -> Iterator[Finding]:
    list_names = partial(names_in, registry, state)
    for scope, listing in state.listings.items():
        for path, key in evaluated.files(registry.layout, scope, list_names):
            record = state.records.get(key)
            if record is None or not record.present:
                continue
            with noted(state, path):
                try:
                    data = atomic.read_bytes(path)
                    if data is not None:
                        evaluations.parse(key, data)
                except (CorruptRecord, atomic.NotRegular) as error:
                    again = f"`lora-fs evaluate {key.name}@{key.revision}` again"
                    text = f"cannot be read, and no gate is passed by it: {error}: {again}"
                    yield Finding(Kind.EVALUATION, path, text, key=key)
        home = registry.layout.scope(scope)
        if not any(path.is_relative_to(home) for path in state.unknown):  # else a record may be hidden
            for item in evaluated.orphans(registry, scope, listing, older_than_s, list_names):
                yield Finding(Kind.EVALUATION, item.path, item.why, "it is removed", garbage=item)


def _hints(registry: Registry, state: State) -> Iterator[Finding]:
    layout = registry.layout
    try:
        data = atomic.read_bytes(layout.head, limit_bytes=READ_BYTES)
        why = "is missing" if data is None else None
        if data is not None:
            decode(Head, data)
    except CorruptRecord as error:
        why = f"is damaged: {error}"
    except VolumeUnavailable as error:
        why = f"cannot be read: {error}"
    if why is not None:
        yield Finding(
            Kind.HEAD, layout.head, f"{why}; readers look at their next scan only", "it is made anew"
        )
    with noted(state, layout.replicas):
        for replica, reason in read_reports(layout).unreadable.items():
            text = f"{reason}: gc keeps every file until its replica writes it anew, or it is removed"
            yield Finding(Kind.REPORT, layout.replica(replica), text)
