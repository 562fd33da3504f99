"""What the HTTP routes need from the replica behind them; no route knows more than this.

The sidecar's ``reconcile.replica.Replica`` implements it; so can a vLLM plugin. Nothing
here touches a disk: look-ups come from memory, and calls that wait have a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from lora_fs.sidecar.model import AdapterStatus, Condition, Download, JsonObject
from lora_fs.sidecar.reconcile.admin.administration import Administration
from lora_fs.sidecar.reconcile.admin.service import Loaded, LoadRequest
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, full_name, namespace_of
from lora_fs.sidecar.reconcile.telemetry.conditions import Readiness
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.events import EventLog
from lora_fs.sidecar.reconcile.telemetry.usage import UsageReport
from lora_fs.sidecar.registry.lifecycle.ingest import Registered

__all__ = [
    "Catalog",
    "LoadRequest",
    "Loaded",
    "Readiness",
    "ReplicaPort",
    "Served",
    "UsageReport",
    "full_name",
    "namespace_of",
]


class ReplicaPort(Protocol):
    """A replica as the routes see it."""

    @property
    def replica_id(self) -> str: ...

    @property
    def model(self) -> str:
        """The scope's model slug."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The served namespaces. With several, an adapter's name begins with its own."""

    def catalog(self) -> Catalog:
        """The served names, from memory."""

    def lookup(self, name: str) -> Served | None:
        """Resolve ``name``, ``namespace/name`` or ``name@revision`` from memory; None if unknown."""

    def check_read(self) -> None:
        """Raises VolumeUnavailable until a first read of the registry: before that no name is unknown."""

    def choose(self, served: Served, user: str | None) -> Served:
        """Choose what answers a request for ``served``, itself or its canary, and count the request.

        Args:
            user: who asks; None if nobody knows.
        """

    def answered(self, served: Served, status: int) -> None:
        """Count the answer to a request that ``choose`` counted.

        Args:
            status: the HTTP status that the client got; 502 for an answer that broke off.
        """

    def usage(self) -> UsageReport:
        """Requests, errors and loads by revision: both sides of each canary, then the most requested."""

    def base_cards(self) -> tuple[JsonObject, ...]:
        """The engine's own model cards as last read (base models and adapters that are not ours)."""

    @property
    def engine_version(self) -> str | None:
        """The engine's version by its last answer; None before the first."""

    def passes_through(self, name: str) -> bool:
        """Whether the engine itself lists ``name`` (its base model, a static adapter)."""

    def kept_to(self, name: str) -> str | None:
        """The namespace whose readers alone may see a name of the engine's own; None: everybody may.

        Adapters that another process loaded may be a tenant's; the base model is everybody's.
        """

    def hold(self, name: str, timeout_s: float) -> AbstractAsyncContextManager[str]:
        """Load ``name`` if needed, and keep it loaded inside the block.

        Yields the name to send to the engine. One load serves any number of callers.

        Raises:
            NotFound: the name is unknown, perhaps because of a withdrawal meanwhile. See ``check_read``.
            InvalidAdapter: its files are unfit to serve.
            EngineRejected: the engine refused it, with the engine's reason.
            TemporaryError: the engine or the volume did not answer in time; retry_after_s.
        """

    def forget(self, engine_name: str) -> None:
        """The engine answered that it does not have ``engine_name``: the next hold loads it."""

    def engine_failed(self, problem: str | None) -> None:
        """Look at the engine now, since a forwarded request failed.

        Args:
            problem: why the engine takes no connection: not ready until it is read again; None: it broke off
        """

    async def changed(self) -> None:
        """Wait until a look-up may find something else: the volume was read anew, or a load ended."""

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Loaded:
        """Register what the request names, then load it here; bounded.

        Raises:
            InputError: bad name, path not allowed, invalid adapter, Conflict if it exists.
            EngineRejected: this engine refused it, and the registration is taken back.
            TemporaryError: registered or not (the message says), not loaded here in time.
        """

    async def upload(self, upload: Upload, *, writer: str) -> Registered:
        """Take an adapter's files as they come, and register them; bounded.

        Raises:
            InputError: bad name, too large, invalid adapter, Conflict with another revision's bytes.
            TemporaryError: it did not come in time, or the volume did not take it.
        """

    async def unload_adapter(self, lora_name: str, *, writer: str) -> None:
        """Withdraw a name (every revision) or ``name@revision`` everywhere, then here; bounded.

        Raises:
            NotFound: no such name.
            TemporaryError: withdrawn, but this replica is still draining it.
        """

    @property
    def administration(self) -> Administration:
        """lora-fs's own calls on the registry, in threads."""

    def notable(self) -> tuple[Mapping[str, AdapterStatus], Mapping[str, int]]:
        """The statuses of names that are not simply unloaded, and how many are in each phase."""

    def conditions(self, name: str, one: AdapterStatus) -> tuple[Condition, ...]:
        """The conditions of a name with this status, each with its time."""

    @property
    def events(self) -> EventLog:
        """The latest events of this replica."""

    def residency(self) -> Mapping[str, JsonObject]:
        """For names the engine holds: see ``bodies.Residency``."""

    def downloads(self) -> Mapping[str, Download]:
        """The fetches under way, by the name that each will have."""

    def staged(self, served: Served) -> bool:
        """Whether its verified copy lies on this replica's own disk, as last seen."""

    def capacity(self) -> int | None:
        """How many adapters this replica may load, or None if unbounded or unknown."""

    def readiness(self) -> Readiness:
        """For /readyz and /metadata."""

    def counters(self) -> Mapping[str, float]:
        """Monotonic counters by metric name without prefix, e.g. ``loads_total``."""

    def durations(self) -> Mapping[str, Durations]:
        """How long work took, by metric name without prefix, e.g. ``load_seconds``."""

    def tiers(self) -> Mapping[str, int]:
        """Adapters by where they are: ``disk`` (staged copies), ``gpu``, ``host``, and ``engine`` for
        those of which the engine does not say.
        """

    def figures(self) -> Mapping[str, float]:
        """The same numbers as one mapping, for people; an unknown number is absent."""
