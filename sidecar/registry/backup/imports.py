"""Importing into a registry: what is to be done, and doing it by the registry's own writes.

Files come before records, records before pointers, HEAD last, so an import that was killed left an
old or a new state of each name, and the same import completes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import Conflict, CorruptRecord
from lora_fs.sidecar.model import AdapterKey, Pointer, Record
from lora_fs.sidecar.registry.backup import merge
from lora_fs.sidecar.registry.backup.archive import Contents
from lora_fs.sidecar.registry.backup.merge import Here, Rule, Step, Verdict
from lora_fs.sidecar.registry.backup.unpack import at_home, place_files
from lora_fs.sidecar.registry.format.ids import int_id
from lora_fs.sidecar.registry.format.layout import Generation, Layout
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.mending import is_whole
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry

ANEW = frozenset(  # what every generation says of itself alone
    {
        "apiVersion",
        "kind",
        "generation",
        "previous",
        "epoch",
        "request_id",
        "token",
        "writer",
        "updated_at",
        "sum",
    }
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What an import does, in the order in which it does it. ``newest``: the records it was made from."""

    records: list[Step]
    pointers: list[Step]
    newest: Mapping[AdapterKey, Record | None]

    @property
    def steps(self) -> list[Step]:
        return [*self.records, *self.pointers]

    def refused(self) -> list[Step]:
        return [step for step in self.steps if step.verdict in merge.REFUSED]


def plan(registry: Registry, contents: Contents, rule: Rule) -> Plan:
    """Compare an export with the registry; nothing is written.

    Raises:
        VolumeUnavailable: what is here cannot be told.
    """
    records, found = [], {}
    for key, archived in contents.records.items():
        newest = found[key] = registry.latest(registry.records(key))[1]
        here = _here(registry, contents, archived, newest)
        own = newest is not None and newest.present and at_home(registry.layout, newest) is newest
        judged = at_home(registry.layout, archived) if own and archived.present else archived
        records.append(merge.judge_record(judged, here, rule))
    coming = {step.what for step in records if step.verdict in merge.WRITTEN}
    pointers = []
    for (scope, name), pointer in contents.pointers.items():
        newest_pointer = registry.latest(registry.pointers(scope, name))[1]
        registered = {}
        if pointer.revision is not None:
            key = AdapterKey(*scope, pointer.revision, name)
            record = registry.latest(registry.records(key))[1]
            there = contents.records.get(key)
            comes = key in coming and there is not None and there.present
            registered[pointer.revision] = comes or (record is not None and record.present)
        descends = _descends(registry, registry.pointers(scope, name), pointer)
        pointers.append(
            merge.judge_pointer(pointer, newest_pointer, descends=descends, registered=registered, rule=rule)
        )
    return Plan(records, pointers, found)


def _here(registry: Registry, contents: Contents, archived: Record, newest: Record | None) -> Here:
    layout, offered = registry.layout, contents.has_files_of(archived)
    descends = _descends(registry, registry.records(archived.key), archived)
    if not archived.present:
        return Here(newest, descends, offered=offered)
    written, whole = _settled(layout, archived)
    if newest is None or not newest.present or newest.spec.digest != archived.spec.digest:
        return Here(newest, descends, whole, offered)
    same_place = newest.spec.path == written.spec.path
    broken = not (whole if same_place else is_whole(layout, newest))
    mendable = broken and (offered or is_whole(layout, at_home(layout, newest)))
    return Here(newest, descends, whole, offered, mendable)


def _descends(registry: Registry, series: Series[Body], archived: Body) -> bool:
    token = archived.token if registry.marker.tier == "lww" else ""
    generation = Generation(archived.generation, token)
    if generation not in registry.generations(series):
        return False
    try:
        return registry.read(series, generation).sum == archived.sum
    except CorruptRecord:
        return False


def _settled(layout: Layout, record: Record) -> tuple[Record, bool]:
    """The record as it is to be here, and whether its files are: a link stays where it has the bytes."""
    if is_whole(layout, record):
        return record, True
    home = at_home(layout, record)
    return home, home is not record and is_whole(layout, home)


def apply(
    registry: Registry,
    file: Path,
    contents: Contents,
    chosen: Plan,
    *,
    writer: str,
    progress: Progress | None = None,
) -> None:
    """Carry out a plan.

    Raises:
        Conflict: it has refusals, or the registry moved on since it was made: nothing of that
            series was written, and the import may be called again.
        TemporaryError: see ``Registry.append``; called again it goes on.
    """
    if chosen.refused():
        raise Conflict("; ".join(f"{step.name}: {step.why}" for step in chosen.refused()))
    layout = registry.layout
    writes = {step.what: step.verdict for step in chosen.steps if step.verdict in merge.WRITTEN}
    homes: dict[AdapterKey, Record] = {}
    wanted: dict[AdapterKey, Record] = {}
    for key, archived in contents.records.items():
        if key in writes and archived.present:
            newest = chosen.newest[key] if writes[key] is Verdict.MEND else None
            homes[key], whole = _settled(layout, at_home(layout, newest) if newest else archived)
            if not whole:
                wanted[key] = homes[key]
    refused = place_files(registry, file, wanted, progress, recorded=False)
    if refused:
        raise Conflict("; ".join(f"{key}: {why}: import again" for key, why in refused.items()))
    for key, archived in contents.records.items():
        before, body = chosen.newest[key], homes.get(key, archived)
        if key in writes and body is not before:  # it is where only its files are mended
            fields = _own(body)
            if before is None or writes[key] is not Verdict.MEND:
                identity = int_id(registry.marker.registry_uuid, key, archived.spec.digest)
                fields |= {"spec": {**fields["spec"], "int_id": identity}}
            fields |= {"uid": before.uid} if before is not None else {}
            _append(registry, registry.records(key), fields, before, writer)
        if key in homes:
            artifacts.unmark(layout.artifact(key))
    for (scope, name), pointer in contents.pointers.items():
        if (scope, name) in writes:
            pointers = registry.pointers(scope, name)
            _append(registry, pointers, _own(pointer), registry.latest(pointers)[1], writer)
    if writes:
        registry.announce()


def _own(body: Record | Pointer) -> dict[str, Any]:
    """What a body says beside its place in its series; fields that are not known are among it."""
    return {name: value for name, value in body.model_dump(mode="json").items() if name not in ANEW}


def _append(
    registry: Registry, series: Series[Body], fields: Mapping[str, Any], before: Body | None, writer: str
) -> None:
    def build(newest: Body | None) -> dict[str, Any]:
        if newest != before:
            raise Conflict(f"{series.name}: another writer changed it meanwhile: import again")
        return dict(fields)

    registry.append(series, build, writer=writer, announce=False)
