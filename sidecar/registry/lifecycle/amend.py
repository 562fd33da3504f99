"""Changes a registered name's policy, labels, or number of kept revisions.

Each change is a new generation that takes over all the rest, unknown fields included. It leaves the bytes
alone. A revision that another writer withdraws meanwhile stays withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_fs.sidecar.errors import Conflict, InputError, NotFound, Taken
from lora_fs.sidecar.model import AdapterKey, AdapterSpec, JsonObject, Pointer, Policy, Record, Scope
from lora_fs.sidecar.registry.lifecycle.release import active, chosen_of
from lora_fs.sidecar.registry.store.writer import Registry

Change = Callable[[Record], JsonObject]  # from a record to the fields of its spec that are said anew, as JSON


def over(before: Mapping[str, Any], said: Mapping[str, Any]) -> JsonObject:
    """What is said now, and of what was there before the fields that nobody here knows.

    A mapping of free names, as labels are, is said whole.
    """
    merged = {**before, **said}
    for name, value in said.items():
        earlier = before.get(name)
        if isinstance(value, dict) and isinstance(earlier, dict) and name != "labels":
            merged[name] = over(earlier, value)
    return merged


def with_policy(default: Policy, said: Mapping[str, Any]) -> Change:
    """Set some of a policy's fields; ``default`` is where a record without one begins."""

    def change(record: Record) -> JsonObject:
        begins = (record.spec.policy or default).model_dump(mode="json")
        return {"policy": Policy.model_validate({**begins, **said}).model_dump(mode="json")}

    return change


def without_policy(record: Record) -> JsonObject:
    """Let each sidecar's own default be the policy."""
    return {"policy": None}


def with_labels(said: Mapping[str, str | None]) -> Change:
    """Set some labels, and take away those that are None."""

    def change(record: Record) -> JsonObject:
        labels = {**record.spec.labels, **said}
        return {"labels": {name: text for name, text in labels.items() if text is not None}}

    return change


def amend(
    registry: Registry,
    scope: Scope,
    name: str,
    changes: Sequence[Change],
    *,
    writer: str,
    revision: str | None = None,
    expect: int | None = None,
) -> list[Record]:
    """Change a revision's spec, or that of every registered revision; returns their records.

    Args:
        changes: one after the other.
        revision: None: all of them, so that a promotion changes none of these settings.
        expect: the generation the caller saw, of one revision. Refuse the change if another is in force.
    Raises:
        NotFound: no such revision is registered. InputError: ``expect`` is set, and several revisions match.
        Conflict: somebody withdrew it meanwhile, or another generation is in force.
        TemporaryError: see ``Registry.append``; the same call continues.
    """
    chosen = sorted(chosen_of(registry, scope, name, revision))
    if expect is not None and len(chosen) > 1:
        raise InputError(f"{name} has {len(chosen)} revisions: say of which one the generation is expected")

    def build(newest: Record | None) -> dict[str, Any] | None:
        if newest is None or not newest.present:
            raise Conflict(f"{name} was withdrawn meanwhile: try again")
        changed = newest
        for change in changes:
            spec = {**changed.spec.model_dump(mode="json"), **change(changed)}
            changed = changed.model_copy(update={"spec": AdapterSpec.model_validate(spec)})
        return None if changed == newest else {"spec": changed.spec.model_dump(mode="json")}

    done = []
    for one in chosen:
        series = registry.records(AdapterKey(*scope, one, name))
        done.append(registry.append(series, build, writer=writer, expect=expect, announce=False))
    registry.announce()
    return done


def unpin(
    registry: Registry, scope: Scope, name: str, *, writer: str, revision: str | None = None
) -> list[Record]:
    """Give pinned revisions, or one, the policy back that they had before; raises as ``amend`` does."""

    def change(record: Record) -> JsonObject:
        return {"policy": record.spec.model_dump(mode="json")["unpinned"]} if record.spec.is_pinned else {}

    return amend(registry, scope, name, [change], writer=writer, revision=revision)


def keep_revisions(registry: Registry, scope: Scope, name: str, count: int | None, *, writer: str) -> Pointer:
    """Say how many revisions of a name gc keeps registered; None: as the namespace says.

    Raises:
        NotFound: the name has no pointer: it never served.
    """
    if active(registry, scope, name) is None:
        raise NotFound(f"{name} serves nothing in {scope}: promote a revision first")

    def build(newest: Pointer | None) -> dict[str, Any] | None:
        same = newest is not None and newest.keep_revisions == count
        return None if same else {"keep_revisions": count}

    return registry.append(registry.pointers(scope, name), build, writer=writer)


def said_more(record: Record, said: JsonObject, labels: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what ``say_again`` changes of a record; None: nothing."""
    spec = record.spec.model_dump(mode="json")
    changed = {**spec, **said, "labels": {**spec["labels"], **labels}}
    return {"spec": changed} if changed != spec else None


def say_again(
    registry: Registry,
    record: Record,
    said: JsonObject,
    labels: Mapping[str, str],
    *,
    writer: str,
    patience_s: float,
) -> Record:
    """Take over the policy and labels of a repeated registration, if they differ; labels are added.

    Above a damaged newer generation it writes the record anew, so that all readers agree again.

    Args:
        patience_s: how long to wait for another writer of a namespace that has a quota.
    Raises:
        Conflict: somebody withdrew it meanwhile; Taken: and the registration says nothing of it.
        TemporaryError: see ``Registry.append``.
    """
    series = registry.records(record.key)
    registry.confirm(series, record)

    def build(newest: Record | None) -> dict[str, Any] | None:
        if newest is None or not newest.present:
            refused = Conflict if said or labels else Taken
            raise refused(f"{record.key} was withdrawn meanwhile: try again")
        return said_more(newest, said, labels)

    damaged = registry.latest(series)[0].generation > record.generation
    if not said and not labels and not damaged:
        return record
    writes = damaged or build(record) is not None
    quota = registry.accounts.quota(record.namespace) if writes else None
    with registry.accounts.admitted(quota, record.key, record.spec.size_bytes, wait_s=patience_s):
        return registry.append(series, build, writer=writer, announce=False, checked=True)
