"""An admin call: admitted or not, and told to the audit however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import HTTPException, Request

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.server.auth import Admin, Caller, NotPermitted, address_of
from lora_fs.sidecar.server.ports import ReplicaPort, namespace_of
from lora_fs.sidecar.server.tokens import Verb
from lora_fs.sidecar.server.trail import Trail


class Acts:
    """``trail``: where admin calls are told; None: to the log alone."""

    def __init__(self, replica: ReplicaPort, admin: Admin, trail: Trail | None) -> None:
        self._replica, self._admin, self._told = replica, admin, trail or Trail(None)

    @asynccontextmanager
    async def admitted(
        self, request: Request, verb: Verb, name: str
    ) -> AsyncIterator[tuple[Caller, dict[str, object]]]:
        """Let the block act for a caller who may, and tell how it ended and what the block adds."""
        replica = self._replica
        namespace = namespace_of(name, replica.namespaces)
        what: dict[str, object] = {"namespace": namespace, "model": replica.model, "name": name}
        caller: Caller | None = None
        address = address_of(request.scope)
        try:
            caller = await self._admin.admit(request, verb, namespace)
            yield caller, what
        except HTTPException as error:
            caller = error.caller if isinstance(error, NotPermitted) else caller
            await self._told.tell(verb, caller, address, "denied", str(error.detail), what)
            raise
        except LoraFsError as error:
            await self._told.tell(verb, caller, address, "failed", str(error), what)
            raise
        except BaseException as error:  # the client left, or a fault of ours: it may have been done
            why = f"ended before it was known to be done: {type(error).__name__}"
            await self._told.tell(verb, caller, address, "failed", why, what)
            raise
        await self._told.tell(verb, caller, address, "done", "", what)
