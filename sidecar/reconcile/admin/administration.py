"""lora-fs's own calls through a replica: what the command line does at a volume, in threads and bounded.

A write is read back before its caller has the answer: what this replica lists next has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lora_fs.sidecar.concurrency import Threads
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Policy, Record, Scope, check_segment
from lora_fs.sidecar.reconcile.admin.service import Asked, Bring, Registrations
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.lifecycle import register_as, release
from lora_fs.sidecar.registry.lifecycle.acts import Act, By, Done
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.evaluations import Evaluations
from lora_fs.sidecar.registry.store.rehearsal import Rehearsal
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import Happened, Reports, read_events, read_reports
from lora_fs.sidecar.validate import Expectation

READS = 4  # at once; who only reads takes no writer's thread
READ_S = 10.0

Result = TypeVar("Result")


class Administration:
    """The admin calls of one replica. ``default``: the policy of a record without one."""

    def __init__(self, registrations: Registrations, default: Policy) -> None:
        self._registrations, self._default = registrations, default
        self._reads = Threads(READS)

    @property
    def _registry(self) -> Registry:
        return self._registrations.registry

    async def act(self, scope: Scope, name: str, act: Act, *, writer: str) -> Done:
        """Do an act to a name of a scope that this replica serves; raises what ``act.do`` does."""
        check_segment("name", name)

        def call() -> Done:
            self._registry.check_identity()  # on a lost volume no name is known to be absent
            registry = Rehearsal(self._registry.layout.root) if act.dry_run else self._registry
            return act.do(registry, scope, name, By(writer, self._default))

        return await self._registrations.run(call, f"{act.word} {name}")

    async def register(
        self,
        scope: Scope,
        name: str,
        source: str,
        said: RegisterAs,
        reads: frozenset[str] | None,
        *,
        writer: str,
    ) -> Outcome:
        """Register a folder that this replica reads, or what it fetches.

        Args:
            reads: the namespaces that the caller may read; None: all.
        Raises:
            WaitTimeout: the fetch still runs; the same call again waits on. See ``ingest.register``.
        """
        AdapterKey.checked(*scope, said.revision or "v1", name)
        asked, words = self._asked(scope, name, said, writer), said.model_dump_json()
        return await self._registrations.from_source(asked, source, reads, words)

    async def upload(
        self,
        scope: Scope,
        name: str,
        files: AsyncIterator[tuple[str, bytes]],
        size_bytes: int | None,
        said: RegisterAs,
        *,
        writer: str,
    ) -> Outcome:
        """Take an adapter's files as they come, and register them.

        Raises:
            As ``Registrations.from_client``.
        """
        sent = Upload(name, files, said.revision, said.activate, size_bytes)
        return await self._registrations.from_client(self._asked(scope, name, said, writer), sent)

    async def take_back(self, scope: Scope, name: str, made: Made, *, writer: str) -> None:
        """Undo what a load of ``writer``'s wrote; raises what ``undo.take_back`` does."""
        AdapterKey.checked(*scope, made.revision, name)
        await self._registrations.take_back(scope, name, made, writer)

    async def named(self, scope: Scope, name: str) -> tuple[Pointer | None, tuple[Record, ...], Evaluations]:
        """Read what a name serves, its registered revisions and their evaluations, afresh."""
        check_segment("name", name)

        def read() -> tuple[Pointer | None, tuple[Record, ...], Evaluations]:
            self._registry.check_identity()
            pointer = release.active(self._registry, scope, name)
            records = tuple(release.present_revisions(self._registry, scope, name).values())
            return pointer, records, evaluations.of(self._registry, records)

        return await self._read(read)

    def problems_of(self, namespace: str, problems: Mapping[str, str]) -> dict[str, str]:
        """Keep of what cannot be read what may hold a namespace's files; by its path alone."""
        root, within = self._registry.layout.root, ((), (namespace,))
        return {at: why for at, why in problems.items() if Path(at).relative_to(root).parts[:1] in within}

    async def reports(self) -> Reports:
        """Read what every replica of the volume reports."""
        return await self._read(partial(read_reports, self._registry.layout))

    async def happened(self) -> Happened:
        """Read what happened on every replica of the volume lately."""
        return await self._read(partial(read_events, self._registry.layout))

    def _asked(self, scope: Scope, name: str, said: RegisterAs, writer: str) -> Asked[Outcome]:
        def record(bring: Bring) -> Outcome:
            def recorded(wanted: Registration) -> Registered:
                return bring(replace(wanted, allows=frozenset(said.allow)), self._expectation(scope, said))

            return register_as.register(self._registry, scope, name, said, recorded, default=self._default)

        return Asked(scope, name, record, writer, said.dry_run)

    def _expectation(self, scope: Scope, said: RegisterAs) -> Expectation:
        """What this replica expects, with what is said of one adapter and what the live replicas judge by.

        Blocking: it reads each replica's report.
        """
        ours = self._registrations.expectation
        ids = (said.base_model, *ours.model_ids) if said.base_model else ours.model_ids
        said_of_it = replace(ours, model_ids=ids, allow=ours.allow | frozenset(said.allow))
        return with_fleet(said_of_it, self._registry.layout, scope, forced=said.force)

    async def _read(self, call: Callable[[], Result]) -> Result:
        try:
            return await self._reads.run(call, READ_S)
        except TimeoutError as error:
            raise VolumeUnavailable(f"the volume did not answer in {READ_S:.0f} s: ask again") from error
