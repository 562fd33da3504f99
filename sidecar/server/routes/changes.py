"""One load or unload of a name, whoever's call it is: admitted, done everywhere, and audited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

from fastapi import Path, Request

from lora_fs.sidecar.model import Record
from lora_fs.sidecar.server.bodies import ErrorBody
from lora_fs.sidecar.server.middleware.access import Admin, Caller
from lora_fs.sidecar.server.middleware.admin import AdminCalls
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import Loaded, LoadRequest, ReplicaPort, full_name
from lora_fs.sidecar.sources.uri import redacted

Answers = dict[int | str, dict[str, Any]]
ERRORS: Final[Answers] = {code: {"model": ErrorBody} for code in (400, 401, 403, 404, 413, 422, 429, 503)}
AdapterName = Annotated[str, Path(description="A name with all its revisions, or name@revision")]


class Change:
    """One admitted call.

    Attributes:
        name: with its namespace.
        record: the loaded record, for the audit; None: nothing was loaded.
        loaded: what a load wrote; None: it was no load.
    """

    def __init__(
        self, replica: ReplicaPort, admin: Admin, request: Request, caller: Caller, name: str
    ) -> None:
        self._replica, self._admin, self._request, self._caller = replica, admin, request, caller
        self.name = name
        self.record: Record | None = None
        self.loaded: Loaded | None = None

    async def load(self, source: str, *, in_place: bool = False) -> None:
        """Register ``source`` under the name, and load it here. Raises as ``ReplicaPort.load_adapter``."""
        sight = await self._admin.sight(self._request.headers)
        wanted = LoadRequest(self.name, source, in_place, sight.namespaces)
        self.loaded = await self._replica.load_adapter(wanted, writer=self._caller.writer)
        self.record = self.loaded.record

    async def unload(self) -> None:
        """Unregister the name everywhere. Raises as ``ReplicaPort.unload_adapter``."""
        await self._replica.unload_adapter(self.name, writer=self._caller.writer)


class Changes:
    """``trail``: records admin calls."""

    def __init__(self, replica: ReplicaPort, admin: Admin, trail: Trail) -> None:
        self._replica, self._admin = replica, admin
        self.calls = AdminCalls(replica, admin, trail)

    @asynccontextmanager
    async def admitted(
        self, request: Request, verb: Verb, lora_name: str, source: str | None = None
    ) -> AsyncIterator[Change]:
        """Let the block load or unload ``lora_name`` for a caller who may, and tell how it ended.

        Args:
            source: where a load's files lie.
        """
        name = full_name(lora_name, self._replica.namespaces)
        async with self.calls.admitted(request, verb, name) as (caller, what):
            if source is not None:
                what["source"] = redacted(source)
            change = Change(self._replica, self._admin, request, caller, name)
            yield change
            if change.record is not None:
                what |= change.record.told
