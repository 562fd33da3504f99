"""Load and unload in vLLM's shapes, and what this replica knows of every adapter.

Load and unload write the desired state, then wait, bounded, for this replica to follow. Each is
told to the audit, done or refused.
"""

# No postponed annotations: FastAPI has to see ``Request`` and the bodies, of a function inside one.

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import PlainTextResponse, Response

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.server.auth import Admin, Caller, NotPermitted, address_of
from lora_fs.sidecar.server.bodies import (
    AdapterDescription,
    AdapterList,
    DynamoList,
    ErrorBody,
    LoadBody,
    UnloadBody,
)
from lora_fs.sidecar.server.ports import LoadRequest, ReplicaPort, namespace_of
from lora_fs.sidecar.server.tokens import Verb
from lora_fs.sidecar.server.trail import Trail

# With a response class that has a media type of its own, FastAPI gives it to the errors, too.
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    **{code: {"model": ErrorBody} for code in (400, 401, 403, 404, 422, 429, 503)},
}


def router(replica: ReplicaPort, admin: Admin, trail: Trail | None = None) -> APIRouter:
    """The routes. ``trail``: where admin calls are told; None: to the log alone."""
    routes = APIRouter(tags=["adapters"])
    told = trail or Trail(None)

    @asynccontextmanager
    async def admitted(
        request: Request, verb: Verb, name: str
    ) -> AsyncIterator[tuple[Caller, dict[str, object]]]:
        """Let the block act for a caller who may, and tell how it ended and what the block adds."""
        namespace = namespace_of(name, replica.namespaces)
        what: dict[str, object] = {"namespace": namespace, "model": replica.model, "name": name}
        caller: Caller | None = None
        try:
            caller = await admin.admit(request, verb, namespace)
            yield caller, what
        except HTTPException as error:
            caller = error.caller if isinstance(error, NotPermitted) else caller
            await told.tell(verb, caller, address_of(request.scope), "denied", str(error.detail), what)
            raise
        except LoraFsError as error:
            await told.tell(verb, caller, address_of(request.scope), "failed", str(error), what)
            raise
        except BaseException as error:  # the client left, or a fault of ours: it may have been done
            why = f"ended before it was known to be done: {type(error).__name__}"
            await told.tell(verb, caller, address_of(request.scope), "failed", why, what)
            raise
        await told.tell(verb, caller, address_of(request.scope), "done", "", what)

    @routes.post("/v1/load_lora_adapter", response_class=Response, responses=_ANSWERS)
    async def load(body: LoadBody, request: Request) -> Response:
        wanted = LoadRequest(body.lora_name, body.lora_path, body.load_inplace)
        async with admitted(request, Verb.REGISTER, body.lora_name) as (caller, what):
            what["source"] = body.lora_path
            record = await replica.load_adapter(wanted, writer=caller.writer)
            what |= {"revision": record.revision, "digest": record.spec.digest}
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_class=Response, responses=_ANSWERS)
    async def unload(body: UnloadBody, request: Request) -> Response:
        async with admitted(request, Verb.UNREGISTER, body.lora_name) as (caller, _):
            await replica.unload_adapter(body.lora_name, writer=caller.writer)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def described(request: Request) -> list[AdapterDescription]:
        sight = await admin.sight(request.headers)
        statuses, residency = replica.statuses(), replica.residency()
        return [
            AdapterDescription.model_validate(
                {
                    "name": name,
                    "record": served.record,
                    "status": statuses[name],
                    "residency": residency.get(name),
                    "staged": replica.staged(served),
                }
            )
            for name, served in replica.catalog().served.items()
            if name in statuses  # the catalog may have grown since
            and served.record.namespace in sight
        ]

    @routes.get("/v1/lora_adapters", summary="Records with this replica's status and residency")
    async def adapters(request: Request) -> AdapterList:
        return AdapterList(replica=replica.replica_id, data=await described(request))

    @routes.get("/v1/list_lora_adapters", summary="The same, in Dynamo's shape")
    async def loras(request: Request) -> DynamoList:
        return DynamoList(loras=await described(request))

    return routes
