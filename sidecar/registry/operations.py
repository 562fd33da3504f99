"""What people do to registered names: promote, roll back, unregister.

Each is a few appends in an order that is safe to stop anywhere, HEAD last. Registering is
``registration``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lora_fs.sidecar.errors import Conflict, InputError, NotFound
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State, check_segment
from lora_fs.sidecar.registry.store import Registry


def present_revisions(registry: Registry, scope: Scope, name: str) -> dict[str, Record]:
    """The revisions of a name that are registered, read afresh."""
    found = {}
    for revision, listing in registry.mentions(scope, name).items():
        if name in listing.records:
            _, record = registry.latest(registry.records(AdapterKey(*scope, revision, name)))
            if record is not None and record.present:
                found[revision] = record
    return found


def active(registry: Registry, scope: Scope, name: str) -> Pointer | None:
    """The pointer of a name, read afresh."""
    return registry.latest(registry.pointers(scope, name))[1]


def promote(
    registry: Registry,
    scope: Scope,
    name: str,
    revision: str,
    *,
    writer: str,
) -> Pointer:
    """Let the plain name serve ``revision``.

    Raises:
        NotFound: the revision is not registered.
        TemporaryError: see ``Registry.append``.
    """
    known = present_revisions(registry, scope, name)
    if revision not in known:
        have = ", ".join(sorted(known)) or "none"
        raise NotFound(f"{name} has no revision {revision!r} in {scope} (registered: {have})")
    pointer = point(registry, scope, name, revision, writer=writer)
    registry.announce()
    return pointer


def point(
    registry: Registry,
    scope: Scope,
    name: str,
    revision: str,
    *,
    writer: str,
    must_be_new: bool = False,
) -> Pointer:
    def build(newest: Pointer | None) -> dict[str, Any] | None:
        if newest is not None and newest.revision == revision:
            return None
        before = newest.revision if newest is not None else None
        if must_be_new and before is not None:
            raise Conflict(f"The lora adapter '{name}' has already been loaded.")
        return {"revision": revision, "previous_revision": before, "canary": None}

    return registry.append(registry.pointers(scope, name), build, writer=writer, announce=False)


def rollback(registry: Registry, scope: Scope, name: str, *, writer: str) -> Pointer:
    """Let the plain name serve the revision it served before.

    Raises:
        NotFound: the name is not active; InputError: nothing to go back to.
    """
    pointer = active(registry, scope, name)
    if pointer is None or pointer.revision is None:
        raise NotFound(f"{name} is not registered in {scope}")
    if pointer.previous_revision is None:
        raise InputError(f"{name} serves {pointer.revision} and served nothing before it")
    return promote(registry, scope, name, pointer.previous_revision, writer=writer)


def unregister(
    registry: Registry,
    scope: Scope,
    name: str,
    *,
    writer: str,
    revision: str | None = None,
    all_revisions: bool = False,
    keep_files: bool = False,
    taken_away: bool = False,
) -> list[Record]:
    """Withdraw a revision, or a name with all it has; returns the tombstones.

    Args:
        keep_files: leave them to their owner: gc does not remove them.
        taken_away: its dropped folder is gone: one that comes is adopted, were it the same.
    Raises:
        NotFound: nothing of that name is registered.
        InputError: several revisions, and none was chosen.
    """
    check_segment("name", name)
    known = present_revisions(registry, scope, name)
    if not known or (revision is not None and revision not in known):
        what = f"revision {revision!r} of {name}" if revision else name
        raise NotFound(f"{what} is not registered in {scope}")
    if revision is None and not all_revisions and len(known) > 1:
        have = ", ".join(sorted(known))
        raise InputError(f"{name} has {len(known)} revisions ({have}): say --revision or --all-revisions")
    chosen = [revision] if revision is not None else sorted(known)

    def withdraw(newest: Pointer | None) -> dict[str, Any] | None:
        if newest is not None and newest.revision not in chosen:
            return None  # promoted to another revision meanwhile
        return {"revision": None, "previous_revision": None, "canary": None}

    pointer = active(registry, scope, name)
    if pointer is not None and pointer.revision in chosen:
        registry.append(registry.pointers(scope, name), withdraw, writer=writer, announce=False)
    tombstones = []
    for chosen_revision in chosen:
        keep = keep_files or known[chosen_revision].keep_files
        series = registry.records(AdapterKey(*scope, chosen_revision, name))
        change = partial(_tombstone, keep_files=keep, taken_away=taken_away)
        tombstones.append(registry.append(series, change, writer=writer, announce=False))
    registry.announce()
    return tombstones


def _tombstone(newest: Record | None, *, keep_files: bool, taken_away: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"state": State.DELETED, "keep_files": keep_files}
    if taken_away and newest is not None:
        fields["spec"] = {**newest.spec.model_dump(mode="json"), "fingerprint": ""}
    return fields
