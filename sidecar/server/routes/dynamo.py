"""Dynamo's own calls, ``/v1/loras``, for its operator and what else drives its workers.

Their bodies and answers are those of Dynamo 1.6; errors are ours. One difference, as replicas share the list:
a load or an unload at one replica holds for all, and the same call at another replica answers "done".

Source: NVIDIA Dynamo 1.6.0, LoRA adapters; ai-dynamo/dynamo, lib/runtime/src/system_status_server.rs at
0116f785.
"""

# No postponed annotations: FastAPI has to see ``Request`` and the bodies, of a function inside one.

import json
from typing import Literal

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.errors import Conflict, InputError, NotFound
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.server.bodies import ErrorBody
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import ReplicaPort
from lora_fs.sidecar.server.routes.changes import ERRORS, AdapterName, Answers, Changes
from lora_fs.sidecar.sources.local import path_of
from lora_fs.sidecar.sources.offer import is_of
from lora_fs.sidecar.sources.uri import parse, redacted, scheme_of

SEEN_S = 5.0  # to see here what another replica registered
LOOK_EVERY_S = 0.05


class LoraSource(BaseModel):
    """Where an adapter comes from."""

    uri: str = Field(description="`file://`, `s3://`, `hf://` and the other sources of a load")


class LoadLora(BaseModel):
    """``POST /v1/loras``: Dynamo's LoadLoraRequest."""

    lora_name: str = Field(description="What clients send as their model")
    source: LoraSource = Field(description="Where it lies")


class LoraDone(BaseModel):
    """The answer to a load or an unload: Dynamo's LoraResponse."""

    status: Literal["success"] = "success"
    message: str = Field(description="What was done")
    lora_name: str = Field(description="As in the request")
    lora_id: int | None = Field(None, description="The record's `int_id`; left out where there is no record")

    model_config = ConfigDict(json_schema_extra={"required": ["status", "message", "lora_name"]})


class Loras(BaseModel):
    """``GET /v1/loras``: every registered adapter, in the engine or not."""

    status: Literal["success"] = "success"
    loras: dict[str, int] = Field(description="The record's `int_id`, by the name that clients send")
    count: int = Field(description="Of `loras`")

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


_ANSWERS: Answers = {200: {"model": LoraDone}, **ERRORS}


def router(replica: ReplicaPort, admin: Admin, trail: Trail, *, hold_timeout_s: float) -> APIRouter:
    """The routes. ``trail``: records admin calls."""
    changes = Changes(replica, admin, trail)
    routes = APIRouter(tags=["dynamo"], route_class=changes.calls.token_first(load=Verb.REGISTER))

    async def loaded(name: str, uri: str) -> Record | None:
        """Load a name that serves ``uri``, and return its record; None if the name serves nothing.

        Raises:
            Conflict: the name serves another source. See ``ReplicaPort.hold``.
        """
        served = replica.lookup(name)
        if served is None:
            return None
        if not _is_from(served.record, uri):
            raise Conflict(
                f"{name} is registered from another source: unload it first, or register what lies there as "
                "its next revision, with load_inplace in POST /v1/load_lora_adapter"
            )
        async with replica.hold(name, hold_timeout_s):
            return served.record

    @routes.post(
        "/v1/loras",
        summary="Register an adapter everywhere, and load it here; a repeat changes nothing",
        responses=_ANSWERS,
        response_class=JSONResponse,
    )
    async def load(body: LoadLora, request: Request) -> Response:
        uri, how = body.source.uri, "already loaded"
        async with changes.admitted(request, Verb.REGISTER, body.lora_name, uri) as change:
            name = change.name
            change.record = await loaded(name, uri)
            if change.record is None:
                try:
                    await change.load(uri)
                    how = "loaded successfully"
                except Conflict:
                    # An operator asks all replicas at once: one registered it, the others are to see it.
                    for _ in range(round(SEEN_S / LOOK_EVERY_S)):
                        if replica.lookup(name) is not None or replica.passes_through(name):
                            break
                        await anyio.sleep(LOOK_EVERY_S)
                    change.record = await loaded(name, uri)
                    if change.record is None:
                        raise
        return _done(body.lora_name, how, change.record)

    @routes.delete(
        "/v1/loras/{lora_name:path}",
        summary="Unregister an adapter everywhere; an unknown one is no error",
        responses=_ANSWERS,
        response_class=JSONResponse,
    )
    async def unload(lora_name: AdapterName, request: Request) -> Response:
        async with changes.admitted(request, Verb.UNREGISTER, lora_name) as change:
            served = replica.lookup(change.name)
            try:
                await change.unload()
            except NotFound:  # another replica got the call before
                return _done(lora_name, "not registered")
        return _done(lora_name, "unloaded successfully", served.record if served is not None else None)

    @routes.get(
        "/v1/loras",
        summary="The ids of all adapters by name",
        responses={200: {"model": Loras}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def listed(request: Request) -> Response:
        sight, catalog = await admin.sight(request.headers), replica.catalog()
        replica.check_read()

        def render() -> bytes:
            seen = (one for one in catalog.in_order() if one.record.namespace in sight)
            ids = {one.name: one.record.spec.int_id for one in seen}
            return json.dumps({"status": "success", "loras": ids, "count": len(ids)}).encode()

        return Response(await anyio.to_thread.run_sync(render), media_type="application/json")

    return routes


def _is_from(record: Record, source: str) -> bool:
    """Whether a record came from a source. Compares also the parts of URLs that are never shown."""
    kept = record.spec.source
    if _place(kept.uri) != _place(source):
        return False
    try:
        return scheme_of(source) in ("", "file") or is_of(kept.pin, parse(source))
    except InputError:
        return True


def _place(source: str) -> str:
    """A source without its secrets, written as a record has it."""
    try:
        return str(path_of(source) if scheme_of(source) in ("", "file") else parse(source))
    except InputError:
        return redacted(source)


def _done(name: str, how: str, record: Record | None = None) -> Response:
    body = LoraDone(
        message=f"LoRA adapter '{name[:200]}' {how}",
        lora_name=name,
        lora_id=record.spec.int_id if record is not None else None,
    )
    return JSONResponse(body.model_dump(exclude_none=True))
