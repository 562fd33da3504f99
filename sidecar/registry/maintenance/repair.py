"""Mending what ``fsck`` found, by the registry's own writes. Nothing that names an adapter is removed.

A finding that has changed since it was found is left alone: each mend looks again. What could not
be mended is reported with the reason, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lora_fs.sidecar.errors import Conflict, LoraFsError
from lora_fs.sidecar.model import AdapterKey, Pointer, Record
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.ids import new_ids
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.mending import is_whole, mend_files
from lora_fs.sidecar.registry.maintenance.fsck import Finding, Kind, certain
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.maintenance.survey import State
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.leases import LEASE_S, take_over
from lora_fs.sidecar.validate import Expectation

TAKEN_WITHIN_S = LEASE_S + 2.0


class Mender:
    """Mends one registry's findings.

    Args:
        state: what ``survey.look`` read, from which the findings came.
        expectation: what an unregistered folder must be to be adopted.
    """

    def __init__(self, registry: Registry, state: State, expectation: Expectation, *, writer: str) -> None:
        self._registry, self._state = registry, state
        self._expectation, self._writer = expectation, writer

    def mend(self, findings: Iterable[Finding]) -> Iterator[tuple[Finding, str | None]]:
        """Mend what can be; yields each finding with None, or with why it is still there."""
        wanted = list(findings)
        leases = [finding for finding in wanted if finding.kind is Kind.LEASE]
        with ThreadPoolExecutor(max_workers=32) as threads:  # each may have to be waited for
            taken = list(threads.map(lambda one: take_over(one.path, within_s=TAKEN_WITHIN_S), leases))
        for finding, had in zip(leases, taken, strict=True):
            yield finding, None if had else "its holder lives, or the volume cannot be written"
        for finding in wanted:
            if finding.kind is Kind.LEASE:
                continue
            if not finding.mend:
                yield finding, "it takes a person"
                continue
            try:
                yield finding, self._mend(finding)
            except LoraFsError as error:
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
            return self._say_anew(finding, key)
        elif finding.kind is Kind.SAME_ID:
            self._give_id(key)
        elif finding.kind in (Kind.NO_FILES, Kind.BAD_FILES):
            return self._bring_files(key)
        elif finding.kind is Kind.NO_RECORD:
            return self._adopt(key)
        return None

    def _say_anew(self, finding: Finding, key: AdapterKey) -> str | None:
        if finding.kind is Kind.UNREADABLE and certain(self._state, key) is None:
            return "it takes a person"
        held: Record | Pointer | None = (
            self._state.records.get(key) if key.revision else self._state.pointers.get((key.scope, key.name))
        )

        def same(newest: Record | Pointer | None) -> dict[str, Any]:
            if newest is None or newest != held:
                raise Conflict(f"{finding.path}: it was written meanwhile")
            return {}

        if key.revision:
            self._registry.append(self._registry.records(key), same, writer=self._writer)
        else:
            self._registry.append(self._registry.pointers(key.scope, key.name), same, writer=self._writer)
        return None

    def _give_id(self, key: AdapterKey) -> None:
        fresh = new_ids(self._state.records, self._registry.marker.registry_uuid)[key]
        held = self._state.records[key]

        def build(newest: Record | None) -> dict[str, Any]:
            if newest is None or newest != held:
                raise Conflict(f"{key} was written meanwhile: run it again")
            return {"spec": {**newest.spec.model_dump(mode="json"), "int_id": fresh}}

        self._registry.append(self._registry.records(key), build, writer=self._writer)

    def _bring_files(self, key: AdapterKey) -> str | None:
        record, layout = self._state.records[key], self._registry.layout
        for folder in self._elsewhere(record):
            target = layout.artifact(key)
            if atomic.list_names(target) is not None:
                mend_files(layout, folder, record)
                return None
            incoming = layout.incoming(key.scope)
            atomic.make_folder(incoming)
            draft = artifacts.temporary_in(incoming)
            try:
                copied = artifacts.copy_files(folder, draft, [entry.path for entry in record.spec.files])
                if artifacts.digest_of(copied) == record.spec.digest and artifacts.place(draft, target):
                    return None
            finally:
                artifacts.discard(draft)
        return "the same bytes lie nowhere else: import an export that has them, or unregister it"

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
            moved = record.model_copy(update={"spec": record.spec.model_copy(update={"path": str(folder)})})
            with suppress(LoraFsError):
                if folder != layout.artifact(record.key) and is_whole(layout, moved):
                    yield folder

    def _adopt(self, key: AdapterKey) -> str | None:
        adopter = Adopter(self._registry, self._expectation, settle_s=0.0, writer=self._writer)
        return adopter.adopt(key)
