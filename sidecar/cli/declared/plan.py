"""Compares a document with the registry, and returns the differences and the acts that end them. Pure.

Each act is followed by a new plan: a run that was killed anywhere continues from the registry's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_fs.sidecar.cli.declared.documents import OWNER, DocumentSpec, LoraAdapter
from lora_fs.sidecar.model import Pointer, Record, Scope
from lora_fs.sidecar.registry.lifecycle.acts import Act, Promote, Set, Try, Unregister
from lora_fs.sidecar.registry.lifecycle.register_as import RegisterAs
from lora_fs.sidecar.sources.offer import unmarked

Name = tuple[Scope, str]


class Refused(Exception):
    """The document asks for the impossible; ``path`` is its field."""

    def __init__(self, path: tuple[str | int, ...], why: str) -> None:
        super().__init__(why)
        self.path = path


@dataclass(frozen=True, slots=True)
class Registered:
    """The registered state of a name: its present revisions, and its pointer."""

    revisions: Mapping[str, Record] = field(default_factory=dict)
    pointer: Pointer | None = None

    @property
    def serves(self) -> str | None:
        return self.pointer.revision if self.pointer is not None else None

    @property
    def owners(self) -> set[str | None]:
        return {record.spec.labels.get(OWNER) for record in self.revisions.values()}


@dataclass(frozen=True, slots=True)
class Offered:
    """The bytes at the source, as far as known: a digest, or where they come from."""

    uri: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs from the document."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """``register``: before the acts, of which there are more once it is done. ``record``: what is there."""

    differences: tuple[Difference, ...] = ()
    register: RegisterAs | None = None
    acts: tuple[Act, ...] = ()
    record: Record | None = None


def by_name(records: Iterable[Record], pointers: Mapping[Name, Pointer]) -> dict[Name, Registered]:
    """All registered adapters, by name."""
    found: dict[Name, dict[str, Record]] = {}
    for record in records:
        if record.present:
            found.setdefault((record.key.scope, record.name), {})[record.revision] = record
    return {name: Registered(revisions, pointers.get(name)) for name, revisions in found.items()}


def plan(document: LoraAdapter, there: Registered, offered: Offered, owner: str) -> Plan:
    """Compare; raises Refused."""
    _check_owner(there, owner)
    spec = document.spec
    record = _chosen(spec, there, offered)
    if spec.canary is not None:
        _check_canary(document.metadata.name, there, record.revision if record is not None else None)
    if record is None:
        return _new(document, there, owner)
    changed: list[Difference] = []
    acts: list[Act] = []
    said = _policy(spec, record, changed)
    labels = _labels(document.metadata.labels, record, changed)
    if said or labels:
        acts.append(Set.model_validate({"revision": record.revision, **said, "labels": labels}))
    if spec.activates and there.serves != record.revision:
        changed.append(Difference("active", there.serves, record.revision))
        acts.append(Promote(revision=record.revision))
    if spec.canary is not None:
        trial = there.pointer.canary if there.pointer is not None else None
        share = trial.percent if trial is not None else None
        if share != spec.canary:
            changed.append(Difference("canary", share, spec.canary))
            acts.append(Try(revision=record.revision, percent=spec.canary))
    kept = there.pointer.keep_revisions if there.pointer is not None else None
    if spec.keepRevisions not in (None, kept):
        changed.append(Difference("keepRevisions", kept, spec.keepRevisions))
        acts.append(Set(keep_revisions=spec.keepRevisions))
    return Plan(tuple(changed), acts=tuple(acts), record=record)


def _check_canary(name: str, there: Registered, revision: str | None) -> None:
    """Refuse a trial that nobody can begin, before anything is registered. ``revision`` None: a new one."""
    if there.serves in (None, revision):
        raise Refused(("spec", "canary"), f"a canary needs another revision that {name} serves")
    trial = there.pointer.canary if there.pointer is not None else None
    if trial is not None and trial.revision != revision:
        why = f"{trial.revision} is on trial: finish or abort that first"
        raise Refused(("spec", "canary"), why)


def plan_absent(there: Registered, owner: str) -> Plan:
    """What a document asks for that wants a name not to be there; raises Refused."""
    _check_owner(there, owner)
    if not there.revisions:
        return Plan()
    gone = tuple(Difference("revision", revision, None) for revision in sorted(there.revisions))
    return Plan(gone, acts=(Unregister(all_revisions=True),))


def prunable(registered: Mapping[Name, Registered], declared: Collection[Name], owner: str) -> list[Name]:
    """Names of which ``apply`` with this owner registered a revision, and that no document has."""
    return [name for name in sorted(registered) if name not in declared and owner in registered[name].owners]


def _check_owner(there: Registered, owner: str) -> None:
    others = sorted(other for other in there.owners if other not in (None, owner))
    if others:
        told = ", ".join(map(str, others))
        raise Refused(("metadata", "name"), f"it belongs to owner {told}, and this is owner {owner}")


def pin_of(record: Record) -> str | None:
    """The commit or etags that a record names."""
    return unmarked(record.spec.source.pin)


def _chosen(spec: DocumentSpec, there: Registered, offered: Offered) -> Record | None:
    """The revision that the document means: by its name, by its bytes, else by where they came from."""
    if spec.digest is not None and offered.digest not in (None, spec.digest):
        raise Refused(("spec", "digest"), f"the bytes of {spec.source} are {offered.digest}")
    digest = spec.digest or offered.digest

    def meant(record: Record) -> bool:
        if digest is not None and record.spec.digest != digest:
            return False
        if spec.pin is not None and pin_of(record) != spec.pin:
            return False
        return digest is not None or record.spec.source.uri == offered.uri

    if spec.revision is not None:
        record = there.revisions.get(spec.revision)
        if record is not None and not meant(record):
            raise Refused(
                ("spec", "revision"),
                f"{spec.revision} is registered with other bytes ({record.spec.digest}, from "
                f"{record.spec.source.uri}), and a revision never changes: name another one",
            )
        return record
    found = {revision: record for revision, record in there.revisions.items() if meant(record)}
    if there.serves in found:
        return found[there.serves]
    return max(found.values(), key=lambda record: (record.registered_at, record.revision), default=None)


def _new(document: LoraAdapter, there: Registered, owner: str) -> Plan:
    spec = document.spec
    # A fetch brings digest and pin: the plan after it moves the name.
    unchecked = spec.digest is not None or spec.pin is not None
    said = {
        "revision": spec.revision,
        "base_model": spec.model,
        "policy": spec.policy.kind,
        "ttl_s": spec.policy.ttlSeconds,
        "priority": spec.policy.priority,
        "labels": {**(document.metadata.labels or {}), OWNER: owner},
        "amend": False,  # the plan after it changes what the document means, once it is known to mean it
        "activate": spec.activates and not unchecked,
        "allow": tuple(spec.allow),
    }
    changed = [Difference("revision", there.serves, spec.revision or "the next")]
    changed.append(Difference("source", None, spec.source))
    return Plan(tuple(changed), register=RegisterAs.model_validate(said))


def _policy(spec: DocumentSpec, record: Record, changed: list[Difference]) -> dict[str, Any]:
    """What is said of the policy and is not so."""
    now, said = record.spec.policy, dict[str, Any]()
    rows = (
        ("kind", spec.policy.kind, now and now.kind.value, "policy"),
        ("ttlSeconds", spec.policy.ttlSeconds, now and now.ttl_s, "ttl_s"),
        ("priority", spec.policy.priority, now.priority if now is not None else None, "priority"),
    )
    for name, wanted, is_now, argument in rows:
        if wanted is not None and wanted != is_now:
            changed.append(Difference(f"policy.{name}", is_now, getattr(wanted, "value", wanted)))
            said[argument] = wanted
    return said


def _labels(
    wanted: Mapping[str, str] | None, record: Record, changed: list[Difference]
) -> dict[str, str | None]:
    """Labels to set, and as None to take away. Whose it is stays."""
    if wanted is None:
        return {}
    now = {key: text for key, text in record.spec.labels.items() if key != OWNER}
    said = {key: wanted.get(key) for key in sorted({*now, *wanted}) if now.get(key) != wanted.get(key)}
    changed += [Difference(f"labels.{key}", now.get(key), text) for key, text in said.items()]
    return said
