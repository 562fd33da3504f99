"""Registering through a replica: the HTTP API's writes, each in a thread and bounded in time.

A volume that hangs costs a caller an error and one thread of a few, and no one else anything.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_fs.sidecar.concurrency import AllTaken, Threads
from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import AdapterKey, Record, Scope, check_segment
from lora_fs.sidecar.reconcile.admin import fetch_jobs
from lora_fs.sidecar.reconcile.admin.fetch_jobs import Downloads, begun
from lora_fs.sidecar.reconcile.admin.fetching import Fetching, Tell
from lora_fs.sidecar.reconcile.admin.fetching import register as fetch_and_register
from lora_fs.sidecar.reconcile.admin.uploads import URI, Upload, Uploads
from lora_fs.sidecar.reconcile.catalog import Served, namespace_of, public_name
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome
from lora_fs.sidecar.registry.lifecycle.undo import Made, take_back
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.sources.allowed import Allowed
from lora_fs.sidecar.sources.known import is_remote
from lora_fs.sidecar.sources.local import path_of, resolve
from lora_fs.sidecar.sources.remote.downloader import downloaded
from lora_fs.sidecar.sources.uri import is_uri, parse, redacted
from lora_fs.sidecar.validate import Expectation

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Done = TypeVar("Done", Registered, Outcome)
Bring = Callable[[Registration, Expectation], Registered]

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """vLLM's ``POST /v1/load_lora_adapter``.

    ``reads``: the namespaces that the caller may read; None: all.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    reads: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that is done. ``made``: what it wrote, for whoever takes it back."""

    record: Record
    made: Made


@dataclass(frozen=True, slots=True)
class Asked(Generic[Done]):
    """A registration that a client asks for, wherever its bytes come from.

    Attributes:
        record: says what to register. It gets the function that adds the bytes and registers it. Blocking.
        loads: vLLM's load, which is done only while the name serves it.
    """

    scope: Scope
    name: str
    record: Callable[[Bring], Done]
    writer: str
    dry_run: bool = False
    loads: bool = False


class Registrations:
    """Writes for one replica.

    Args:
        allowed: the folders to register from.
        fetching: which sources a fetch may use, and its limits.
        wait_s: how long a caller waits for a download.
        mounts: where the claims of ``pvc://`` are.
    """

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        volume: Volume,
        expectation: Expectation,
        *,
        allowed: Allowed,
        timeout_s: float,
        fetching: Fetching,
        wait_s: float,
        mounts: Mapping[str, Path] | None = None,
    ) -> None:
        self.registry, self.scopes, self._volume = registry, scopes, volume
        self.expectation, self.timeout_s = expectation, timeout_s
        self._allowed, self._threads = allowed, Threads(AT_ONCE)
        self._mounts, self.fetching = mounts or {}, fetching
        self.uploads = Uploads(registry, fetching.most_bytes, fetching.most_s, timeout_s)
        share = fetch_jobs.AT_ONCE if len(scopes) == 1 else fetch_jobs.SHARE
        self.downloads = Downloads(wait_s, share)

    async def register(self, request: LoadRequest, writer: str) -> Loaded:
        """Register what the request names; ``undo`` takes it back.

        Raises:
            InputError: the name, the path or the adapter is at fault, or it exists already.
            VolumeUnavailable: not written, or not known to be: a repeat is harmless.
        """
        scope, name = self._scope(request.lora_name)
        wanted = Registration(name, Path(), "", origin="api", must_be_new=not request.load_inplace)
        asked = Asked(scope, name, lambda bring: bring(wanted, self.expectation), writer, loads=True)
        said = str(request.load_inplace)
        done = await self.from_source(asked, request.lora_path, request.reads, said)
        return Loaded(done.record, done.made)

    async def upload(self, upload: Upload, writer: str) -> Registered:
        """Register the files that a client sends.

        Raises:
            As ``from_client``.
        """
        scope, name = self._scope(upload.name)
        wanted = Registration(name, Path(), "", upload.revision, activate=upload.activate, origin="api")
        asked = Asked(scope, name, lambda bring: bring(wanted, self.expectation), writer)
        return await self.from_client(asked, upload)

    async def from_source(
        self, asked: Asked[Done], source: str, reads: frozenset[str] | None, said: str
    ) -> Done:
        """Register a folder that this replica reads, or what it fetches: that goes on without its caller.

        Args:
            reads: the namespaces that the caller may read; None: all.
            said: of the registration, besides its name and source: what differs in it is other work.
        Raises:
            See ``source``, ``Downloads.run`` and ``ingest.register``.
        """
        scope, name = asked.scope, asked.name
        if not is_remote(source, self.fetching.plugin):

            def copied(wanted: Registration, expectation: Expectation) -> Registered:
                folder = self.source(source, scope.namespace, reads)
                if asked.loads:
                    self._check_there(folder, source)
                ready = replace(wanted, source=folder, uri=folder.as_uri(), resolved=True)
                return self._ingest(asked, ready, expectation)

            return await self.run(partial(asked.record, copied), f"register {name}")
        uri = parse(source) if is_uri(source) else downloaded(source)
        self.fetching.options.check(uri)  # refuses a forbidden one before anything begins for it

        def fetch(tell: Tell, stop: Callable[[], bool]) -> Done:
            how = replace(self.fetching, tell=tell, stop=stop)
            register = partial(fetch_and_register, writer=asked.writer, dry_run=asked.dry_run)

            def fetched(wanted: Registration, expectation: Expectation) -> Registered:
                return register(self.registry, scope, wanted, source, expectation, how)

            return self.read_back(partial(asked.record, fetched))

        def stands(done: Done) -> Awaitable[bool]:
            return self.run(partial(self._stands, asked, done.record), f"look at {name}")

        public = public_name(scope, name, [one.namespace for one in self.scopes])
        told = begun(public, scope.namespace, redacted(source))
        return await self.downloads.run((str(scope), name, source, said), told, fetch, stands)

    async def from_client(self, asked: Asked[Done], upload: Upload) -> Done:
        """Take an adapter's files as they come, and register them.

        Raises:
            See ``Uploads.receive`` and ``ingest.register``.
        """
        key = AdapterKey.checked(*asked.scope, upload.revision or "v1", asked.name)
        folder = await self.uploads.receive(key, upload)

        def call() -> Done:
            with self.uploads.unpacked(folder) as source:

                def taken(wanted: Registration, expectation: Expectation) -> Registered:
                    ready = replace(wanted, source=source, uri=URI, takes=True)
                    return self._ingest(asked, ready, expectation)

                return asked.record(taken)

        discard = partial(self.uploads.discard, folder)
        return await self.run(call, f"register the upload of {asked.name}", discard)

    def _ingest(self, asked: Asked[Any], ready: Registration, expectation: Expectation) -> Registered:
        writer, dry_run = asked.writer, asked.dry_run
        return ingest.register(self.registry, asked.scope, ready, expectation, writer=writer, dry_run=dry_run)

    def _stands(self, asked: Asked[Any], record: Record) -> bool:
        """Whether an outcome that nobody collected is still so. Blocking."""
        if asked.dry_run:
            return True
        newest = self.registry.latest(self.registry.records(record.key))[1]
        is_there = newest is not None and newest.present and newest.spec.digest == record.spec.digest
        if not asked.loads:
            return is_there
        pointer = release.active(self.registry, asked.scope, asked.name)
        return is_there and pointer is not None and pointer.revision == record.revision

    async def undo(self, loaded: Loaded, writer: str) -> None:
        """Take a load back. Logs a failure: the caller has an error of its own to report."""
        key = loaded.record.key
        try:
            await self.take_back(key.scope, key.name, loaded.made, writer)
        except LoraFsError as error:
            told = event("load.not_undone", adapter=key.name)
            text = "%s was refused by the engine and stays registered: %s"
            logger.warning(text, key.name, error, extra=told)

    async def take_back(self, scope: Scope, name: str, made: Made, writer: str) -> None:
        """Undo what a load wrote, by whichever replica. See ``undo.take_back``."""
        call = partial(take_back, self.registry, scope, name, made, writer=writer)
        await self.run(call, f"take {name} back")

    async def unregister(self, lora_name: str, served: Served | None, writer: str) -> None:
        """Withdraw a name with every revision, or the one revision that ``name@revision`` names.

        Args:
            served: None: the name serves nothing, and may have revisions all the same.
        Raises:
            NotFound: it has none.
        """
        unknown = f"The lora adapter '{lora_name[:200]}' cannot be found."
        try:
            scope, name = (served.record.key.scope, served.record.name) if served else self._scope(lora_name)
            check_segment("name", name)
        except InputError as error:  # no name, or in no namespace that this replica serves
            raise NotFound(unknown) from error
        revision = served.record.revision if served is not None and "@" in served.name else None

        def call() -> object:
            self.registry.check_identity()  # on a lost volume no name is known to be absent
            if served is None and not release.present_revisions(self.registry, scope, name):
                raise NotFound(unknown)
            return release.unregister(
                self.registry, scope, name, revision=revision, all_revisions=revision is None, writer=writer
            )

        await self.run(call, f"unregister {lora_name[:200]}")

    def _scope(self, lora_name: str) -> tuple[Scope, str]:
        named, slash, bare = lora_name.partition("/")
        namespace = namespace_of(lora_name, tuple(scope.namespace for scope in self.scopes))
        if namespace is None:
            raise InputError(f"namespace {named[:200]!r} is not served here")
        scope = next(scope for scope in self.scopes if scope.namespace == namespace)
        return scope, bare if slash and len(self.scopes) > 1 else lora_name

    def source(self, lora_path: str, own: str, reads: frozenset[str] | None) -> Path:
        """The folder a request names, inside an allowed one. A hub id is no folder here.

        In the registry that is one of ``own``, the name's namespace, or of another that the caller may read:
        else a tenant would take another's files. The refusal does not tell whether there is such a folder.
        """
        with suppress(ValueError, RuntimeError):  # no text for a path, and a loop of symlinks
            path = path_of(lora_path, self._mounts) if is_uri(lora_path) else Path(lora_path)
            namespaces = {*reads, own} if reads is not None else None
            if (found := self._allowed.find(path, namespaces=namespaces)) is not None:
                return found
        raise InputError(
            f"lora_path {redacted(lora_path)[:200]!r} is not under an allowed folder: "
            "put it on the volume, where you may read, or name its folder in LORA_FS_ALLOWED_SOURCES"
        )

    def _check_there(self, source: Path, lora_path: str) -> None:
        """Raise NotFound, in vLLM's words, if a source is not there, InputError if it is no folder."""
        try:
            resolve(str(source))
        except NotFound as error:
            self.registry.check_identity()  # on a lost volume no name is known to be absent
            told = redacted(lora_path)[:200]
            raise NotFound(f"No adapter found for {told!r}: no such folder on this machine") from error

    def read_back(self, call: Callable[[], Result]) -> Result:
        """Do ``call``, and read what it wrote. Blocking."""
        result = call()
        self._volume.look_now()
        return result

    async def run(
        self, call: Callable[[], Result], what: str, unbegun: Callable[[], object] | None = None
    ) -> Result:
        """Do ``call`` in a thread, and read what it wrote.

        Args:
            what: is said of it in an error. unbegun: see ``Threads.run``.
        Raises:
            VolumeUnavailable: no thread was free in time, or it did not end in time. What ``call`` raises.
        """

        try:
            return await self._threads.run(partial(self.read_back, call), self.timeout_s, unbegun)
        except AllTaken as error:
            raise VolumeUnavailable(
                f"cannot {what}: nothing was begun in {self.timeout_s:.0f} s, since {AT_ONCE} calls before "
                "it wait for the volume"
            ) from error
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"cannot {what}: the volume did not answer in {self.timeout_s:.0f} s; "
                "it may have been written: look before you repeat"
            ) from error
