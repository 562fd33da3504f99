"""The streaming reverse proxy: load a lazy adapter, forward, pass bytes through as they come.

An ASGI endpoint of its own, since a framework's response classes would buffer. A client that
leaves cancels the engine's request at once and releases the adapter.
"""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

import aiohttp
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from lora_fs.sidecar.errors import EngineUnavailable, InputError, LoraFsError, NotFound
from lora_fs.sidecar.server.auth import ALL, HEADER, Admin, Sight
from lora_fs.sidecar.server.errors_http import error_response, refuse, respond
from lora_fs.sidecar.server.model_field import find_model, hides_its_model
from lora_fs.sidecar.server.ports import ReplicaPort, Served

PATHS = ("/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/version")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer trailers "
    b"transfer-encoding upgrade".split()
)
_LORA_ROUTES = frozenset({"load_lora_adapter", "unload_lora_adapter"})
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", HEADER.encode()}

_HIDDEN = (
    "this form does not name its model where it can be checked: send JSON, or multipart/form-data with one "
    'part whose first line is Content-Disposition: form-data; name="model"'
)


class TooLarge(InputError):
    """The body is over the bound."""


class Proxy:
    """Forwards one request. ``session`` is opened by the app's lifespan."""

    def __init__(
        self,
        replica: ReplicaPort,
        engine_url: str,
        admin: Admin,
        *,
        hold_timeout_s: float,
        max_body_bytes: int,
    ) -> None:
        self._replica, self._engine_url, self._admin = replica, engine_url, admin
        self._hold_timeout_s, self._max_body_bytes = hold_timeout_s, max_body_bytes
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("latin-1")
        if _leaves_its_route(path):
            message = f"the path {path[:200]!r} is not one this sidecar forwards"
            await error_response(message, 400, "InvalidUserInput")(scope, receive, send)
            return
        try:
            body = await self._body(scope, receive)
        except ClientDisconnect:
            return
        except TooLarge as error:
            await error_response(str(error), 413, "InvalidUserInput")(scope, receive, send)
            return
        work = asyncio.create_task(self._answer(scope, body, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        chunks, size = [], 0
        async for chunk in Request(scope, receive).stream():
            size += len(chunk)
            if size > self._max_body_bytes:
                raise TooLarge(f"the body is over {self._max_body_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        content_type = headers.get("content-type", "")
        field = find_model(content_type, body)
        try:
            sight = await self._admin.sight(headers)
            if sight != ALL and hides_its_model(content_type, body):
                raise InputError(_HIDDEN)
            if field is None:
                await self._forward(scope, body, send, None)
                return
            model = field.name
            served = self._visible(model, sight)
            if served is None:
                if not self._replica.passes_through(model):
                    if not self._replica.base_cards():
                        raise EngineUnavailable("the engine has not answered yet: its models are unknown")
                    raise NotFound(f"The model `{model[:200]}` does not exist.")
                await self._forward(scope, body, send, None)
                return
            adapter = str(served.record.key)
            for again in (True, False):
                async with self._replica.hold(model, self._hold_timeout_s) as engine_name:
                    sent = body if engine_name == model else field.renamed(engine_name)
                    if await self._forward(scope, sent, send, adapter, unless_unknown=again):
                        return
                # An engine that restarted since the last look does not know the adapter.
                self._replica.forget(engine_name)
        except LoraFsError as error:
            await respond(error, "model")(scope, receive, send)
        except HTTPException as error:
            await refuse(error)(scope, receive, send)

    def _visible(self, model: str, sight: Sight) -> Served | None:
        served = self._replica.lookup(model)
        return served if served is not None and served.record.namespace in sight else None

    async def _forward(
        self,
        scope: Scope,
        body: bytes,
        send: Send,
        adapter: str | None,
        *,
        unless_unknown: bool = False,
    ) -> bool:
        """Pass the engine's answer on; False, and nothing sent, if it was a 404 not wanted."""
        assert self.session is not None, "the app's lifespan opens it"
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = URL(self._engine_url + path.decode("latin-1"), encoded=True)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _NOT_FORWARDED
            and not (name == b"authorization" and await self._admin.is_ours(value.decode("latin-1")))
        ]
        try:
            answer = await self.session.request(
                scope["method"], url, data=body or None, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"the engine did not take the request: {error}") from error
        try:
            if unless_unknown and answer.status == 404:
                return False
            raw = [(n, v) for n, v in answer.raw_headers if n.lower() not in _HOP_BY_HOP]
            if adapter is not None:
                raw.append((b"x-lora-fs-adapter", adapter.encode()))
            await send({"type": "http.response.start", "status": answer.status, "headers": raw})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        finally:
            answer.close() if not answer.content.at_eof() else answer.release()


def _leaves_its_route(path: str) -> bool:
    """Whether the engine might read ``path`` as another route than the one matched here.

    The sidecar alone loads and unloads: its own routes for that check the caller's token.
    """
    plain = unquote(unquote(path)).replace("\\", "/")
    segments = plain.rstrip("/").split("/")[1:]
    return not {".", "..", ""}.isdisjoint(segments) or segments[-1] in _LORA_ROUTES


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
