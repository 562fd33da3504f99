"""Folder drops: a folder copied into the tree becomes a registered adapter, once it is whole.

A folder is adopted when its (path, size, mtime) set held still for the settle time on this
process's monotonic clock and it validates. Any replica may adopt; the lease saves the work of
reading it twice and the compare-and-set makes a double harmless. A folder taken away, seen so
twice, unregisters only what a folder had registered.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_fs.sidecar.errors import Conflict, InvalidAdapter, LoraFsError
from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.registry import artifacts, operations
from lora_fs.sidecar.registry.lock import lease
from lora_fs.sidecar.registry.operations import Registration
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import Desired
from lora_fs.sidecar.validate import Expectation, looks_preallocated

logger = logging.getLogger(__name__)

READY_MARKS = ("_READY", "SHA256SUMS")


@dataclass(slots=True)
class _Candidate:
    fingerprint: str
    still_since: float
    refused: str | None = None  # why this fingerprint was not adopted


class Adopter:
    """Watches the folders of some scopes across passes. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        registry: Registry,
        expectation: Expectation,
        *,
        settle_s: float,
        writer: str,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._expectation = expectation
        self._settle_s = settle_s
        self._writer = writer
        self._policy = policy
        self._clock = clock
        self._candidates: dict[AdapterKey, _Candidate] = {}
        self._gone_once: set[AdapterKey] = set()

    def refusals(self) -> Mapping[AdapterKey, str]:
        """Folders that are not adopted, and why."""
        return {key: c.refused for key, c in self._candidates.items() if c.refused}

    def waiting(self) -> bool:
        """Whether a folder is settling: the caller should come back soon."""
        return bool(self._gone_once) or any(not c.refused for c in self._candidates.values())

    def step(self, desired: Desired) -> bool:
        """Look at every folder once; True if the registry was changed."""
        if desired.frozen:
            return False
        changed = False
        seen: set[AdapterKey] = set()
        for scope, listing in desired.listings.items():
            for revision, entries in listing.revisions.items():
                for name in entries.folders:
                    key = AdapterKey(*scope, revision, name)
                    seen.add(key)
                    changed |= self._consider(key, desired)
        for key in self._candidates.keys() - seen:
            del self._candidates[key]
        return self._withdraw(desired, seen) or changed

    def _consider(self, key: AdapterKey, desired: Desired) -> bool:
        record = desired.records.get(key)
        seen = None
        if _may_be_a_drop(record):
            try:
                seen = artifacts.fingerprint(self._registry.layout.artifact(key))
            except LoraFsError as error:
                logger.warning("adoption of %s waits: %s", key, error)
                return False
        if seen is None or (record is not None and record.spec.fingerprint == seen):
            self._candidates.pop(key, None)
            return False
        return self._settle(key, seen, desired)

    def _settle(self, key: AdapterKey, seen: str, desired: Desired) -> bool:
        folder = self._registry.layout.artifact(key)
        now = self._clock()
        candidate = self._candidates.get(key)
        if candidate is None or candidate.fingerprint != seen:
            candidate = self._candidates[key] = _Candidate(seen, now)
        if candidate.refused:
            return False
        marked = any((folder / mark).is_file() for mark in READY_MARKS)
        if not marked and now - candidate.still_since < self._settle_s:
            return False
        return self._adopt(key, candidate, desired)

    def _adopt(self, key: AdapterKey, candidate: _Candidate, desired: Desired) -> bool:
        folder = self._registry.layout.artifact(key)
        task = f"adopt-{key.namespace}--{key.revision}--{key.name}"[:200]
        with lease(self._registry.layout.lease(task), wait_s=0) as had:
            if not had:
                return False
            try:
                if looks_preallocated(folder):
                    candidate.refused = "NotWhole: its tensors end in zeros, as an unfinished copy does"
                    return False
                operations.register(
                    self._registry,
                    key.scope,
                    Registration(
                        key.name,
                        folder,
                        f"file://{folder}",
                        revision=key.revision,
                        policy=self._policy,
                        activate=_activates(key, desired),
                        origin="folder",
                        fingerprint=candidate.fingerprint,
                    ),
                    self._expectation,
                    writer=self._writer,
                )
            except (InvalidAdapter, Conflict) as error:
                candidate.refused = f"{type(error).__name__}: {error}"
                logger.warning("folder %s is not adopted: %s", folder, error)
                return False
            except LoraFsError as error:
                logger.warning("adoption of %s is retried: %s", key, error)
                return False
        del self._candidates[key]
        logger.info("adopted %s", key)
        return True

    def _withdraw(self, desired: Desired, seen: set[AdapterKey]) -> bool:
        gone = {
            key
            for key, record in desired.records.items()
            if record.present and record.origin == "folder" and key not in seen
        }
        twice = gone & self._gone_once
        self._gone_once = gone - twice
        for key in twice:
            try:
                operations.unregister(
                    self._registry, key.scope, key.name, revision=key.revision, writer=self._writer
                )
                logger.info("unregistered %s: its folder was taken away", key)
            except LoraFsError as error:
                logger.warning("%s: its folder is gone and it is not unregistered: %s", key, error)
        return bool(twice)


def _may_be_a_drop(record: Record | None) -> bool:
    """A registered folder is guarded by its digest, and so is what a withdrawal left of it."""
    if record is None:
        return True
    return record.origin == "folder" if record.present else record.spec.fingerprint is not None


def natural_order(revision: str) -> tuple[tuple[int, int, str], ...]:
    """v9 before v10."""
    parts = re.split(r"([0-9]+)", revision)
    return tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts if p)


def _activates(key: AdapterKey, desired: Desired) -> bool:
    scope = Scope(key.namespace, key.model)
    pointer = desired.pointers.get((scope, key.name))
    if pointer is None or pointer.revision is None:
        return True
    return natural_order(key.revision) > natural_order(pointer.revision)
