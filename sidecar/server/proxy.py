"""The streaming reverse proxy: load a lazy adapter, forward, pass bytes through as they come.

An ASGI endpoint of its own, since a framework's response classes would buffer. A client that
leaves cancels the engine's request at once and releases the adapter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote

import aiohttp
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from lora_fs.sidecar import tracing
from lora_fs.sidecar.engine.vllm_http import not_there
from lora_fs.sidecar.errors import EngineUnavailable, InputError, LoraFsError, NotFound, TooLarge
from lora_fs.sidecar.server.auth import ALL, HEADER, Admin, Sight
from lora_fs.sidecar.server.canary import REVISION, Renamed, user_of
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
_OURS = frozenset({b"date", b"server"})  # uvicorn writes them on every answer
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", HEADER.encode()}

_HIDDEN = (
    "this form does not name its model where it can be checked: send JSON, or multipart/form-data with one "
    'part whose first line is Content-Disposition: form-data; name="model"'
)


@dataclass(frozen=True, slots=True)
class _Through:
    """What a request goes through: the adapter, and what the engine calls it."""

    served: Served
    asked: str
    engine_name: str

    def headers(self) -> list[tuple[bytes, bytes]]:
        key = self.served.record.key
        return [(b"x-lora-fs-adapter", str(key).encode()), (REVISION, key.revision.encode())]


class Proxy:
    """Forwards one request. ``session`` is opened by the app's lifespan.

    Args:
        user_header: the request's header that says who asks, for canaries.
    """

    def __init__(
        self,
        replica: ReplicaPort,
        engine_url: str,
        admin: Admin,
        *,
        hold_timeout_s: float,
        max_body_bytes: int,
        user_header: str | None = None,
    ) -> None:
        self._replica, self._engine_url, self._admin = replica, engine_url, admin
        self._user_header = user_header
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
        about = {"http__request__method": scope["method"], "url__path": path[:200]}
        with tracing.span("proxy", carrier=Headers(scope=scope), **about):
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
            if field is None or not field.name:  # to vLLM an empty name is its base model's
                await self._forward(scope, body, send, None)
                return
            model = field.name
            served = self._visible(model, sight)
            if served is None:
                if not self._replica.passes_through(model):
                    if not self._replica.base_cards():
                        raise EngineUnavailable("the engine has not answered yet: its models are unknown")
                    self._replica.check_read()
                    raise NotFound(f"The model `{model[:200]}` does not exist.")
                await self._forward(scope, body, send, None)
                return
            chosen = self._replica.choose(served, user_of(headers, self._user_header, field.user))
            tracing.note(lora_fs__adapter=str(chosen.record.key))
            for again in (True, False):
                async with self._replica.hold(chosen.name, self._hold_timeout_s) as engine_name:
                    sent = body if engine_name == model else field.renamed(engine_name)
                    through = _Through(chosen, model, engine_name)
                    if await self._forward(scope, sent, send, through, unless_unknown=again):
                        return
                # An engine that restarted since the last look does not know the adapter.
                self._replica.forget(engine_name)
        except LoraFsError as error:
            tracing.note(error__type=type(error).__name__)
            await respond(error, "model")(scope, receive, send)
        except HTTPException as error:
            await refuse(error)(scope, receive, send)

    def _here(self, location: bytes) -> bytes:
        """Where the engine sends on to itself, without its address, which no client has to reach."""
        rest = location.removeprefix(self._engine_url.encode())
        return rest if rest.startswith(b"/") else location

    def _visible(self, model: str, sight: Sight) -> Served | None:
        served = self._replica.lookup(model)
        return served if served is not None and served.record.namespace in sight else None

    async def _forward(
        self,
        scope: Scope,
        body: bytes,
        send: Send,
        through: _Through | None,
        *,
        unless_unknown: bool = False,
    ) -> bool:
        """Pass the engine's answer on; False, and nothing sent, if it was a 404 not wanted."""
        assert self.session is not None, "the app's lifespan opens it"
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = URL(self._engine_url + path.decode("latin-1"), encoded=True)
        renamed = through is not None and through.engine_name != through.asked
        dropped = _NOT_FORWARDED | {b"accept-encoding"} if renamed else _NOT_FORWARDED
        plain = [("accept-encoding", "identity")] if renamed else []  # what is coded cannot be read here
        headers = plain + [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in dropped
            and not (name == b"authorization" and await self._admin.is_ours(value.decode("latin-1")))
        ]
        try:
            answer = await self.session.request(
                scope["method"],
                url,
                data=body or None,
                headers=tracing.outgoing(headers),
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            raise not_there(self._engine_url, error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"the engine did not take the request: {error}") from error
        try:
            tracing.note(http__response__status_code=answer.status)
            if unless_unknown and answer.status == 404:
                return False
            raw = [
                (n, self._here(v) if n.lower() == b"location" else v)
                for n, v in answer.raw_headers
                if n.lower() not in _HOP_BY_HOP | _OURS
            ]
            names: Renamed | None = None
            if through is not None:
                raw += through.headers()
                if renamed and Renamed.concerns(answer.headers.get("content-type", "")):
                    names = Renamed(through.engine_name, through.asked)
                    raw = [(n, v) for n, v in raw if n.lower() != b"content-length"]
            await send({"type": "http.response.start", "status": answer.status, "headers": raw})
            async for chunk in answer.content.iter_any():
                data = chunk if names is None else names.feed(chunk)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            rest = b"" if names is None else names.end()
            await send({"type": "http.response.body", "body": rest, "more_body": False})
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
