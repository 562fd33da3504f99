"""lora-fs's own calls through a replica: what the command line does at a volume, in threads and bounded.

A write is read back before its caller has the answer: what this replica lists next has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lora_fs.sidecar.concurrency import Threads
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Policy, Record, Scope, check_segment
from lora_fs.sidecar.reconcile.admin import fetching
from lora_fs.sidecar.reconcile.admin.fetch_jobs import begun
from lora_fs.sidecar.reconcile.admin.fetching import Tell
from lora_fs.sidecar.reconcile.admin.service import Registrations
from lora_fs.sidecar.reconcile.admin.uploads import URI, Upload
from lora_fs.sidecar.reconcile.catalog import public_name
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.lifecycle import ingest, register_as, release
from lora_fs.sidecar.registry.lifecycle.acts import Act, By, Done
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.register_as import Bring, Effect, Outcome, RegisterAs
from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.evaluations import Evaluations
from lora_fs.sidecar.registry.store.rehearsal import Rehearsal
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import Happened, Reports, read_events, read_reports
from lora_fs.sidecar.sources.known import is_remote
from lora_fs.sidecar.sources.uri import redacted
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
        ours, expected = self._registrations, partial(self._expectation, scope, said)
        if not is_remote(source, ours.fetching.plugin):

            def copied(wanted: Registration) -> Registered:
                folder = ours.source(source, scope.namespace, reads)
                ready = replace(wanted, source=folder, uri=folder.as_uri(), resolved=True)
                return ingest.register(
                    self._registry, scope, ready, expected(), writer=writer, dry_run=said.dry_run
                )

            call = partial(self._register, scope, name, said, copied)
            return (await ours.run(call, f"register {name}")).told(dry_run=said.dry_run)
        ours.check_remote(source)

        def fetch(tell: Tell, stop: Callable[[], bool]) -> Effect:
            how = replace(ours.fetching, tell=tell, stop=stop)

            def fetched(wanted: Registration) -> Registered:
                return fetching.register(
                    self._registry,
                    scope,
                    wanted,
                    source,
                    expected(),
                    how,
                    writer=writer,
                    dry_run=said.dry_run,
                )

            return ours.read_back(partial(self._register, scope, name, said, fetched))

        def stands(done: Effect) -> Awaitable[bool]:
            return ours.run(lambda: said.dry_run or ours.stands(done), f"look at {name}")

        public = public_name(scope, name, tuple(one.namespace for one in ours.scopes))
        what = (str(scope), name, source, said.model_dump_json())
        told = begun(public, scope.namespace, redacted(source))
        return (await ours.downloads.run(what, told, fetch, stands)).told(dry_run=said.dry_run)

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
            See ``Uploads.receive`` and ``ingest.register``.
        """
        AdapterKey.checked(*scope, said.revision or "v1", name)
        uploads, expected = self._registrations.uploads, partial(self._expectation, scope, said)
        sent = Upload(name, files, said.revision, said.activate, size_bytes)
        received = await uploads.receive(scope, name, sent)

        def taken(wanted: Registration) -> Registered:
            ready = replace(wanted, source=received.source, uri=URI, takes=True)
            return uploads.register(scope, ready, writer, expected(), dry_run=said.dry_run)

        def call() -> Effect:
            try:
                return self._register(scope, name, said, taken)
            finally:
                uploads.discard(received)  # a registration has moved its files away

        discard = partial(uploads.discard, received)
        done = await self._registrations.run(call, f"register the upload of {name}", discard)
        return done.told(dry_run=said.dry_run)

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

    def _register(self, scope: Scope, name: str, said: RegisterAs, bring: Bring) -> Effect:
        def recorded(wanted: Registration) -> Registered:
            return bring(replace(wanted, allows=frozenset(said.allow)))

        return register_as.register(self._registry, scope, name, said, recorded, default=self._default)

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
