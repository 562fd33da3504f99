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
from lora_fs.sidecar.registry import artifacts, atomic, merge
from lora_fs.sidecar.registry.archive import Contents
from lora_fs.sidecar.registry.artifacts import Progress
from lora_fs.sidecar.registry.layout import Generation, Layout
from lora_fs.sidecar.registry.merge import Here, Rule, Step, Verdict
from lora_fs.sidecar.registry.reading import Body, Series
from lora_fs.sidecar.registry.registration import int_id
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.unpack import is_whole, place_files

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
    """What an import does, in the order in which it does it."""

    records: list[Step]
    pointers: list[Step]

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
    records = []
    for key, archived in contents.records.items():
        newest = registry.latest(registry.records(key))[1]
        here = Here(
            newest,
            _descends(registry, registry.records(key), archived),
            archived.present and is_whole(registry.layout, _at_home(registry.layout, archived)),
            contents.has_files_of(archived),
        )
        records.append(merge.judge_record(archived, here, rule))
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
    return Plan(records, pointers)


def _descends(registry: Registry, series: Series[Body], archived: Body) -> bool:
    token = archived.token if registry.marker.tier == "lww" else ""
    generation = Generation(archived.generation, token)
    if generation not in registry.generations(series):
        return False
    try:
        return registry.read(series, generation).sum == archived.sum
    except CorruptRecord:
        return False


def _at_home(layout: Layout, record: Record) -> Record:
    """The record as it is to be here: a linked one keeps its path where that is there."""
    if layout.resolve(record.spec.path) == layout.artifact(record.key) or atomic.is_folder(
        layout.resolve(record.spec.path)
    ):
        return record
    spec = record.spec.model_copy(update={"path": str(record.key)})
    return record.model_copy(update={"spec": spec, "keep_files": False})


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
    homes = {
        key: _at_home(layout, record)
        for key, record in contents.records.items()
        if key in writes and record.present
    }
    wanted = {key: record for key, record in homes.items() if not is_whole(layout, record)}
    place_files(layout, file, wanted, progress, recorded=False)
    for key, archived in contents.records.items():
        if key in writes and writes[key] is not Verdict.MEND:
            series = registry.records(key)
            before = registry.latest(series)[1]
            identity = int_id(registry.marker.registry_uuid, key, archived.spec.digest)
            fields = _own(homes.get(key, archived))
            fields |= {"spec": {**fields["spec"], "int_id": identity}}
            fields |= {"uid": before.uid} if before is not None else {}
            _append(registry, series, fields, before, writer)
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
