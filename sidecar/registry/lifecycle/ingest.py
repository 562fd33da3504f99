"""The one way into the registry: take a private copy, judge it, place, record, point, announce.

The record holds the validated bytes: this module reads the source once, and validates, hashes and copies each
part. Files that stay where they lie (a dropped folder, ``--link``) must look the same before and after.

It is safe to stop anywhere: bytes before the record, the record before the pointer, HEAD last. A half-done
register is an artifact or an inactive revision, never a name without bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import Conflict, GateNotPassed, Taken, VolumeUnavailable
from lora_fs.sidecar.model import (
    AdapterKey,
    AdapterSpec,
    Origin,
    Pointer,
    Policy,
    Record,
    Scope,
    Source,
    State,
    check_segment,
)
from lora_fs.sidecar.registry.format.ids import int_id
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.amend import said_more, say_again
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.copying import Copy, Held, Judged, is_home, judged
from lora_fs.sidecar.registry.lifecycle.release import active, check_still_there, point, refuse_served
from lora_fs.sidecar.registry.lifecycle.revisions import (
    ADOPTED_IN_PLACE,
    Revisions,
    next_fields,
    next_revision,
    revisions_of,
)
from lora_fs.sidecar.registry.lifecycle.undo import Made, take_back
from lora_fs.sidecar.registry.store import gating
from lora_fs.sidecar.registry.store.quota import WAIT_S
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.validate import Expectation, Report

RACES = 32  # lost in a row before the caller gets an error; each means that another register won


@dataclass(frozen=True, slots=True)
class Registration:
    """What to register.

    Attributes:
        source: a local folder.
        revision: None takes the next ``vN``.
        policy: None takes that of the revision that the name serves.
        amends: registered bytes take over the policy and the labels, and what is allowed.
        again: registered bytes become active, too; False: only where the name serves nothing.
        must_be_new: refuse a name that serves already.
        fingerprint: of ``source`` when it held still: refuse one that looks otherwise after the read.
        resolved: an earlier check resolved the links in ``source``; refuse any new one.
        pin: the commit or etag of ``uri``.
        takes: ``source`` lies in ``.incoming/`` of a registry that a check accepted: move it, do not copy it.
        hashes: the SHA-256 of files as they arrived, by name: refuse any other bytes.
        allows: codes of findings that the record allows; None: all that the expectation allows.
    """

    name: str
    source: Path
    uri: str
    revision: str | None = None
    base_model: str | None = None
    policy: Policy | None = None
    labels: Mapping[str, str] | None = None
    link: bool = False
    amends: bool = True
    activate: bool = True
    again: bool = True
    origin: Origin = "register"
    must_be_new: bool = False
    resolved: bool = False
    fingerprint: str | None = None
    pin: str | None = None
    takes: bool = False
    hashes: Mapping[str, str] = field(default_factory=dict)
    allows: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """The record in force afterwards.

    ``changed``: these bytes were not there. ``amended``: they were, with another policy or labels;
    ``restored``: and files of theirs were lost. ``pointer``: of the name, if this activated the revision.
    """

    record: Record
    changed: bool
    report: Report
    amended: bool = False
    restored: bool = False
    pointer: Pointer | None = None

    @property
    def made(self) -> Made:
        """What it wrote, by which ``undo.take_back`` takes it back."""
        return Made.by(self.record, self.pointer, changed=self.changed)


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
    """Register an adapter. If another writer takes the next ``vN`` first, use the one after it.

    Args:
        patience_s: how long to wait for another writer of a namespace that has a quota.
    Raises:
        OverQuota, TooManyRegistrations, GateNotPassed, InvalidName, InvalidAdapter: it wrote nothing.
        Conflict: other bytes have the revision, or the name serves. NotFound: somebody withdrew it meanwhile.
        TemporaryError: see ``Registry.append``.
    """
    name = check_segment("name", wanted.name)
    if name == scope.model:
        raise Conflict(f"{name!r} is the base model's own name: an adapter needs another one")
    own = (*scope, wanted.revision or wanted.source.parent.name, name)
    home = is_home(wanted.source, registry.layout.root, own)
    if wanted.link or home:
        wanted = replace(wanted, source=atomic.real_path(wanted.source))
    if not wanted.takes:
        registry.check_writable()
    known = revisions_of(registry, scope, name)
    if wanted.must_be_new:
        refuse_served(registry, scope, name)
    called = wanted.uri if wanted.takes else str(wanted.source)
    with ExitStack() as stack:
        source = stack.enter_context(Held.opened(wanted.source, called, follow=not wanted.resolved))
        adopted = wanted.origin == ADOPTED_IN_PLACE
        if adopted or not known.present:  # else these bytes may be there, and nothing grows
            key = AdapterKey(*scope, wanted.revision or "v1", name)
            registry.accounts.check(key, artifacts.size_of_served(source.folder))
        if wanted.fingerprint is not None:
            source.check_whole()
        in_place = wanted.link or adopted or home
        served = known.served  # if the bytes are likely the same, compare first, and copy only if they differ
        likely = served and source.looks_like(registry.layout.resolve(served.spec.path), served)
        stays = dry_run or in_place or wanted.takes or likely
        draft = None if stays else artifacts.new_draft(registry.layout, scope)
        still = wanted.fingerprint or (source.fingerprint if in_place else None)
        look = partial(judged, source, expectation, draft, still=still, progress=progress)
        found = stack.enter_context(look(root=registry.layout.root, namespace=scope.namespace))
        found.check_arrived(wanted.hashes)
        if stays:  # no draft proves that this volume holds the registry that was checked
            registry.check_writable()
        # What a person allowed holds for every replica; what a replica was set to allow is its own.
        allowed = expectation.allowed(wanted.allows) if wanted.origin == "register" else ()
        task = _Task(registry, scope, wanted, found, allowed, writer, patience_s, in_place)
        for _ in range(RACES):
            try:
                return task.dry_run(known) if dry_run else task.write(known)
            except Taken:
                if wanted.revision is not None or not atomic.is_folder(found.draft or wanted.source):
                    raise
            known = revisions_of(registry, scope, name)
    raise Conflict(f"{RACES} revisions of {name} were taken by other writers meanwhile: try again")


@dataclass(frozen=True, slots=True)
class _Task:
    """One registration, after the judgement of its bytes."""

    registry: Registry
    scope: Scope
    wanted: Registration
    judged: Judged
    allowed: tuple[str, ...]
    writer: str
    patience_s: float
    in_place: bool

    def write(self, known: Revisions) -> Registered:
        """Place, record and point; raises Taken where the revision that was free is not any more."""
        same, registry, wanted, restored = self._same(known), self.registry, self.wanted, False
        if same is not None:
            restored, said = self._copy(same.key).restore(same), self._said(same)
            record = say_again(registry, same, *said, writer=self.writer, patience_s=self.patience_s)
        else:
            key, spec, _ = self._new(known)
            record = self._record(key, spec, serves_new=wanted.activate or known.is_routed(key.revision))
        key, changed = record.key, same is None
        amended = same is not None and record.generation != same.generation
        pointer = self._point(record, is_new=changed, again=changed or wanted.again)
        # An undo that did not see this pointer withdrew the record; of a new name nobody else withdraws one.
        if pointer is not None and (known.newest or wanted.origin == "api") and not self._is_registered(key):
            if same is not None or wanted.origin == "api":
                build = partial(self._present, record.spec, key)
                record = registry.append(registry.records(key), build, writer=self.writer)
                pointer = self._point(record, is_new=False, again=False) or pointer
                changed, amended = True, False
            check_still_there(registry, self.scope, key.name, key.revision, writer=self.writer)
        return Registered(record, changed, self.judged.report, amended, restored, pointer)

    def dry_run(self, known: Revisions) -> Registered:
        """Say what ``write`` would do."""
        report, same = self.judged.report, self._same(known)
        if same is not None:
            if self._activates(again=self.wanted.again):
                gating.check(self.registry, same)
            amended = said_more(same, *self._said(same)) is not None
            return Registered(same, False, report, amended, self._copy(same.key).lost(same))
        key, spec, fields = self._new(known)
        accounts, wanted = self.registry.accounts, self.wanted
        gating.check_new(accounts.quota(key.namespace), wanted.name, activates=wanted.activate)
        accounts.check(key, spec.size_bytes)
        unsaid = {"generation": 1, "request_id": "", "token": "", "writer": self.writer, "updated_at": ""}
        return Registered(Record.model_validate({**fields, **key._asdict(), **unsaid}), True, report)

    def _same(self, known: Revisions) -> Record | None:
        digest, revision = self.judged.digest, self.wanted.revision
        found = [one for one in known.present.values() if one.spec.digest == digest]
        same = [one for one in found if revision in (None, one.revision)]
        return known.served if known.served in same else next(iter(same), None)

    def _is_registered(self, key: AdapterKey) -> bool:
        newest = self.registry.latest(self.registry.records(key))[1]
        return newest is not None and newest.present

    def _copy(self, key: AdapterKey) -> Copy:
        return Copy(self.registry, key, self.judged, moved=self.wanted.takes)

    def _new(self, known: Revisions) -> tuple[AdapterKey, AdapterSpec, dict[str, Any]]:
        """The key of a new record, its spec and its fields; raises Taken."""
        registry, scope, wanted = self.registry, self.scope, self.wanted
        files, digest, report = self.judged.files, self.judged.digest, self.judged.report
        assert report.shape is not None  # else it is not valid
        revision = wanted.revision or next_revision(
            registry, scope, wanted.name, known, digest, report.served_files
        )
        key = AdapterKey.checked(*scope, revision, wanted.name)
        known.check_letters(registry, scope, revision)
        spec = AdapterSpec(
            source=Source(uri=wanted.uri, pin=wanted.pin),
            path=str(wanted.source) if wanted.link else f"{scope}/{revision}/{wanted.name}",
            base_model=wanted.base_model or report.base_model or scope.model,
            digest=digest,
            size_bytes=sum(entry.size_bytes for entry in files),
            files=files,
            lora=report.shape,
            int_id=int_id(registry.marker.registry_uuid, key, digest),
            policy=wanted.policy or known.policy,
            labels=dict(wanted.labels or {}),
            fingerprint=wanted.fingerprint if wanted.origin == ADOPTED_IN_PLACE else None,
            allowed=self.allowed,
            signer=self.judged.signer,
        )
        is_new = wanted.revision is None or wanted.origin == ADOPTED_IN_PLACE
        return key, spec, self._present(spec, key, None if is_new else known.newest.get(revision))

    def _present(self, spec: AdapterSpec, key: AdapterKey, newest: Record | None) -> dict[str, Any]:
        """The fields of the next generation of its record; raises Taken."""
        wanted = self.wanted
        unsaid = {field for field in ("policy", "labels") if getattr(wanted, field) is None}
        return next_fields(key, spec, newest, wanted.origin, keep_files=wanted.link, unsaid=unsaid)

    def _record(self, key: AdapterKey, spec: AdapterSpec, *, serves_new: bool) -> Record:
        """The bytes in their place, then the record of them; withdrawn again if it is over the quota."""
        registry, wanted, copy = self.registry, self.wanted, self._copy(key)
        # Another revision's own folder is no place of this one.
        own = wanted.origin == ADOPTED_IN_PLACE or wanted.source.parent.name == key.revision
        place = nullcontext() if self.in_place and (wanted.link or own) else copy.private()
        admitted = partial(gating.admitted, registry, key, spec.size_bytes, wait_s=self.patience_s)
        with place as draft, admitted(serves_new=serves_new) as too_much:
            if draft is not None:
                copy.place(draft, recorded=False)
            build = partial(self._present, spec, key)
            written = partial(registry.append, registry.records(key), writer=self.writer, checked=True)
            record = written(build, announce=not wanted.activate)
            if draft is not None:
                artifacts.unmark(copy.target)
            if (refusal := too_much()) is not None:
                if wanted.origin == ADOPTED_IN_PLACE:
                    again = {**spec.model_dump(mode="json"), "fingerprint": ""}
                    written(lambda _: {"state": State.DELETED, "spec": again})
                else:
                    self._take_back(record)
                raise refusal
            if not wanted.link and not atomic.is_folder(copy.target):  # gc took what a withdrawn one left
                if draft is None or not atomic.is_folder(draft):
                    raise VolumeUnavailable(f"{copy.target} was removed meanwhile: register it again")
                copy.place(draft, recorded=True)
        return record

    def _point(self, record: Record, *, is_new: bool, again: bool) -> Pointer | None:
        """Let the name serve it, and announce the writes. ``again``: also a name that serves."""
        registry, wanted, pointer = self.registry, self.wanted, None
        activates = self._activates(again=again)
        try:
            if activates:
                gating.check(registry, record)
                pointer = point(
                    registry,
                    record,
                    writer=self.writer,
                    must_be_new=wanted.must_be_new,
                    anew=wanted.origin == "api",
                    only_later=wanted.origin == ADOPTED_IN_PLACE,
                    checked=True,
                )
        except (Conflict, GateNotPassed):  # another writer took the name meanwhile, or set a gate
            if wanted.must_be_new and is_new:  # ours never served
                self._take_back(record)
            registry.announce()
            raise
        if activates or not is_new:
            registry.announce()
        return pointer

    def _activates(self, *, again: bool) -> bool:
        before = None if again else active(self.registry, self.scope, self.wanted.name)
        return self.wanted.activate and (before is None or before.revision is None)

    def _take_back(self, record: Record) -> None:
        made = Made.by(record, None, changed=True)
        take_back(self.registry, self.scope, record.name, made, writer=self.writer)

    def _said(self, record: Record) -> tuple[dict[str, Any], Mapping[str, str]]:
        """What a registration of a record's bytes says besides them: fields of its spec, and labels."""
        wanted, said = self.wanted, dict[str, Any]()
        if wanted.policy is not None and wanted.amends:
            said["policy"] = wanted.policy.model_dump(mode="json")
        if self.allowed and wanted.amends:
            said["allowed"] = list(self.allowed)
        if wanted.fingerprint is not None and wanted.origin == record.origin == ADOPTED_IN_PLACE:
            said["fingerprint"] = wanted.fingerprint
        if self.judged.signer is not None:
            said["signer"] = self.judged.signer
        return said, wanted.labels if wanted.labels and wanted.amends else {}
