"""To register: what is checked, copied, recorded and made active, in that order.

It is safe to stop anywhere: bytes before the record, the record before the pointer, HEAD
last. A half-done register is an artifact or an inactive revision that nobody asked for,
never a name without bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import Conflict, InvalidAdapter, VolumeUnavailable
from lora_fs.sidecar.model import (
    AdapterKey,
    AdapterSpec,
    Origin,
    Policy,
    Record,
    Scope,
    Source,
    State,
    check_segment,
)
from lora_fs.sidecar.registry.format.ids import int_id
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.amend import over
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.copying import Copy, Taken
from lora_fs.sidecar.registry.lifecycle.release import active, point, present_revisions
from lora_fs.sidecar.registry.lifecycle.revisions import newest_record, next_revision, policy_of_served
from lora_fs.sidecar.registry.store.quota import WAIT_S
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.validate import CODES, Expectation, Report, validate

ADOPTED_IN_PLACE = "folder"
RACES = 32  # lost in a row before the caller is told; each means that another register went ahead


@dataclass(frozen=True, slots=True)
class Registration:
    """What to register.

    Attributes:
        source: a local folder.
        revision: None takes the next ``vN``.
        policy: None takes that of the revision that the name serves.
        must_be_new: refuse a name that is served already.
        resolved: links in ``source`` were followed when it was allowed, and none is any more.
        pin: the commit or etag of ``uri``.
        takes: ``source`` lies in ``.incoming/`` and is moved, not copied.
        hashes: the SHA-256 of its files that were hashed as they were written there.
    """

    name: str
    source: Path
    uri: str
    revision: str | None = None
    base_model: str | None = None
    policy: Policy | None = None
    labels: Mapping[str, str] | None = None
    link: bool = False
    activate: bool = True
    origin: Origin = "register"
    must_be_new: bool = False
    resolved: bool = False
    fingerprint: str | None = None
    pin: str | None = None
    takes: bool = False
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Registered:
    """The record in force afterwards.

    ``changed`` is False if these bytes were there already; ``amended`` if then their policy or
    labels are new; ``restored`` if files of theirs were lost and are there again.
    """

    record: Record
    changed: bool
    report: Report
    amended: bool = False
    restored: bool = False


def register(
    registry: Registry,
    scope: Scope,
    wanted: Registration,
    expectation: Expectation,
    *,
    writer: str,
    dry_run: bool = False,
    progress: Progress | None = None,
    patience_s: float = WAIT_S,
) -> Registered:
    """Validate, copy, record, activate. Where another writer takes the next ``vN`` first, the one after it.

    Args:
        patience_s: how long to wait for another writer of a namespace that has a quota.
    Raises:
        OverQuota, TooManyRegistrations: the namespace's quota does not allow it; nothing was written.
        InvalidName, InvalidAdapter: nothing was written.
        Conflict: the revision exists with other bytes, or the name is served already.
        TemporaryError: see ``Registry.append``.
    """
    for _ in range(RACES):
        try:
            return _register(registry, scope, wanted, expectation, writer, dry_run, progress, patience_s)
        except Taken:
            if wanted.revision is not None or not atomic.is_folder(wanted.source):  # it was moved already
                raise
        progress = None  # it counts what is read once
    raise Conflict(f"{RACES} revisions of {wanted.name} were taken by other writers meanwhile: try again")


def _register(
    registry: Registry,
    scope: Scope,
    wanted: Registration,
    expectation: Expectation,
    writer: str,
    dry_run: bool,
    progress: Progress | None,
    patience_s: float,
) -> Registered:
    """One try; raises Taken where the revision that was free is not any more."""
    name = check_segment("name", wanted.name)
    if name == scope.model:
        raise Conflict(f"{name!r} is the base model's own name: an adapter needs another one")
    report = validate(wanted.source, expectation, progress=progress)
    if not report.ok or report.shape is None:
        raise InvalidAdapter(wanted.uri if wanted.takes else str(wanted.source), report.errors)
    registry.check_writable()
    existing = present_revisions(registry, scope, name)
    if wanted.must_be_new:
        refuse_served(registry, scope, name)
    files = artifacts.hash_files(wanted.source, report.served_files, progress, wanted.hashes)
    digest = artifacts.digest_of(files)
    if wanted.fingerprint not in (None, artifacts.fingerprint(wanted.source)):
        raise VolumeUnavailable(f"{wanted.source} changed while it was read: it is looked at again")
    allowed = _allowed(wanted, expectation)
    copy_at = partial(
        Copy,
        registry,
        source=wanted.source,
        files=report.served_files,
        digest=digest,
        progress=progress,
        moved=wanted.takes,
        follow=not wanted.resolved,
    )
    for record in existing.values():
        if record.spec.digest == digest and wanted.revision in (None, record.revision):
            copy = copy_at(record.key)
            if dry_run:
                return Registered(record, False, report, restored=copy.lost(record))
            restored = copy.restore(record)
            newest = _again(registry, record, wanted, allowed, writer, patience_s)
            return Registered(newest, False, report, newest.generation != record.generation, restored)
    revision = wanted.revision or next_revision(registry, scope, name, digest, report.served_files)
    key = AdapterKey.checked(*scope, revision, name)
    spec = AdapterSpec(
        source=Source(uri=wanted.uri, pin=wanted.pin),
        path=str(atomic.real_path(wanted.source)) if wanted.link else f"{scope}/{revision}/{name}",
        base_model=wanted.base_model or report.base_model or scope.model,
        digest=digest,
        size_bytes=sum(entry.size_bytes for entry in files),
        files=files,
        lora=report.shape,
        int_id=int_id(registry.marker.registry_uuid, key, digest),
        policy=wanted.policy or policy_of_served(registry, scope, name, existing),
        labels=dict(wanted.labels or {}),
        fingerprint=wanted.fingerprint,
        allowed=allowed,
    )
    # Asked before bytes are copied, which would else lie where those of the revision belong.
    is_new = wanted.revision is None or wanted.origin == ADOPTED_IN_PLACE
    fields = _present(wanted, revision, spec, None if is_new else newest_record(registry, key))
    registry.accounts.check(key, spec.size_bytes)
    if dry_run:
        unsaid = {"generation": 1, "request_id": "", "token": "", "writer": writer, "updated_at": ""}
        said = {"namespace": scope.namespace, "model": scope.model, "name": name}
        return Registered(Record.model_validate({**fields, **said, **unsaid}), True, report)
    record = _record(copy_at(key), wanted, spec, writer, patience_s)
    if wanted.activate:
        _activate(registry, record, wanted, writer)
    return Registered(record, True, report)


def refuse_served(registry: Registry, scope: Scope, name: str) -> None:
    """Raise Conflict for a name that is served: one that was recorded only is completed by a repeat."""
    pointer = active(registry, scope, name)
    if pointer is not None and pointer.revision is not None:
        raise Conflict(f"The lora adapter '{name}' has already been loaded.")


def _present(wanted: Registration, revision: str, spec: AdapterSpec, newest: Record | None) -> dict[str, Any]:
    """The fields of the next generation of its record.

    Raises:
        Taken: the revision is there with other bytes.
    """
    other = newest is not None and newest.spec.digest != spec.digest
    if newest is not None and other and wanted.origin != ADOPTED_IN_PLACE:
        raise Taken(
            f"revision {revision} of {wanted.name} exists with other bytes "
            f"({newest.spec.digest[:19]}…): revisions never change; register a new one"
        )
    said = spec.model_dump(mode="json")
    if newest is not None:
        earlier = newest.spec.model_dump(mode="json")
        unsaid = {"policy": wanted.policy, "labels": wanted.labels} if newest.present else {}
        said |= {field: earlier[field] for field, value in unsaid.items() if value is None}
        said = over(earlier, said)
    return {
        "revision": revision,
        "uid": newest.uid if newest is not None else secrets.token_hex(16),
        "state": State.PRESENT,
        "origin": wanted.origin,
        "keep_files": wanted.link,
        "spec": said,
    }


def _record(copy: Copy, wanted: Registration, spec: AdapterSpec, writer: str, patience_s: float) -> Record:
    """The bytes in their place, then the record of them; withdrawn again if it is over the quota."""
    registry, key = copy.registry, copy.key
    series = registry.records(key)
    # Built on the root, since to resolve the target would look up a name that is not there yet.
    lies_at = atomic.real_path(registry.layout.root) / spec.path
    copies = not wanted.link and atomic.real_path(wanted.source) != lies_at
    admitted = registry.accounts.admitted(key, spec.size_bytes, wait_s=patience_s)
    with copy.made() if copies else nullcontext() as incoming, admitted as too_much:
        if incoming is not None:
            copy.place(incoming, recorded=False)
        build = partial(_present, wanted, key.revision, spec)
        record = registry.append(series, build, writer=writer, announce=not wanted.activate)
        if not wanted.link and wanted.origin != ADOPTED_IN_PLACE:
            artifacts.unmark(copy.target)
        refusal = too_much()
        if refusal is not None:
            in_place = wanted.origin == ADOPTED_IN_PLACE
            again = {"spec": {**spec.model_dump(mode="json"), "fingerprint": ""}} if in_place else {}
            gone = {"state": State.DELETED, **again}
            registry.append(series, lambda _: gone, writer=writer)
            raise refusal
    if copies and not copy.is_there():  # gc took what a withdrawn revision had left, before our record
        copy.make()
    return record


def _activate(registry: Registry, record: Record, wanted: Registration, writer: str) -> None:
    try:
        point(
            registry,
            record.key.scope,
            record.name,
            record.revision,
            writer=writer,
            must_be_new=wanted.must_be_new,
        )
    except Conflict:
        if wanted.must_be_new:  # another writer took the name meanwhile: ours was never served
            gone = {"state": State.DELETED}
            registry.append(registry.records(record.key), lambda _: gone, writer=writer)
        raise
    registry.announce()


def _again(
    registry: Registry,
    record: Record,
    wanted: Registration,
    allowed: tuple[str, ...],
    writer: str,
    patience_s: float,
) -> Record:
    """Bytes that are registered: what else is said of them taken over, and active."""
    registry.confirm(registry.records(record.key), record)
    record = _amend(registry, record, wanted, allowed, writer, patience_s)
    if wanted.activate:
        scope, must_be_new = record.key.scope, wanted.must_be_new
        point(registry, scope, record.name, record.revision, writer=writer, must_be_new=must_be_new)
    registry.announce()
    return record


def _allowed(wanted: Registration, expectation: Expectation) -> tuple[str, ...]:
    """The findings that a person allowed, for every replica. What a replica was set to allow is its own."""
    if wanted.origin != "register":
        return ()
    return tuple(sorted(code for code in expectation.allow if code in CODES and CODES[code].overridable))


def _amend(
    registry: Registry,
    record: Record,
    wanted: Registration,
    allowed: tuple[str, ...],
    writer: str,
    patience_s: float,
) -> Record:
    """The same bytes again: take over what else was said of them, if it differs.

    Above a newer generation that is damaged it is written anew, so that all readers agree again.
    """
    said: dict[str, Any] = {}
    if wanted.policy is not None:
        said["policy"] = wanted.policy.model_dump(mode="json")
    if wanted.labels:
        said["labels"] = dict(wanted.labels)
    if allowed:
        said["allowed"] = list(allowed)
    if wanted.fingerprint is not None and record.origin == ADOPTED_IN_PLACE:
        said["fingerprint"] = wanted.fingerprint

    def build(newest: Record | None) -> dict[str, Any] | None:
        if newest is None or not newest.present:
            raise Conflict(f"{record.key} was withdrawn meanwhile: try again")
        spec = newest.spec.model_dump(mode="json")
        return {"spec": {**spec, **said}} if {**spec, **said} != spec else None

    damaged = registry.latest(registry.records(record.key))[0].generation > record.generation
    if not said and not damaged:
        return record
    writes = damaged or build(record) is not None
    admitted = registry.accounts.admitted(record.key, record.spec.size_bytes, wait_s=patience_s)
    with admitted if writes else nullcontext():
        return registry.append(registry.records(record.key), build, writer=writer, announce=False)
