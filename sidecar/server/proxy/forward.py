"""The streaming reverse proxy: load a lazy adapter, forward, pass bytes through as they come.

An ASGI endpoint of its own, since a framework's response classes would buffer. A client that
leaves cancels the engine's request at once and releases the adapter.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

import aiohttp
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from lora_fs.sidecar import tracing
from lora_fs.sidecar.engine.vllm_http import not_there
from lora_fs.sidecar.errors import EngineUnavailable, InputError, LoraFsError, NotFound
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.leaving import while_it_waits
from lora_fs.sidecar.server.middleware.access import ALL, Admin, Sight, bearer
from lora_fs.sidecar.server.middleware.answers import answered_by
from lora_fs.sidecar.server.middleware.body_limit import SMALL_BYTES, Held, held_body
from lora_fs.sidecar.server.middleware.errors import refuse, respond
from lora_fs.sidecar.server.middleware.tokens import digest_of
from lora_fs.sidecar.server.pauses import BASE, Pauses
from lora_fs.sidecar.server.ports import ReplicaPort, Served
from lora_fs.sidecar.server.proxy.aborted import Unaborted
from lora_fs.sidecar.server.proxy.canary import Renamed, Stored, counted, user_of
from lora_fs.sidecar.server.proxy.headers import appended, backward, onward, written
from lora_fs.sidecar.server.proxy.model_rewrite import ModelField, Parts, find_fields, hides_its_model
from lora_fs.sidecar.server.proxy.upstream import Upstream, connected, lost_the_adapter, pieces, said_by

PLAIN_S = 5.0  # for a page of the engine's own
PLAIN_CONNECTIONS = 4  # for those pages, beside the requests': a busy engine answers its scrapes
MOST_PLAIN = 16 << 20  # bytes of it
_STORED = "/v1/responses/"  # vLLM may keep an answer, for later calls by its id
_KEY_IS_FOR = ("/v1", "/v2", "/inference", "/cohere")  # vLLM asks for its --api-key there

_HIDDEN = (
    "this form does not name its model where it can be checked: send JSON, or multipart/form-data with one "
    'part whose first line is Content-Disposition: form-data; name="model"'
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Through:
    """What a request goes through: the adapter, and what the engine calls it."""

    served: Served
    asked: str
    engine_name: str


class Proxy:
    """Forward requests, whose bodies ``WholeBody`` holds, inside the block of ``running``.

    Args:
        user_header: the request's header that says who asks, for canaries.
        engine_key: sent to the engine in place of a client's ``Authorization``, which never goes there. A
            client shows this key, or a token of the token file, to use the engine.
    """

    def __init__(
        self,
        replica: ReplicaPort,
        engine_url: str,
        admin: Admin,
        *,
        hold_timeout_s: float,
        user_header: str | None = None,
        upstream: Upstream | None = None,
        engine_key: str | None = None,
    ) -> None:
        upstream = upstream or Upstream()
        self._replica, self._engine_url, self._admin = replica, engine_url, admin
        self._user_header = user_header
        self._key = None if engine_key is None else digest_of(engine_key)
        self._key_header = [] if engine_key is None else [("authorization", f"Bearer {engine_key}")]
        self._hold_timeout_s = hold_timeout_s
        self._upstream = upstream
        self.session: aiohttp.ClientSession | None = None
        self._plain: aiohttp.ClientSession | None = None
        self.pauses = Pauses()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the connections to the engine inside the block."""
        plain = replace(self._upstream, connections=PLAIN_CONNECTIONS)
        async with connected(self._upstream) as self.session, connected(plain) as self._plain:
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_it_waits(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, headers = held_body(scope), Headers(scope=scope)
        content_type = headers.get("content-type", "")
        try:
            if len(headers.getlist("content-type")) > 1:
                raise InputError("the request has two Content-Type headers: send one")
            await self._check_key(scope["path"], headers)
            sight = await self._admin.sight(headers)
            if sight != ALL and await hides_its_model(content_type, held.body):
                raise InputError(_HIDDEN)
            field = await find_fields(content_type, held.body)
            if not isinstance(field, ModelField) or not field.name:
                del field  # to vLLM an empty name is its base model's
                await self._forward(scope, held, send)
                return
            model = field.name
            served = self._visible(model, sight)
            if served is None:
                if not self._passes_through(model, sight):
                    if not self._replica.base_cards():
                        raise EngineUnavailable("the engine has not answered yet: its models are unknown")
                    self._replica.check_read()
                    raise NotFound(f"The model `{model[:200]}` does not exist.")
                del field
                await self._forward(scope, held, send)
                return
            chosen = self._replica.choose(served, user_of(headers, self._user_header, field.user))
            send = counted(send, partial(self._replica.answered, chosen))
            tracing.note(lora_fs__adapter=str(chosen.record.key))
            key = (chosen.record.namespace, chosen.record.name)
            for again in (True, False):
                async with (
                    self.pauses.passing(key, self._hold_timeout_s),
                    self._held(chosen, model) as through,
                ):
                    engine_name = through.engine_name
                    body = (held.body,) if engine_name == model else field.parts(engine_name)
                    async with self._asked(scope, body, through) as answer:
                        said = await said_by(answer) if again and answer.status == 404 else b""
                        if not lost_the_adapter(said, engine_name):
                            del body, field
                            held.release()
                            await self._pass_on(answer, send, through, said)
                            return
                # An engine that restarted since the last look does not know the adapter.
                self._replica.forget(engine_name)
        except LoraFsError as error:
            tracing.note(error__type=type(error).__name__)
            await respond(error, "model", as_vllm=True)(scope, receive, send)
        except HTTPException as error:
            await refuse(error)(scope, receive, send)

    async def _check_key(self, path: str, headers: Headers) -> None:
        """Refuse, as the engine does, who shows no key where the engine has one: its key is sent for all."""
        if self._key is None or not path.startswith(_KEY_IS_FOR):
            return
        given = bearer(headers.get("authorization", ""))
        if given is not None and hmac.compare_digest(digest_of(given), self._key):
            return
        if not await self._admin.knows(headers):
            raise HTTPException(
                401,
                "this call needs the engine's key or a token, as Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _here(self, location: bytes) -> bytes:
        """Where the engine sends on to itself, without its address, which no client has to reach."""
        rest = location.removeprefix(self._engine_url.encode())
        return rest if rest.startswith(b"/") else location

    def _visible(self, model: str, sight: Sight) -> Served | None:
        served = self._replica.lookup(model)
        return served if served is not None and served.record.namespace in sight else None

    def _passes_through(self, model: str, sight: Sight) -> bool:
        kept_to = self._replica.kept_to(model)
        return self._replica.passes_through(model) and (kept_to is None or kept_to in sight)

    @asynccontextmanager
    async def _held(self, chosen: Served, asked: str) -> AsyncIterator[_Through]:
        """Keep an adapter loaded inside the block. Raises as ``ReplicaPort.hold``."""
        # hold() resolves the name once more: after a pause, or at a retry, it may serve another revision.
        chosen = self._replica.lookup(chosen.name) or chosen
        async with self._replica.hold(chosen.name, self._hold_timeout_s) as engine_name:
            yield _Through(chosen, asked, engine_name)

    async def _forward(self, scope: Scope, held: Held, send: Send) -> None:
        """Forward a request without an adapter unchanged."""
        is_work = scope["method"] == "POST"
        waits = self.pauses.passing(BASE, self._hold_timeout_s) if is_work else nullcontext()
        async with waits, self._asked(scope, (held.body,), None) as answer:
            held.release()
            await self._pass_on(answer, send, None)

    async def asked_plainly(self, path: str, query: str) -> tuple[int, bytes, str | None]:
        """Ask the engine for one of its own pages; return status, body and media type.

        Raises:
            aiohttp.ClientError: it did not answer. TimeoutError: not in ``PLAIN_S``.
        """
        assert self._plain is not None, "the app's lifespan opens it by running()"
        url, headers = f"{self._engine_url}{path}?{query}", dict(self._key_header)
        async with asyncio.timeout(PLAIN_S), self._plain.get(url, headers=headers) as answer:
            body = await answer.content.read(MOST_PLAIN)
            while len(body) < MOST_PLAIN and (more := await answer.content.read(MOST_PLAIN - len(body))):
                body += more
            return answer.status, body, answer.headers.get("content-type")

    async def engine_metrics(self) -> str | None:
        """Ask for the engine's own series. None: it does not answer, has none, or too many."""
        if self._plain is None:
            return None  # the app does not run yet
        try:
            status, body, _ = await self.asked_plainly("/metrics", "")
            return body.decode() if status == 200 and len(body) < MOST_PLAIN else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    @asynccontextmanager
    async def _asked(
        self, scope: Scope, body: Parts, through: _Through | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer, of which its head has come. It lets go of ``body``.

        Raises:
            EngineUnavailable: there was none.
        """
        assert self.session is not None, "the app's lifespan opens it by running()"
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = URL(self._engine_url + path.decode("latin-1"), encoded=True)
        passed = appended(onward(scope["headers"], coded=through is None), scope)
        headers = written(passed) + self._key_header
        size = sum(map(len, body))
        if size > SMALL_BYTES:
            headers.append(("content-length", str(size)))
        try:
            answer = await self.session.request(
                scope["method"],
                url,
                data=pieces(body) if size > SMALL_BYTES else b"".join(body) or None,
                headers=tracing.outgoing(headers),
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            gone = not_there(self._engine_url, error)
            self._replica.engine_failed(str(gone))
            raise gone from error
        except aiohttp.ConnectionTimeoutError as error:
            self._replica.engine_failed(None)
            raise EngineUnavailable(self._upstream.full) from error
        except aiohttp.SocketTimeoutError as error:
            self._replica.engine_failed(None)
            raise EngineUnavailable(self._upstream.silent) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            self._replica.engine_failed(None)
            raise EngineUnavailable(f"the engine did not take the request: {error}") from error
        del body
        try:
            yield answer
        finally:
            answer.close() if not answer.content.at_eof() else answer.release()

    async def _pass_on(
        self, answer: aiohttp.ClientResponse, send: Send, through: _Through | None, said: bytes = b""
    ) -> None:
        """Send the answer's head, what was read of it, and the rest as it comes.

        Raises:
            EngineUnavailable: it broke off before anything of it was sent.
        """
        raw = backward(answer.raw_headers, answer.status)
        raw = [(n, self._here(v) if n.lower() == b"location" else v) for n, v in raw]
        names: Renamed | Stored | None = None
        if Renamed.concerns(answer.headers.get("content-type", "")):
            if through is not None:
                names = Renamed(through.engine_name, through.asked, is_error=answer.status >= 400)
            elif answer.url.path.startswith(_STORED):
                names = Stored(self._replica.passes_through)
        if through is not None:
            raw += answered_by(through.served.record)
        if names is not None:
            raw = [(n, v) for n, v in raw if n.lower() != b"content-length"]
        head: Message = {"type": "http.response.start", "status": answer.status, "headers": raw}
        told = Unaborted(send, partial(self._broke_off, through))
        has_head = is_whole = False
        try:
            if not answer.content_length:  # a stream's head does not wait for its first event
                await told(head)
                has_head = True
            while not is_whole:
                chunk = said or await answer.content.readany()
                said, is_whole = b"", answer.content.at_eof()
                data = chunk if names is None else names.feed(chunk)
                if is_whole and names is not None:
                    data += names.end()
                if not has_head:
                    if is_whole and names is not None and answer.method != "HEAD":
                        raw.append((b"content-length", b"%d" % len(data)))
                    await told(head)
                    has_head = True
                if data or is_whole:
                    await told({"type": "http.response.body", "body": data, "more_body": not is_whole})
        except (aiohttp.ClientError, TimeoutError) as error:
            why = event("engine.broke_off", error=type(error).__name__)
            logger.warning("the engine broke off its answer: %s", error, extra=why)
            self._broke_off(through if answer.status < HTTPStatus.BAD_REQUEST else None, told.has_begun)
            if not told.has_begun:
                raise EngineUnavailable(f"the engine broke off its answer: {error}") from error
            # Without an end, so that the client's connection closes, too.

    def _broke_off(self, through: _Through | None, has_begun: bool) -> None:
        """Look at the engine. An answer that had begun counts once more, as an error."""
        self._replica.engine_failed(None)
        if has_begun:
            tracing.failed(EngineUnavailable.__name__)
        if has_begun and through is not None:
            self._replica.answered(through.served, HTTPStatus.BAD_GATEWAY)
