"""A flat store of adapters that another system keeps: NVIDIA NIM's ``NIM_PEFT_SOURCE``. It is only read.

A folder there is an adapter of its name. A replica registers one that held still as ``import nim`` does; one
whose files changed becomes the name's next revision. One that is missing in two looks withdraws its name, if
what the name serves came from here. If it comes back, even unchanged, it is registered again. Otherwise the
replica that has the lease registers each state of a folder once, so people's promotions and withdrawals stay.
In a namespace that requires evaluations it activates none of them. A store that does not list, or lists
nothing, is unknown and not empty.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from heapq import nsmallest
from pathlib import Path

from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import STORE_STATE, JsonObject, Record, Scope, check_segment
from lora_fs.sidecar.registry.drops.candidates import Candidates
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.amend import amend
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store import gating
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.snapshot import Desired
from lora_fs.sidecar.registry.volume.atomic import real_path
from lora_fs.sidecar.registry.volume.leases import lease
from lora_fs.sidecar.sources.migration import nim
from lora_fs.sidecar.validate import Expectation

logger = logging.getLogger(__name__)

TOLD = 20


class FlatStore:
    """Watches one store for one scope.

    Args:
        desired: the registered adapters, as this replica knows them.
        changed: called after a registration or a withdrawal.
    """

    def __init__(
        self,
        registry: Registry,
        scope: Scope,
        store: Path,
        expectation: Expectation,
        *,
        settle_s: float,
        refresh_s: float,
        writer: str,
        desired: Callable[[], Desired],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._scope, self._store = registry, scope, store
        self._expectation, self.settle_s, self._refresh_s = expectation, settle_s, refresh_s
        self._writer, self._desired, self._changed, self._clock = writer, desired, changed, clock
        self._candidates = Candidates[Path]()
        self._refused: list[str] = []  # the first ones, as of the last look
        self._gone_once: set[str] = set()
        self._unneeded_once: set[str] = set()
        self._problem: str | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Look, and keep looking, in a thread."""
        threading.Thread(target=self._watch, name="lora-fs-flat", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end, and do not wait for it: the store may hang."""
        self._stop.set()

    def conditions(self) -> tuple[str, ...]:
        """The store's faults, for people."""
        found = [f"FlatStore: {self._problem}"] if self._problem is not None else []
        return (*found, *self._refused)

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                if self.step():
                    self._changed()
            except LoraFsError as error:
                self._problem = str(error)
            except Exception as error:
                logger.exception("the flat store's watcher failed and goes on", extra=event("watcher.failed"))
                self._problem = f"internal error: {error}"
            waiting = self._candidates.due(math.inf)
            self._stop.wait(min(self._refresh_s, self.settle_s) if waiting else self._refresh_s)

    def step(self) -> bool:
        """Look once; True if the registry changed.

        Raises:
            LoraFsError: the store or the registry is unreadable; this withdrew nothing.
        """
        try:
            return self._look()
        finally:  # in this thread: probes ask for it on the event loop, time and again
            refused = nsmallest(TOLD, self._candidates.refusals().items())
            self._refused = [f"NotAdopted: {folder}: {why}" for folder, why in refused]

    def _look(self) -> bool:
        if not self._registry.is_known:
            return False
        try:
            folders = nim.adapters(self._store)
        except InputError as error:
            self._problem = str(error)
            return False
        self._problem = None
        desired = self._desired()
        records: dict[str, list[Record]] = {}
        for record in desired.records_of(self._scope).values():
            if STORE_STATE in record.spec.labels:
                records.setdefault(record.name, []).append(record)
        for folder in self._candidates.keys() - folders.values():
            del self._candidates[folder]
        changed = False
        for name, folder in folders.items():
            changed |= self._consider(name, folder, records.get(name, []))
        self._let_go({name: some for name, some in records.items() if name not in folders})
        active = {name: record for scope, name, record in desired.active() if scope == self._scope}
        ours = {name for name, some in records.items() if _is_ours(active.get(name), some)}
        return self._withdraw(ours - folders.keys(), len(ours)) or changed

    def _consider(self, name: str, folder: Path, records: list[Record]) -> bool:
        now = self._clock()
        sight = self._candidates.look(folder, folder, now)
        if sight is None:
            return False
        if sight.fingerprint in {one.spec.labels[STORE_STATE] for one in records}:
            self._candidates.pop(folder, None)
            return False
        candidate = self._candidates.settled(folder, folder, sight, self.settle_s, now)
        if candidate is None:
            return False
        task = f"adopt-{self._scope.namespace}--{self._scope.model}--nim--{name}"[:200]
        try:
            check_segment("name", name)
            self._registry.check_writable()
            wanted = Registration(
                name,
                real_path(folder.parent) / folder.name,
                folder.as_uri(),
                labels={STORE_STATE: sight.fingerprint},
                again=False,
                activate=gating.required_gate(self._registry, self._scope.namespace) is None,
                origin="import",
                resolved=True,
                fingerprint=sight.fingerprint,
            )
            with lease(self._registry.layout.lease(task), wait_s=0) as had:
                if had.is_anothers:
                    return False
                ingest.register(self._registry, self._scope, wanted, self._expectation, writer=self._writer)
                self._clear(records)
        except LoraFsError as error:
            return self._candidates.failed(folder, candidate, error, now)
        del self._candidates[folder]
        logger.info("adopted %s", folder, extra=event("adopted", adapter=f"{self._scope}: {name}"))
        return True

    def _let_go(self, gone: Mapping[str, list[Record]]) -> None:
        """Clear the marks of withdrawn names whose folders two looks missed: gc keeps tombstones for them."""
        marked = {name for name, records in gone.items() if any(map(_is_kept, records))}
        twice, self._unneeded_once = marked & self._unneeded_once, marked - self._unneeded_once
        for name in sorted(twice):
            self._clear(gone[name])

    def _clear(self, records: list[Record]) -> None:
        """Clear the marks of withdrawn revisions, where the folder has another state now, or is gone."""

        def build(newest: Record | None) -> JsonObject | None:
            if newest is None or not _is_kept(newest):
                return None
            return {"spec": {**newest.spec.model_dump(mode="json"), **_taken_away(newest)}}

        for record in filter(_is_kept, records):
            self._registry.append(self._registry.records(record.key), build, writer=self._writer)

    def _withdraw(self, gone: set[str], known: int) -> bool:
        if len(gone) > max(5, known // 5):
            self._problem = (
                f"{len(gone)} of {known} adapters went from {self._store} at once; "
                "nothing is withdrawn for it: is the right volume mounted?"
            )
            self._gone_once.clear()
            return False
        twice, self._gone_once = gone & self._gone_once, gone - self._gone_once
        for name in sorted(twice):
            try:
                # Before the withdrawal: if this process dies in between, a later look withdraws the name.
                amend(self._registry, self._scope, name, [_taken_away], writer=self._writer)
                release.unregister(self._registry, self._scope, name, writer=self._writer, all_revisions=True)
                logger.info("unregistered %s: its folder was taken away", name, extra=event("withdrawn"))
            except NotFound:
                continue
            except LoraFsError as error:
                told = event("withdrawal.failed", adapter=name)
                logger.warning("%s: its folder is gone, it stays registered: %s", name, error, extra=told)
        return bool(twice)


def _is_ours(active: Record | None, records: list[Record]) -> bool:
    """Whether a name goes with its folder: what it serves came from there; or it serves nothing yet."""
    return active in records if active is not None else any(one.present for one in records)


def _is_kept(record: Record) -> bool:
    """Whether it is withdrawn, and the only memory that its folder's state was registered."""
    return not record.present and bool(record.spec.labels.get(STORE_STATE))


def _taken_away(record: Record) -> JsonObject:
    """Clear the mark of the folder's state, so that any replica registers the folder if it comes back."""
    return {"labels": {**record.spec.labels, STORE_STATE: ""}} if STORE_STATE in record.spec.labels else {}
