"""Before every request: the adapter it names is ready, and stays until the answer has been sent.

An ASGI middleware of the API server. A request that names no adapter of the registry, or one that its
sender may not read, passes as it is: to vLLM that name is unknown. Any other waits here for its load,
while the engine goes on with everybody else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_fs.sidecar.errors import EngineUnavailable, InputError, LoraFsError
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.server.canary import REVISION, user_of
from lora_fs.sidecar.server.errors_http import refuse, respond
from lora_fs.sidecar.server.model_field import find_model
from lora_fs.worker_patch.api.asked import Asked, asked
from lora_fs.worker_patch.api.engine import InProcess

logger = logging.getLogger(__name__)

_OWN = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters", "/v1/loras"})


class Behind(NamedTuple):
    """What the gate asks, once vLLM has made it."""

    replica: Replica
    engine: InProcess
    hold_timeout_s: float
    admin: Admin
    user_header: str | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    user: object = None
    background: object = None


_body = msgspec.json.Decoder(_Body)


class Gate:
    """``behind`` gives None as long as the server is starting."""

    def __init__(self, app: ASGIApp, behind: Callable[[], Behind | None]) -> None:
        self._app, self._behind = app, behind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        behind = self._behind()
        if behind is None or scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in _OWN:
            await self._app(scope, receive, send)
            return
        body, receive = await _read(receive)
        asks = _asked(scope, body)
        name = asks.model
        served = behind.replica.lookup(name) if name is not None else None
        try:
            if served is not None and behind.admin.limits_reading:
                sight = await behind.admin.sight(Headers(scope=scope))
                served = served if served.record.namespace in sight else None
        except HTTPException as error:
            await refuse(error)(scope, receive, send)
            return
        if name is None or served is None:
            with behind.engine.serving():
                await self._app(scope, receive, send)
            return
        try:
            if asks.background is True:
                raise InputError("`background`: an adapter is held until the answer is sent; ask without it")
            user = user_of(Headers(scope=scope), behind.user_header, asks.user)
            chosen = behind.replica.choose(served, user)
            await self._pass(behind, name, chosen, scope, receive, send)
        except LoraFsError as error:
            await respond(error, "model")(scope, receive, send)

    async def _pass(
        self, behind: Behind, name: str, chosen: Served, scope: Scope, receive: Receive, send: Send
    ) -> None:
        replica, engine = behind.replica, behind.engine
        for _ in range(2):  # an adapter may have been evicted since it was last seen
            async with replica.hold(chosen.name, behind.hold_timeout_s) as engine_name:
                request = engine.requests.get(engine_name)
                if request is not None:
                    with engine.using(request):
                        if await engine.hold(request):
                            token = asked.set(Asked(name, request))
                            try:
                                naming = _naming(request.lora_path, chosen.record.revision, send)
                                with engine.serving():
                                    await self._app(scope, receive, naming)
                            finally:
                                asked.reset(token)
                            return
            replica.forget(engine_name)
        raise EngineUnavailable(f"{name} was evicted from host memory while it was waited for")


def _asked(scope: Scope, body: bytes) -> _Body:
    """The model and the user that a body names, and whether its answer is to be fetched later."""
    content_type = Headers(scope=scope).get("content-type", "")
    if not content_type.startswith("multipart/"):
        try:
            return _body.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # vLLM takes UTF-16, a byte order mark and NaN, too, or says what is wrong
    field = find_model(content_type, body)
    return _Body(field.name, field.user) if field is not None else _Body()


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The whole body, and what gives it again to the application."""
    chunks: list[bytes] = []
    first: Message | None = None
    while first is None:
        message = await receive()
        chunks.append(message.get("body", b""))
        if message["type"] != "http.request":
            first = message  # the client left
        elif not message.get("more_body"):
            first = {"type": "http.request", "body": b"".join(chunks), "more_body": False}
    given: list[Message] = [first]

    async def again() -> Message:
        return given.pop() if given else await receive()

    return b"".join(chunks), again


def _naming(path: str, revision: str, send: Send) -> Send:
    """Say in the answer's headers which bytes served it, ``<digest>/<name>``, and their revision."""
    served = "/".join(path.rsplit("/", 2)[-2:]).encode("latin-1", "replace")
    told = ((b"x-lora-fs-adapter", served), (REVISION, revision.encode()))

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *told]
        await send(message)

    return named
