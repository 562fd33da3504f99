"""To register: what is checked, copied, recorded and made active, in that order.

It is safe to stop anywhere: bytes before the record, the record before the pointer, HEAD
last. A half-done register is an artifact or an inactive revision that nobody asked for,
never a name without bytes.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import Conflict, InvalidAdapter, LoraFsError, VolumeUnavailable
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
from lora_fs.sidecar.registry import artifacts, atomic
from lora_fs.sidecar.registry.artifacts import Progress
from lora_fs.sidecar.registry.operations import point, present_revisions
from lora_fs.sidecar.registry.quota import WAIT_S
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.validate import Expectation, Report, validate

ADOPTED_IN_PLACE = "folder"


@dataclass(frozen=True, slots=True)
class Registration:
    """What to register. ``source`` is a local folder; ``revision`` None takes the next ``vN``."""

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
    must_be_new: bool = False  # refuse a name that is served already
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """The record in force afterwards.

    ``changed`` is False if these bytes were there already; ``amended`` if then their policy or
    labels are new.
    """

    record: Record
    changed: bool
    report: Report
    amended: bool = False


def int_id(registry_uuid: str, key: AdapterKey, digest: str) -> int:
    """The engine's id: 63 bits over registry, identity and bytes, the same whoever computes it."""
    data = f"{registry_uuid}|{key}|{digest}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1 or 1


def _next_revision(registry: Registry, scope: Scope, name: str, digest: str, report: Report) -> str:
    """The one whose bytes lie there unrecorded, as a killed register leaves them; else the next."""
    mentions = registry.mentions(scope, name)
    for revision, listing in mentions.items():
        key = AdapterKey(*scope, revision, name)
        if name in listing.folders and (name not in listing.records or _no_good_record(registry, key)):
            folder = registry.layout.artifact(key)
            with suppress(LoraFsError):  # other files than ours
                if artifacts.digest_of(artifacts.hash_files(folder, report.served_files)) == digest:
                    return revision
    taken = [int(match[1]) for revision in mentions if (match := re.fullmatch(r"v([0-9]{1,9})", revision))]
    return f"v{max(taken, default=0) + 1}"


def _no_good_record(registry: Registry, key: AdapterKey) -> bool:
    """Whether none can be read, as where link() is missing and its writer was killed over it."""
    return registry.latest(registry.records(key))[1] is None


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
    """Validate, copy, record, activate.

    Args:
        patience_s: how long to wait for another writer of a namespace that has a quota.
    Raises:
        OverQuota, TooManyRegistrations: the namespace's quota does not allow it; nothing was written.
        InvalidName, InvalidAdapter: nothing was written.
        Conflict: the revision exists with other bytes, or the name is served already.
        TemporaryError: see ``Registry.append``.
    """
    name = check_segment("name", wanted.name)
    if name == scope.model:
        raise Conflict(f"{name!r} is the base model's own name: an adapter needs another one")
    report = validate(wanted.source, expectation, progress=progress)
    if not report.ok or report.shape is None:
        raise InvalidAdapter(str(wanted.source), report.errors)
    registry.check_writable()
    existing = present_revisions(registry, scope, name)
    if wanted.must_be_new and existing:
        raise Conflict(f"The lora adapter '{name}' has already been loaded.")
    files = artifacts.hash_files(wanted.source, report.served_files, progress)
    digest = artifacts.digest_of(files)
    if wanted.fingerprint not in (None, artifacts.fingerprint(wanted.source)):
        raise VolumeUnavailable(f"{wanted.source} changed while it was read: it is looked at again")
    for record in existing.values():
        if record.spec.digest == digest and wanted.revision in (None, record.revision):
            if not dry_run:
                if _lost_its_copy(registry, record):
                    _place_copy(registry, record.key, wanted, report, digest, progress)
                registry.confirm(registry.records(record.key))
                there, record = record, _amend(registry, record, wanted, writer, patience_s)
                if wanted.activate:
                    point(registry, scope, name, record.revision, writer=writer)
                registry.announce()
                return Registered(record, False, report, amended=record.generation != there.generation)
            return Registered(record, False, report)
    revision = wanted.revision or _next_revision(registry, scope, name, digest, report)
    key = AdapterKey.checked(*scope, revision, name)
    path = str(wanted.source.resolve()) if wanted.link else f"{scope}/{revision}/{name}"
    spec = AdapterSpec(
        source=Source(uri=wanted.uri),
        path=path,
        base_model=wanted.base_model or report.base_model or scope.model,
        digest=digest,
        size_bytes=sum(entry.size_bytes for entry in files),
        files=files,
        lora=report.shape,
        int_id=int_id(registry.marker.registry_uuid, key, digest),
        policy=wanted.policy,
        labels=dict(wanted.labels or {}),
        fingerprint=wanted.fingerprint,
    )

    in_place = wanted.origin == ADOPTED_IN_PLACE

    def build(newest: Record | None) -> dict[str, Any]:
        if newest is not None and newest.spec.digest != digest and not in_place:
            raise Conflict(
                f"revision {revision} of {name} exists with other bytes "
                f"({newest.spec.digest[:19]}…): revisions never change; register a new one"
            )
        return {
            "revision": revision,
            "uid": newest.uid if newest is not None else secrets.token_hex(16),
            "state": State.PRESENT,
            "origin": wanted.origin,
            "keep_files": wanted.link,
            "spec": spec.model_dump(mode="json"),
        }

    # Asked before bytes are copied, which would else lie where those of the revision belong.
    draft_fields = build(None if wanted.revision is None or in_place else _newest(registry, key))
    registry.accounts.check(key, spec.size_bytes)
    if dry_run:
        draft = {
            **draft_fields,
            **{"namespace": scope.namespace, "model": scope.model, "name": name},
            **{"generation": 1, "request_id": "", "token": "", "writer": writer, "updated_at": ""},
        }
        return Registered(Record.model_validate(draft), True, report)
    target = registry.layout.artifact(key)
    # Built on the root, since to resolve the target would look up a name that is not there yet.
    lies_at = registry.layout.root.resolve() / path
    copies = not wanted.link and wanted.source.resolve() != lies_at
    copying = _copied(registry, key, wanted, report, digest, progress) if copies else nullcontext()
    admitted = registry.accounts.admitted(key, spec.size_bytes, wait_s=patience_s)
    with copying as incoming, admitted as too_much:
        if incoming is not None:
            _place(registry, key, incoming, report, digest)
        record = registry.append(registry.records(key), build, writer=writer, announce=not wanted.activate)
        refusal = too_much()
        if refusal is not None:
            again = {"spec": {**spec.model_dump(mode="json"), "fingerprint": ""}} if in_place else {}
            gone = {"state": State.DELETED, **again}
            registry.append(registry.records(key), lambda _: gone, writer=writer)
            raise refusal
    if copies and not atomic.is_folder(
        target
    ):  # gc took what a withdrawn revision had left, before our record
        _place_copy(registry, key, wanted, report, digest, progress)
    if wanted.activate:
        try:
            point(registry, scope, name, revision, writer=writer, must_be_new=wanted.must_be_new)
        except Conflict:
            if wanted.must_be_new:  # another writer took the name meanwhile: ours was never served
                gone = {"state": State.DELETED}
                registry.append(registry.records(key), lambda _: gone, writer=writer)
            raise
        registry.announce()
    return Registered(record, True, report)


