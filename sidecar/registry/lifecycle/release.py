"""What people do to registered names: promote, roll back, try a revision on a share, unregister.

Each is a few appends in an order that is safe to stop anywhere, HEAD last. Registering is
``ingest``, changing what is said of a name ``amend``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from lora_fs.sidecar.errors import Conflict, InputError, NotFound
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State, check_segment
from lora_fs.sidecar.registry.format.ids import natural_order
from lora_fs.sidecar.registry.format.layout import Listing
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.store.writer import Registry


def present_revisions(reader: Reader, scope: Scope, name: str, only: str | None = None) -> dict[str, Record]:
    """The registered revisions of a name, read afresh; ``only``: this one alone."""
    chosen = [one for one in reader.revisions(scope) if only in (None, one)]
    known = newest_revisions(reader, scope, name, reader.mentions(scope, name, chosen))
    return {revision: record for revision, record in known.items() if record.present}


def chosen_of(reader: Reader, scope: Scope, name: str, revision: str | None) -> dict[str, Record]:
    """The registered revisions of a name, or the one in question. Raises NotFound: there is none."""
    chosen = present_revisions(reader, scope, name, revision)
    if not chosen and revision is None:
        raise NotFound(f"{name} is not registered in {scope}")
    if not chosen:
        have = ", ".join(sorted(present_revisions(reader, scope, name))) or "none"
        raise NotFound(f"{name} has no revision {revision!r} in {scope} (registered: {have})")
    return chosen


def newest_revisions(
    reader: Reader, scope: Scope, name: str, mentions: Mapping[str, Listing]
) -> dict[str, Record]:
    """The newest good record of each revision that ``mentions`` lists, withdrawn ones too."""
    found = {}
    for revision, listing in mentions.items():
        if name in listing.records:
            series = reader.records(AdapterKey(*scope, revision, name))
            found[revision] = reader.newest(series, listing.records[name])
    return {revision: record for revision, record in found.items() if record is not None}


def active(reader: Reader, scope: Scope, name: str) -> Pointer | None:
    """The pointer of a name, read afresh."""
    return reader.latest(reader.pointers(scope, name))[1]


def refuse_served(reader: Reader, scope: Scope, name: str) -> None:
    """Raise Conflict if a name serves. If it has a record and no pointer, a repeat completes it."""
    pointer = active(reader, scope, name)
    if pointer is not None and pointer.revision is not None:
        raise Conflict(f"The lora adapter '{name}' has already been loaded.")


def promote(
    registry: Registry, scope: Scope, name: str, revision: str, *, writer: str, only_later: bool = False
) -> Pointer:
    """Let the plain name serve ``revision``.

    Args:
        only_later: see ``point``.
    Raises:
        NotFound: nobody registered the revision.
        TemporaryError: see ``Registry.append``.
    """
    record = chosen_of(registry, scope, name, revision)[revision]
    registry.confirm(registry.records(record.key), record)  # else a reader may know the pointer alone
    pointer = point(registry, record, writer=writer, only_later=only_later)
    check_still_there(registry, scope, name, revision, writer=writer)
    registry.announce()
    return pointer


def point(
    registry: Registry,
    record: Record,
    *,
    writer: str,
    must_be_new: bool = False,
    anew: bool = False,
    only_later: bool = False,
    checked: bool = False,
) -> Pointer:
    """Let the plain name serve a revision; announces nothing.

    It writes another writer's pointer to a loaded revision anew. Whoever loaded that over HTTP, and takes it
    back, then sees that somebody else relies on it.

    Args:
        must_be_new: refuse a name that serves another one.
        anew: write the same writer's pointer anew, too.
        only_later: leave a name that serves a later revision, in natural order.
        checked: see ``Registry.append``.
    """
    revision, name = record.revision, record.name

    def build(newest: Pointer | None) -> dict[str, Any] | None:
        if newest is not None and newest.revision == revision:
            return {} if anew or (record.origin == "api" and newest.writer != writer) else None
        before = newest.revision if newest is not None else None
        if must_be_new and before is not None:
            raise Conflict(f"The lora adapter '{name}' has already been loaded.")
        if only_later and before is not None and natural_order(before) >= natural_order(revision):
            return None
        return {"revision": revision, "previous_revision": before, "canary": None}

    pointers = registry.pointers(record.key.scope, name)
    return registry.append(pointers, build, writer=writer, announce=False, checked=checked)


def rollback(
    registry: Registry, scope: Scope, name: str, revision: str | None = None, *, writer: str
) -> Pointer:
    """Let the plain name serve the revision it served before.

    Args:
        revision: only to this one; nothing changes if the name serves it already.
    Raises:
        NotFound: the name is not active, or the revision not registered; InputError: nothing to go back to.
        Conflict: it served another revision before.
    """
    pointer = active(registry, scope, name)
    if pointer is None or pointer.revision is None:
        raise NotFound(f"{name} is not registered in {scope}")
    if revision is not None and revision == pointer.revision:
        return pointer
    if pointer.previous_revision is None:
        raise InputError(f"{name} serves {pointer.revision} and served nothing before it")
    if revision not in (None, pointer.previous_revision):
        chosen_of(registry, scope, name, revision)
        raise Conflict(
            f"{name} served {pointer.previous_revision} before {pointer.revision}, not {revision}: "
            f"`lora-fs promote {name}@{revision}` serves that"
        )
    return promote(registry, scope, name, pointer.previous_revision, writer=writer)


def set_canary(
    registry: Registry, scope: Scope, name: str, revision: str | None, percent: int | None, *, writer: str
) -> Pointer:
    """Let another revision answer a share of the requests for the plain name, or change that share.

    Args:
        revision: None: the current canary. percent: None: unchanged; at first 0.
    Raises:
        NotFound: nothing serves the name, the revision is not registered, or the name has no canary.
        InputError: the name serves that revision. Conflict: another one is the canary.
    """
    if revision is not None:
        record = chosen_of(registry, scope, name, revision)[revision]
        registry.confirm(registry.records(record.key), record)

    def build(newest: Pointer | None) -> dict[str, Any] | None:
        serving, current = _serving(newest, scope, name), newest.canary if newest is not None else None
        if revision is None and current is None:
            raise NotFound(f"{name} has no canary in {scope}: say which revision to try")
        if revision == serving:
            raise InputError(f"{name} serves {revision} already: a canary is another revision")
        if current is not None and revision not in (None, current.revision):
            raise Conflict(
                f"{current.revision} answers {current.percent} % of the requests for {name} already: "
                "finish or abort that first"
            )
        before = current.model_dump(mode="json") if current is not None else {"percent": 0}
        after = before | {"revision": revision or before["revision"]}
        after |= {} if percent is None else {"percent": percent}
        return None if after == before else {"canary": after}

    pointer = registry.append(registry.pointers(scope, name), build, writer=writer, announce=False)
    if revision is not None:
        check_still_there(registry, scope, name, revision, writer=writer)
    registry.announce()
    return pointer


def end_canary(registry: Registry, scope: Scope, name: str, *, finish: bool, writer: str) -> Pointer:
    """End a trial: the revision serves the plain name from now on, or answers nothing more.

    Raises:
        NotFound: nothing serves the name, or it has no canary, or somebody withdrew that.
    """

    def build(newest: Pointer | None) -> dict[str, Any]:
        serving, current = _serving(newest, scope, name), newest.canary if newest is not None else None
        if current is None:
            raise NotFound(f"{name} has no canary in {scope}")
        if not finish:
            return {"canary": None}
        chosen_of(registry, scope, name, current.revision)
        return {"revision": current.revision, "previous_revision": serving, "canary": None}

    return registry.append(registry.pointers(scope, name), build, writer=writer)


def check_still_there(registry: Registry, scope: Scope, name: str, revision: str, *, writer: str) -> None:
    """Raise NotFound if somebody withdrew a revision before its name got it; the name serves what it did."""
    if _let_go(registry, scope, name, (revision,), writer=writer):
        registry.announce()
        raise NotFound(f"{name} has no revision {revision!r} in {scope}: somebody withdrew it meanwhile")


def _let_go(registry: Registry, scope: Scope, name: str, gone: Collection[str], *, writer: str) -> bool:
    """Let a name that serves one of these withdrawn revisions serve the one before it, or try it no more.

    A promotion and a withdrawal at the same time do not see each other's look. Each calls this after its
    write, so the later one sees both. Returns whether the name moved.
    """

    def is_withdrawn(revision: str | None) -> bool:
        if revision is None or revision not in gone:
            return False
        record = registry.latest(registry.records(AdapterKey(*scope, revision, name)))[1]
        return record is not None and not record.present

    def build(newest: Pointer | None) -> dict[str, Any] | None:
        if newest is not None and is_withdrawn(newest.revision):
            before, present = newest.previous_revision, present_revisions(registry, scope, name)
            return {
                "revision": before if before in present else None,
                "previous_revision": None,
                "canary": None,
            }
        tried = newest.canary.revision if newest is not None and newest.canary is not None else None
        return {"canary": None} if is_withdrawn(tried) else None

    moves = build(active(registry, scope, name)) is not None
    if moves:
        registry.append(registry.pointers(scope, name), build, writer=writer, announce=False)
    return moves


def _serving(pointer: Pointer | None, scope: Scope, name: str) -> str:
    if pointer is None or pointer.revision is None:
        raise NotFound(f"{name} serves nothing in {scope}: promote a revision first")
    return pointer.revision


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
        taken_away: its dropped folder is gone: a replica adopts one that comes, even the same.
    Raises:
        NotFound: nobody registered that name.
        InputError: several revisions, and no choice.
        FormatTooNew: a newer lora-fs wrote one of them last; nothing changed.
    """
    check_segment("name", name)
    chosen = chosen_of(registry, scope, name, revision)
    if not all_revisions and len(chosen) > 1:
        have = ", ".join(sorted(chosen))
        raise InputError(f"{name} has {len(chosen)} revisions ({have}): say --revision or --all-revisions")
    for one in chosen:
        registry.check_changeable(registry.records(AdapterKey(*scope, one, name)))

    def withdraw(newest: Pointer | None) -> dict[str, Any] | None:
        if newest is None or newest.revision in chosen:
            return {"revision": None, "previous_revision": None, "canary": None}
        if newest.canary is not None and newest.canary.revision in chosen:
            return {"canary": None}
        return None  # promoted to another revision meanwhile

    pointer = active(registry, scope, name)
    if pointer is not None and withdraw(pointer) is not None:
        registry.append(registry.pointers(scope, name), withdraw, writer=writer, announce=False)
    tombstones = []
    for one, record in sorted(chosen.items()):
        series = registry.records(AdapterKey(*scope, one, name))
        keep = keep_files or record.keep_files
        change = partial(_tombstone, keep_files=keep, taken_away=taken_away)
        tombstones.append(registry.append(series, change, writer=writer, announce=False))
    _let_go(registry, scope, name, chosen, writer=writer)
    registry.announce()
    return tombstones


def _tombstone(newest: Record | None, *, keep_files: bool, taken_away: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"state": State.DELETED, "keep_files": keep_files}
    if taken_away and newest is not None:
        fields["spec"] = {**newest.spec.model_dump(mode="json"), "fingerprint": ""}
    return fields
