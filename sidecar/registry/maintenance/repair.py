"""Mending what ``fsck`` found, by the registry's own writes. It removes nothing that names an adapter.

Each mend looks again, and leaves a finding alone that has changed. It reports what it could not mend with the
reason, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lora_fs.sidecar.errors import Conflict, LoraFsError
from lora_fs.sidecar.model import Pointer, Record
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.ids import new_ids
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.lifecycle.mending import is_whole, mend_files
from lora_fs.sidecar.registry.maintenance.fsck import Finding, Kind
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.maintenance.survey import State, series_of
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation


def mend(
    registry: Registry, state: State, findings: Iterable[Finding], expectation: Expectation, *, writer: str
) -> Iterator[tuple[Finding, str | None]]:
    """Mend what can be; yields each finding with None, or with why it is still there.

    Args:
        state: what ``survey.look`` read, from which the findings came.
        expectation: what an unregistered folder must satisfy before its adoption.
    """
    for finding in findings:
        if not finding.mend:
            yield finding, "it takes a person"
            continue
        try:
            yield finding, _mend(registry, state, finding, expectation, writer)
        except (LoraFsError, ValueError) as error:  # a source that other software wrote may be no path
            yield finding, str(error)


def _mend(
    registry: Registry, state: State, finding: Finding, expectation: Expectation, writer: str
) -> str | None:
    if finding.garbage is not None:
        registry.check_writable()
        for error in collect([finding.garbage]).values():
            raise error
        return None
    if finding.kind is Kind.HEAD:
        registry.check_writable()
        registry.announce()
        return None
    key = finding.key
    assert key is not None  # all other mends are an adapter's
    if finding.kind in (Kind.NO_FILES, Kind.BAD_FILES):
        return _bring_files(registry, state, state.records[key])
    if finding.kind is Kind.NO_RECORD:
        return Adopter(registry, expectation, settle_s=0.0, writer=writer).adopt(key)
    held, fields = state.records.get(key) or state.pointers[key], dict[str, Any]()
    if finding.kind is Kind.SAME_ID:
        fresh = new_ids(state.records, registry.marker.registry_uuid)[key]
        fields["spec"] = {**state.records[key].spec.model_dump(mode="json"), "int_id": fresh}

    def build(newest: Record | Pointer | None) -> dict[str, Any]:
        if newest != held:
            raise Conflict(f"{key} was written meanwhile: run it again")
        return fields

    registry.append(series_of(registry, key), build, writer=writer)
    return None


def _bring_files(registry: Registry, state: State, record: Record) -> str | None:
    layout = registry.layout
    folder = next(_elsewhere(layout, state, record), None)
    if folder is None:
        return "the same bytes lie nowhere else: import an export that has them, or unregister it"
    make_folder(layout.artifact(record.key), root=layout.root)
    mend_files(layout, folder, record)
    return None


def _elsewhere(layout: Layout, state: State, record: Record) -> Iterator[Path]:
    """Whole copies of a record's files: other revisions' with the same digest, and its source."""
    for key, other in state.records.items():
        if other.present and key != record.key and other.spec.digest == record.spec.digest:
            with suppress(LoraFsError):
                if is_whole(layout, other):
                    yield layout.resolve(other.spec.path)
    source = urlsplit(record.spec.source.uri)
    if source.scheme == "file" and source.netloc in ("", "localhost"):
        folder = Path(unquote(source.path))
        with suppress(LoraFsError):
            if folder != layout.artifact(record.key) and is_whole(layout, record, folder):
                yield folder