def _newest(registry: Registry, key: AdapterKey) -> Record | None:
    """The newest record, without looking up a folder that is not there."""
    listing = registry.mentions(key.scope, key.name).get(key.revision)
    if listing is None or key.name not in listing.records:
        return None
    return registry.latest(registry.records(key))[1]


def _lost_its_copy(registry: Registry, record: Record) -> bool:
    artifact = registry.layout.artifact(record.key)
    return registry.layout.resolve(record.spec.path) == artifact and not atomic.is_folder(artifact)


def _amend(
    registry: Registry, record: Record, wanted: Registration, writer: str, patience_s: float
) -> Record:
    """The same bytes again: take over what else was said of them, if it differs.

    Above a newer generation that is damaged it is written anew, so that all readers agree again.
    """
    said: dict[str, Any] = {}
    if wanted.policy is not None:
        said["policy"] = wanted.policy.model_dump(mode="json")
    if wanted.labels:
        said["labels"] = dict(wanted.labels)
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


def _place_copy(
    registry: Registry,
    key: AdapterKey,
    wanted: Registration,
    report: Report,
    digest: str,
    progress: Progress | None,
) -> None:
    with _copied(registry, key, wanted, report, digest, progress) as incoming:
        _place(registry, key, incoming, report, digest)


@contextmanager
def _copied(
    registry: Registry,
    key: AdapterKey,
    wanted: Registration,
    report: Report,
    digest: str,
    progress: Progress | None,
) -> Iterator[Path]:
    """The served files under a temporary name, for as long as the block lasts."""
    incoming = artifacts.temporary_in(registry.layout.incoming(key.scope))
    try:
        copied = artifacts.copy_files(wanted.source, incoming, report.served_files, progress)
        if artifacts.digest_of(copied) != digest:
            raise Conflict(f"{wanted.source} changed while it was copied: try again")
        yield incoming
    finally:
        artifacts.discard(incoming)


def _place(registry: Registry, key: AdapterKey, incoming: Path, report: Report, digest: str) -> None:
    target = registry.layout.artifact(key)
    if not artifacts.place(incoming, target):
        there = artifacts.hash_files(target, report.served_files)
        if artifacts.digest_of(there) != digest:
            raise Conflict(f"{target} holds other bytes: revisions never change; register a new one")
