"""``/pause``, ``/resume`` and ``/server_info``, as trainers call them.

A pause holds new requests at this replica's proxy, and frees nothing in the engine. Running requests go
on: an adapter's weights never change under a request, so a new revision freezes nothing.
"""

# No postponed annotations: FastAPI has to see ``Request`` and the bodies, of a function inside one.

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import aiohttp
from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from lora_fs.sidecar.errors import EngineUnavailable, InputError, NotFound, WaitTimeout
from lora_fs.sidecar.server.middleware.access import Admin, Sight
from lora_fs.sidecar.server.middleware.admin import AdminCalls
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.pauses import ALL, Key, Pauses
from lora_fs.sidecar.server.ports import ReplicaPort, full_name, namespace_of
from lora_fs.sidecar.server.routes.changes import ERRORS

Mode = Annotated[
    Literal["keep", "wait", "abort"],
    Query(description="`keep`: answer at once; `wait`: when no request is under way; `abort` is refused"),
]
LoraName = Annotated[str | None, Query(description="Only requests for this adapter; without it all requests")]


class PauseBody(BaseModel):
    """The adapters that pause now."""

    status: Literal["paused", "resumed"] = Field(description="What was done")
    paused: list[str] = Field(
        description="`namespace/name` of each paused adapter that the caller may read; `*` for all requests"
    )


def router(
    replica: ReplicaPort,
    admin: Admin,
    trail: Trail,
    pauses: Pauses,
    ask_engine: Callable[[str, str], Awaitable[tuple[int, bytes, str | None]]],
    *,
    hold_timeout_s: float,
) -> APIRouter:
    """The routes of a sidecar alone: vLLM has its own, for its operator.

    Args:
        ask_engine: see ``Proxy.asked_plainly``.
    """
    calls = AdminCalls(replica, admin, trail)
    routes = APIRouter(
        tags=["fleet"], route_class=calls.token_first(pause=Verb.REGISTER, resume=Verb.REGISTER)
    )

    def key_of(name: str | None) -> Key:
        """The key of a call's name, which may no longer serve. Raises InputError: it has a revision."""
        if name is None:
            return ALL
        if "@" in name:
            raise InputError("a pause is of a name with all its revisions: leave out @ and the revision")
        namespace = namespace_of(name, replica.namespaces)
        if namespace is None:
            raise NotFound(f"no namespace of {name[:200]!r} is served here")
        return namespace, name.rpartition("/")[2]

    @asynccontextmanager
    async def admitted(request: Request, act: str, name: str | None) -> AsyncIterator[Sight]:
        """Admit a caller who may register in the adapter's namespace; without a name, in every served one.

        Yields what the caller may read.
        """
        served = replica.namespaces
        first, *others = served if name is None else (namespace_of(name, served),)
        async with calls.admitted(request, Verb.REGISTER, name or "*", namespace=first, act=act):
            for namespace in others:
                await admin.admit(request, Verb.REGISTER, namespace)
            yield await admin.sight(request.headers)

    async def quiet(key: Key) -> None:
        try:
            async with asyncio.timeout(hold_timeout_s):
                await pauses.quiet(key)
        except TimeoutError as error:
            pauses.resume(key)
            raise WaitTimeout(
                f"requests were still under way after {hold_timeout_s:g} s: nothing is paused"
            ) from error

    @routes.post("/pause", summary="Let new requests wait, all or those for one adapter", responses=ERRORS)
    async def pause(request: Request, mode: Mode = "keep", lora_name: LoraName = None) -> PauseBody:
        async with admitted(request, "pause", lora_name) as sight:
            if mode == "abort":
                raise InputError("no request is aborted here: pause with mode=keep or mode=wait")
            key = key_of(lora_name)
            if lora_name is not None and replica.lookup(full_name(lora_name, replica.namespaces)) is None:
                replica.check_read()
                raise NotFound(f"the adapter {lora_name[:200]!r} is not served here")
            pauses.pause(key)
            if mode == "wait":
                await quiet(key)
            return PauseBody(status="paused", paused=pauses.named(sight, key))

    @routes.post("/resume", summary="Let them go on: all, or those for one adapter", responses=ERRORS)
    async def resume(request: Request, lora_name: LoraName = None) -> PauseBody:
        async with admitted(request, "resume", lora_name) as sight:
            pauses.resume(key_of(lora_name))
            return PauseBody(status="resumed", paused=pauses.named(sight))

    @routes.get(
        "/server_info", summary="The engine's configuration, in its development mode", responses=ERRORS
    )
    async def server_info(request: Request) -> Response:
        for namespace in replica.namespaces:
            await admin.admit(request, Verb.REGISTER, namespace)
        try:
            status, body, kind = await ask_engine("/server_info", request.url.query)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"the engine did not answer: {error}") from error
        if status == 404:
            raise HTTPException(
                404, "the engine tells its configuration in development mode alone: VLLM_SERVER_DEV_MODE=1"
            )
        return Response(body, status, media_type=kind)

    return routes
