"""Load and unload in vLLM's shapes and in SageMaker's, and what this replica knows of every adapter.

Load and unload write the desired state, then wait, bounded, for this replica to follow. The audit has
each, done or refused.
"""

# No postponed annotations: FastAPI has to see ``Request`` and the bodies, of a function inside one.

import time
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lora_fs.sidecar.errors import WaitTimeout
from lora_fs.sidecar.model import AdapterStatus, JsonObject, Phase
from lora_fs.sidecar.registry.lifecycle.selectors import Selection
from lora_fs.sidecar.server.bodies import (
    AdapterList,
    DynamoList,
    ErrorBody,
    LoadBody,
    LoraInfo,
    SageMakerBody,
    UnloadBody,
)
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.answers import LOAD, answered_by
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.errors import respond
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import Loaded, ReplicaPort, Served
from lora_fs.sidecar.server.routes.changes import ERRORS, AdapterName, Answers, Change, Changes
from lora_fs.sidecar.server.routes.listing import Listing

# With a response class that has a media type of its own, FastAPI gives it to the errors, too. Without a 422
# it would describe one of its own.
_ANSWERS: Answers = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    **ERRORS,
}

_STATUS: dict[Phase, Literal["loaded", "unloading", "failed"]] = {
    Phase.READY: "loaded",
    Phase.DRAINING: "unloading",
    Phase.FAILED: "failed",
}

_Name = Annotated[str | None, Query(description="A pattern of the name: `*`, `?` and `[…]` as in a shell")]
_Selector = Annotated[
    str | None,
    Query(alias="labelSelector", description="`key=value`, `key!=value`, `key`, `!key`, commas between them"),
]
_Phase = Annotated[Phase | None, Query(description="Only adapters in this phase here")]


def router(replica: ReplicaPort, admin: Admin, trail: Trail) -> APIRouter:
    """The routes. ``trail``: records admin calls."""
    changes = Changes(replica, admin, trail)
    token_first = changes.calls.token_first(
        load=Verb.REGISTER, unload=Verb.UNREGISTER, register=Verb.REGISTER
    )
    routes = APIRouter(tags=["adapters"], route_class=token_first)

    async def loaded(body: LoadBody, request: Request) -> Change:
        async with changes.admitted(request, Verb.REGISTER, body.lora_name, body.lora_path) as change:
            await change.load(body.lora_path, in_place=body.load_inplace)
        return change

    @routes.post(
        "/v1/load_lora_adapter",
        summary="Register an adapter everywhere, and load it here",
        response_class=Response,
        responses=_ANSWERS,
    )
    async def load(body: LoadBody, request: Request) -> Response:
        answer: Response
        try:
            change = await loaded(body, request)
            answer = PlainTextResponse(f"Success: LoRA adapter '{change.name}' added successfully.")
            wrote: object = change.loaded
        except WaitTimeout as error:
            answer, wrote = respond(error), error.wrote
        # A gateway loads this very revision on the other replicas, and takes it back where one refuses.
        if isinstance(wrote, Loaded):
            made = wrote.made.model_dump_json().encode()
            answer.raw_headers += [*answered_by(wrote.record), (LOAD, made)]
        return answer

    @routes.post(
        "/v1/unload_lora_adapter",
        summary="Unregister an adapter everywhere",
        response_class=Response,
        responses=_ANSWERS,
    )
    async def unload(body: UnloadBody, request: Request) -> Response:
        async with changes.admitted(request, Verb.UNREGISTER, body.lora_name) as change:
            await change.unload()
        return PlainTextResponse(f"Success: LoRA adapter '{change.name}' removed successfully.")

    @routes.post(
        "/adapters",
        summary="Register an adapter everywhere, and load it here: SageMaker's call",
        response_class=Response,
        responses=_ANSWERS,
    )
    async def register(body: SageMakerBody, request: Request) -> Response:
        wanted = LoadBody(lora_name=body.name, lora_path=body.src, load_inplace=body.load_inplace)
        await loaded(wanted, request)
        return PlainTextResponse(f"Adapter {body.name} registered")

    @routes.delete(
        "/adapters/{adapter_name:path}",
        summary="Unregister an adapter everywhere: SageMaker's call",
        response_class=Response,
        responses=_ANSWERS,
    )
    async def unregister(adapter_name: AdapterName, request: Request) -> Response:
        await unload(UnloadBody(lora_name=adapter_name), request)
        return PlainTextResponse(f"Adapter {adapter_name} unregistered")

    listing = Listing(replica)

    @routes.get(
        "/v1/lora_adapters",
        summary="Records with this replica's status and residency",
        responses={200: {"model": AdapterList}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def adapters(
        request: Request, name: _Name = None, selector: _Selector = None, phase: _Phase = None
    ) -> Response:
        selection = Selection.parse(name, selector)
        sight = await admin.sight(request.headers)
        replica.check_read()
        downloads = [
            one.model_dump(mode="json") for one in replica.downloads().values() if one.namespace in sight
        ]
        body = {"object": "list", "replica": replica.replica_id, "downloads": downloads}
        answer = await listing.answer(body, sight, selection, phase)
        return Response(answer, media_type="application/json")

    @routes.get(
        "/v1/list_lora_adapters",
        summary="What is in the engine or on its way, as routers ask for it",
    )
    async def loras(request: Request) -> DynamoList:
        sight, residency = await admin.sight(request.headers), replica.residency()
        replica.check_read()
        told = [(name, one) for name, one in replica.notable()[0].items() if one.key[0] in sight]
        return DynamoList(loras=[_info(name, one, replica.lookup(name), residency) for name, one in told])

    return routes


def _info(
    name: str, status: AdapterStatus, served: Served | None, residency: Mapping[str, JsonObject]
) -> LoraInfo:
    """``served``: None if the name is withdrawn and still has requests."""
    namespace, model, revision, _ = status.key
    held = residency.get(name)
    return LoraInfo(
        lora_id=name,
        status=_STATUS.get(status.phase, "loading"),
        base_model=served.record.spec.base_model if served is not None else model,
        namespace=namespace,
        revision=revision,
        memory_usage=served.record.spec.size_bytes if served is not None else None,
        last_used=time.time() - held["idle_s"] if held is not None else None,
    )
