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
from lora_fs.sidecar.model import AdapterKey, Pointer, Record
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.ids import new_ids
from lora_fs.sidecar.registry.lifecycle.mending import is_whole, mend_files
from lora_fs.sidecar.registry.maintenance.fsck import Finding, Kind
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.maintenance.survey import State, series_of
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation


class Mender:
    """Mends one registry's findings.

    Args:
        state: what ``survey.look`` read, from which the findings came.
        expectation: what an unregistered folder must satisfy before its adoption.
    """

    def __init__(self, registry: Registry, state: State, expectation: Expectation, *, writer: str) -> None:
        self._registry, self._state = registry, state
        self._expectation, self._writer = expectation, writer

    def mend(self, findings: Iterable[Finding]) -> Iterator[tuple[Finding, str | None]]:
        """Mend what can be; yields each finding with None, or with why it is still there."""
        for finding in findings:
            if not finding.mend:
                yield finding, "it takes a person"
                continue
            try:
                yield finding, self._mend(finding)
            except (LoraFsError, ValueError) as error:  # a source that other software wrote may be no path
                yield finding, str(error)

    def _mend(self, finding: Finding) -> str | None:
        key = finding.key
        if finding.garbage is not None:
            self._registry.check_writable()
            for error in collect([finding.garbage]).values():
                raise error
        elif finding.kind is Kind.HEAD:
            self._registry.check_writable()
            self._registry.announce()
        elif key is None:
            return "it takes a person"
        elif finding.kind in (Kind.UNREADABLE, Kind.SIBLINGS):
            self._write(key, {})
        elif finding.kind is Kind.SAME_ID:
            fresh = new_ids(self._state.records, self._registry.marker.registry_uuid)[key]
            spec = self._state.records[key].spec.model_dump(mode="json")
            self._write(key, {"spec": {**spec, "int_id": fresh}})
        elif finding.kind in (Kind.NO_FILES, Kind.BAD_FILES):
            return self._bring_files(self._state.records[key])
        elif finding.kind is Kind.NO_RECORD:
            adopter = Adopter(self._registry, self._expectation, settle_s=0.0, writer=self._writer)
            return adopter.adopt(key)
        return None

    def _write(self, key: AdapterKey, fields: dict[str, Any]) -> None:
        """Publish what was read once more, with other fields.

        Raises:
            Conflict: somebody wrote it meanwhile.
        """
        held = self._state.records.get(key) or self._state.pointers[key]

        def build(newest: Record | Pointer | None) -> dict[str, Any]:
            if newest != held:
                raise Conflict(f"{key} was written meanwhile: run it again")
            return fields

        self._registry.append(series_of(self._registry, key), build, writer=self._writer)

    def _bring_files(self, record: Record) -> str | None:
        layout = self._registry.layout
        folder = next(self._elsewhere(record), None)
        if folder is None:
            return "the same bytes lie nowhere else: import an export that has them, or unregister it"
        make_folder(layout.artifact(record.key), root=layout.root)
        mend_files(layout, folder, record)
        return None

    def _elsewhere(self, record: Record) -> Iterator[Path]:
        """Whole copies of a record's files: other revisions' with the same digest, and its source."""
        layout = self._registry.layout
        for key, other in self._state.records.items():
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
