"""Registering through a replica: the HTTP API's writes, each in a thread and bounded in time.

A volume that hangs costs a caller an error and one thread of a few, and no one else anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from lora_fs.sidecar.errors import InputError, VolumeUnavailable
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.reconcile.catalog import Served, namespace_of
from lora_fs.sidecar.reconcile.volume import Volume
from lora_fs.sidecar.registry import operations, registration
from lora_fs.sidecar.registry.registration import Registration
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.sources.allowed import Allowed
from lora_fs.sidecar.validate import Expectation

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """vLLM's ``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class Registrations:
    """Writes for one replica. ``allowed_sources``: folders besides the root to register from."""

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        volume: Volume,
        expectation: Expectation,
        *,
        allowed_sources: tuple[Path, ...],
        timeout_s: float,
    ) -> None:
        self._registry, self._scopes, self._volume = registry, scopes, volume
        self._expectation, self._timeout_s = expectation, timeout_s
        self._allowed = Allowed(registry.layout.root, allowed_sources)
        self._threads = anyio.CapacityLimiter(8)

    async def register(
        self, request: LoadRequest, writer: str
    ) -> tuple[Record, Callable[[], Awaitable[object]]]:
        """Register what the request names; returns the record and how to take it back.

        Raises:
            InputError: the name, the path or the adapter is at fault, or it exists already.
            VolumeUnavailable: not written, or not known to be: a repeat is harmless.
        """
        scope, name = self._scope(request.lora_name)
        before = self._volume.desired.pointers.get((scope, name))

        def call() -> registration.Registered:
            source = self._source(request.lora_path)
            wanted = Registration(
                name, source, source.as_uri(), origin="api", must_be_new=not request.load_inplace
            )
            return registration.register(self._registry, scope, wanted, self._expectation, writer=writer)

        done = await self._run(call, f"register {name}")

        def take_back() -> object:
            if before is not None and before.revision is not None:
                operations.promote(self._registry, scope, name, before.revision, writer=writer)
            if not done.changed:
                return None
            revision = done.record.revision
            return operations.unregister(self._registry, scope, name, revision=revision, writer=writer)

        return done.record, lambda: self._run(take_back, f"take {name} back")

    async def unregister(self, served: Served, writer: str) -> None:
        """Withdraw a name with every revision, or the one revision that ``name@revision`` names."""
        key = served.record.key
        revision = key.revision if "@" in served.name else None

        def call() -> object:
            return operations.unregister(
                self._registry,
                key.scope,
                key.name,
                revision=revision,
                all_revisions=revision is None,
                writer=writer,
            )

        await self._run(call, f"unregister {served.name}")

    def _scope(self, lora_name: str) -> tuple[Scope, str]:
        named, slash, bare = lora_name.partition("/")
        namespace = namespace_of(lora_name, tuple(scope.namespace for scope in self._scopes))
        if namespace is None:
            raise InputError(f"namespace {named[:200]!r} is not served here")
        scope = next(scope for scope in self._scopes if scope.namespace == namespace)
        return scope, bare if slash and len(self._scopes) > 1 else lora_name

    def _source(self, lora_path: str) -> Path:
        """The folder a request names, inside an allowed one. A hub id is no folder here."""
        with suppress(ValueError, RuntimeError):  # no text for a path, and a loop of symlinks
            resolved = Path(lora_path).resolve()
            if self._allowed.covers(resolved):
                return resolved
        raise InputError(
            f"lora_path {lora_path[:200]!r} is not under an allowed folder: "
            "put it on the volume, or name its folder in LORA_FS_ALLOWED_SOURCES"
        )

    async def _run(self, call: Callable[[], Result], what: str) -> Result:
        def work() -> Result:
            result = call()
            self._volume.look_now()
            return result

        try:
            with anyio.fail_after(self._timeout_s):
                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"cannot {what}: the volume did not answer in {self._timeout_s:.0f} s; "
                "it may have been written: look before you repeat"
            ) from error
