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
from typing import TypeVar

from lora_fs.sidecar.concurrency import AllTaken, Threads
from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import AdapterKey, Record, Scope, check_segment
from lora_fs.sidecar.reconcile.admin import fetch_jobs
from lora_fs.sidecar.reconcile.admin.fetch_jobs import Downloads, begun
from lora_fs.sidecar.reconcile.admin.fetching import Fetching, Tell
from lora_fs.sidecar.reconcile.admin.fetching import register as fetch_and_register
from lora_fs.sidecar.reconcile.admin.uploads import Upload, Uploads
from lora_fs.sidecar.reconcile.catalog import Served, namespace_of
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.register_as import Effect
from lora_fs.sidecar.registry.lifecycle.undo import Made, take_back
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.sources.allowed import Allowed, AllowedRemotes
from lora_fs.sidecar.sources.known import is_remote
from lora_fs.sidecar.sources.local import path_of, resolve
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.remote.downloader import downloaded
from lora_fs.sidecar.sources.uri import is_uri, parse, redacted
from lora_fs.sidecar.validate import Expectation

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

AT_ONCE = 8
_FETCHES_NOTHING = Fetching(Options(AllowedRemotes().check), most_bytes=0, most_s=0.0)


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


class Registrations:
    """Writes for one replica.

    Args:
        allowed_sources: folders besides the root to register from.
        mounts: where the claims of ``pvc://`` are.
        fetching: which sources a fetch may use, and its limits.
        wait_s: how long a caller waits for a download.
    """

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        volume: Volume,
        expectation: Expectation,
        *,
        allowed_sources: tuple[Path, ...],
        timeout_s: float,
        mounts: Mapping[str, Path] | None = None,
        fetching: Fetching = _FETCHES_NOTHING,
        wait_s: float = 0.0,
    ) -> None:
        self.registry, self.scopes, self._volume = registry, scopes, volume
        self.expectation, self.timeout_s = expectation, timeout_s
        self._allowed = Allowed(registry.layout.root, allowed_sources)
        self._threads = Threads(AT_ONCE)
        self._mounts, self.fetching = mounts or {}, fetching
        self.uploads = Uploads(registry, expectation, fetching.most_bytes, fetching.most_s, timeout_s)
        share = fetch_jobs.AT_ONCE if len(scopes) == 1 else fetch_jobs.SHARE
        self.downloads: Downloads[Effect] = Downloads(wait_s, share)

    async def register(self, request: LoadRequest, writer: str) -> Loaded:
        """Register what the request names; ``undo`` takes it back.

        Raises:
            InputError: the name, the path or the adapter is at fault, or it exists already.
            VolumeUnavailable: not written, or not known to be: a repeat is harmless.
        """
        scope, name = self._scope(request.lora_name)
        if is_remote(request.lora_path, self.fetching.plugin):
            done = (await self._fetch(request, scope, name, writer)).registered
        else:

            def call() -> Registered:
                source = self.source(request.lora_path, scope.namespace, request.reads)
                self._check_there(source, request.lora_path)
                wanted = Registration(
                    name,
                    source,
                    source.as_uri(),
                    origin="api",
                    must_be_new=not request.load_inplace,
                    resolved=True,
                )
                return ingest.register(self.registry, scope, wanted, self.expectation, writer=writer)

            done = await self.run(call, f"register {name}")
        return Loaded(done.record, done.made)

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

    async def _fetch(self, request: LoadRequest, scope: Scope, name: str, writer: str) -> Effect:
        self.check_remote(request.lora_path)
        wanted = Registration(name, Path(), "", origin="api", must_be_new=not request.load_inplace)

        def call(tell: Tell, stop: Callable[[], bool]) -> Effect:
            fetching = replace(self.fetching, tell=tell, stop=stop)
            before = release.active(self.registry, scope, name)
            registered = fetch_and_register(
                self.registry, scope, wanted, request.lora_path, self.expectation, fetching, writer=writer
            )
            self._volume.look_now()
            return Effect(registered, before, registered.pointer)

        def serves(done: Effect) -> bool:
            pointer = release.active(self.registry, scope, name)
            serving = pointer.revision if pointer is not None else None
            return self.stands(done) and serving == done.registered.record.revision

        def stands(done: Effect) -> Awaitable[bool]:
            return self.run(partial(serves, done), f"look at {name}")

        what = (str(scope), name, request.lora_path, str(request.load_inplace))
        told = begun(request.lora_name, scope.namespace, redacted(request.lora_path))
        return await self.downloads.run(what, told, call, stands)

    def stands(self, done: Effect) -> bool:
        """Whether the revision is still registered. Blocking."""
        record = done.registered.record
        newest = self.registry.latest(self.registry.records(record.key))[1]
        return newest is not None and newest.present and newest.spec.digest == record.spec.digest

    async def upload(self, upload: Upload, writer: str) -> Registered:
        """Take an adapter's files as they come, and register them.

        Raises:
            See ``uploads.Uploads.receive`` and ``registration.register``.
        """
        scope, name = self._scope(upload.name)
        AdapterKey.checked(*scope, upload.revision or "v1", name)
        received = await self.uploads.receive(scope, name, upload)
        register = partial(self.uploads.register, scope, received, writer)
        discard = partial(self.uploads.discard, received)
        return await self.run(register, f"register the upload of {name}", discard)

    def check_remote(self, lora_path: str) -> None:
        """Refuse a forbidden source before anything begins for it."""
        uri = parse(lora_path) if is_uri(lora_path) else downloaded(lora_path)
        self.fetching.options.check(uri)

    async def unregister(self, lora_name: str, served: Served | None, writer: str) -> None:
        """Withdraw a name with every revision, or the one revision that ``name@revision`` names.

        Args:
            served: None: the name serves nothing, and may have revisions all the same.
        Raises:
            NotFound: it has none.
        """
        unknown = f"The lora adapter '{lora_name[:200]}' cannot be found."
        try:
            at = (served.record.key.scope, served.record.name) if served else self._scope(lora_name)
            check_segment("name", at[1])
        except InputError as error:  # no name, or in no namespace that this replica serves
            raise NotFound(unknown) from error
        revision = served.record.revision if served is not None and "@" in served.name else None
        scope, name = at

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
