"""One hop: choose a replica, pass the request on, stream its answer back.

Each request has ``Expect: 100-continue``, so that its body goes only to a replica that asks for it. A
replica that did not ask has not got the request, and the gateway may try another. Otherwise the request may
have run, and the answer says so. A body lies here whole, or, if it is an upload, passes as it comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from yarl import URL

from lora_fs.sidecar import tracing
from lora_fs.sidecar.errors import InputError, ServerUnavailable, TemporaryError, WaitTimeout
from lora_fs.sidecar.gateway.choice import Choice
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.outliers import Outcome, outcome
from lora_fs.sidecar.gateway.prefix import chain
from lora_fs.sidecar.gateway.routing import Router, Ticket
from lora_fs.sidecar.gateway.watch import NO_FILES, NO_MORE, Watch
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.leaving import while_it_waits
from lora_fs.sidecar.server.middleware import errors
from lora_fs.sidecar.server.middleware.access import HEADER
from lora_fs.sidecar.server.middleware.body_limit import held_body
from lora_fs.sidecar.server.middleware.origin import Sites
from lora_fs.sidecar.server.proxy.headers import appended, backward, onward, written
from lora_fs.sidecar.server.proxy.model_rewrite import ModelField, find_fields
from lora_fs.sidecar.server.proxy.upstream import SAFE, pieces

VIA: Final = b"1.1 lora-fs-gateway"
TAKE_S: Final = 5.0  # in which a replica asks for a request's body
MOST_NAME: Final = 3 * 128 + 2  # characters of namespace/name@revision
UPLOAD_TAKE_S: Final = 30.0  # and for an upload: first it looks for a place on the volume
_CREDENTIALS: Final = frozenset({b"authorization", HEADER.encode()})
_GONE: Final = "EngineGone"
_CHANGES: Final = ("/v1/lora_adapters", "/v1/loras")  # below these a replica changes adapters

logger = logging.getLogger(__name__)


class NotReached(Exception):
    """The replica has not got the request."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body, as a replica gets it.

    Attributes:
        size: in bytes; 0: there is none; None: unknown.
        pieces: begins it. Called once for each replica that asks for it.
        is_kept: whether it may begin again, at another replica.
        take_s: seconds in which a replica asks for it.
    """

    size: int | None
    pieces: Callable[[], AsyncIterator[bytes | memoryview]]
    is_kept: bool = True
    take_s: float = TAKE_S


class Hop:
    """The endpoint of every path that a replica serves.

    Args:
        hold_timeout_s: how long a request may wait for a replica.
        idle_timeout_s: in which a replica takes one piece of a body.

    Attributes:
        session: opened by the app.
    """

    def __init__(
        self,
        router: Router,
        watch: Watch,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        sites: Sites,
        hold_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._sites = sites
        self._router, self._watch, self._metrics, self._clock = router, watch, metrics, clock
        self._hold_timeout_s, self._idle_timeout_s = hold_timeout_s, idle_timeout_s
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends it at the replica at once."""
        await while_it_waits(self._answer(scope, send), receive)

    async def _answer(self, scope: Scope, send: Send) -> None:
        held, headers, began = held_body(scope), Headers(scope=scope), self._clock()
        self.check(scope, headers)
        fields = await find_fields(headers.get("content-type", ""), held.body)
        name = fields.name if isinstance(fields, ModelField) else ""
        is_adapters = 0 < len(name) <= MOST_NAME and name not in self._watch.base_names
        adapter = name if is_adapters else None  # whatever else a client sends is kept nowhere
        seed = "" if adapter is None else self._watch.digest_of(adapter)
        hashes = chain(seed, fields.prompt) if fields.prompt else ()
        del fields
        body = Body(len(held.body), lambda: pieces((held.body,)))
        await self.pass_through(scope, send, body, held.release, adapter, hashes, began)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request by its head.

        Raises:
            HTTPException: 508 if it came through a gateway; 403 as ``check_site``.
            InputError: it has two content types.
        """
        if any(VIA.decode() in one for one in headers.getlist("via")):
            raise HTTPException(508, "the request came through a gateway already: a replica's address is one")
        if scope["method"] not in SAFE and scope["path"].startswith(_CHANGES):
            check_site(self._sites, headers)
        if len(headers.getlist("content-type")) > 1:
            raise InputError("the request has two Content-Type headers: send one")

    async def pass_through(
        self,
        scope: Scope,
        send: Send,
        body: Body,
        release: Callable[[], None],
        adapter: str | None,
        hashes: tuple[int, ...],
        began: float,
    ) -> None:
        """Pass a request on to a replica, and its answer back.

        Args:
            release: called once the body is not needed any more.
            adapter: see ``Ticket``. hashes: of the prompt's blocks.
            began: when the request came.
        Raises:
            TemporaryError, WaitTimeout: no replica took it. ServerUnavailable: one did not answer.
        """
        tried, why = frozenset[str](), ""
        while True:
            async with self._routed(adapter, hashes, tried, why) as ticket:
                assert ticket.peer is not None
                peer = ticket.peer.name
                if tried:
                    self._metrics.retried += 1
                else:
                    self._metrics.queued.observe(self._clock() - began)
                try:
                    async with self._sent(scope, body, peer) as answer:
                        release()
                        self._router.answered(ticket, served=answer.status < 400)
                        is_whole = await self._pass_on(answer, send, peer)
                    self._judge(scope, peer, _outcome(answer) if is_whole else Outcome.FAILED)
                    return
                except ServerUnavailable:
                    self._judge(scope, peer, Outcome.FAILED)
                    raise
                except NotReached as error:
                    why = str(error)
                    self._watch.not_reached(peer, why)
                    tried |= {peer}

    def _judge(self, scope: Scope, peer: str, told: Outcome) -> None:
        """Count an answer for or against its replica. What is no POST, the sidecar may answer alone."""
        seconds = self._router.told(peer, told) if scope["method"] == "POST" else None
        if seconds is not None:
            logger.warning(
                "replica %s is ejected for %g s: its last answers all failed",
                peer,
                seconds,
                extra=event("gateway.replica_ejected", replica=peer, seconds=seconds),
            )

    @asynccontextmanager
    async def _routed(
        self, adapter: str | None, hashes: tuple[int, ...], tried: frozenset[str], why: str
    ) -> AsyncIterator[Ticket]:
        """A place at a replica, held inside the block.

        Raises:
            TemporaryError: no replica is ready. WaitTimeout: none could load the adapter in time.
        """
        given = asyncio.get_running_loop().create_future()

        def start(choice: Choice) -> None:
            if not given.done():
                given.set_result(choice)

        ticket = Ticket(adapter, start, hashes, tried)
        self._router.ask(ticket)
        try:
            try:
                async with asyncio.timeout(self._hold_timeout_s):
                    choice: Choice = await given
            except TimeoutError as error:
                raise WaitTimeout(f"no replica could load {adapter} in {self._hold_timeout_s:g} s") from error
            if choice.peer is None:
                ready = "no replica is ready" if not tried else "no other replica is ready"
                raise TemporaryError(f"{ready}{': ' + why if why else ''}")
            yield ticket
        finally:
            self._router.leave(ticket)

    @asynccontextmanager
    async def _sent(self, scope: Scope, body: Body, peer: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The replica's answer, of which its head has come.

        Raises:
            NotReached: the replica has not got the request.
            ServerUnavailable: it may have got it, and has not answered.
        """
        assert self.session is not None, "the app's lifespan opens it"
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = URL(self._watch.url_of(peer) + path.decode("latin-1"), encoded=True)
        passed = appended(onward(scope["headers"], coded=True, kept=_CREDENTIALS), scope, VIA)
        headers = written(passed)
        if body.size:
            headers.append(("content-length", str(body.size)))
        sending = _Sending(body, self._idle_timeout_s)
        try:
            async with asyncio.timeout(body.take_s if body.size != 0 else None) as sending.limit:
                answer = await self.session.request(
                    scope["method"],
                    url,
                    data=sending.pieces() if body.size != 0 else None,
                    expect100=body.size != 0,
                    headers=tracing.outgoing(headers),
                    allow_redirects=False,
                )
                sending.limit = None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if error.errno in NO_FILES:
                raise TemporaryError(NO_MORE) from error
            raise NotReached(f"replica {peer} takes no connection: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if not sending.has_begun and (body.size != 0 or scope["method"] in SAFE):
                what = str(error) or type(error).__name__
                raise NotReached(f"replica {peer} took no request: {what}") from error
            raise ServerUnavailable(
                f"replica {peer} broke off before it answered: the request may have run, and was not sent to "
                "another replica"
            ) from error
        try:
            is_gone = answer.status == 503 and answer.headers.get(errors.NAME) == _GONE
            if is_gone and (body.is_kept or not sending.has_begun):
                raise NotReached(f"replica {peer} has no engine")
            yield answer
        finally:
            if answer.content.at_eof() and (sending.is_done or body.size == 0):
                answer.release()
            else:
                answer.close()

    async def _pass_on(self, answer: aiohttp.ClientResponse, send: Send, peer: str) -> bool:
        """Send the answer's head, and the rest as it comes. Return whether all of it came."""
        raw = [*backward(answer.raw_headers, answer.status), (b"via", VIA)]  # by it a command knows a gateway
        await send({"type": "http.response.start", "status": answer.status, "headers": raw})
        try:
            is_whole = False
            while not is_whole:
                data = await answer.content.readany()
                is_whole = answer.content.at_eof()
                if data or is_whole:
                    await send({"type": "http.response.body", "body": data, "more_body": not is_whole})
        except (aiohttp.ClientError, TimeoutError) as error:
            told = event("gateway.broke_off", replica=peer, error=type(error).__name__)
            logger.warning("replica %s broke off its answer: %s", peer, error, extra=told)
            tracing.failed(ServerUnavailable.__name__)
            # Without an end, so that the client's connection closes, too.
            return False
        return True


class _Sending:
    """One try to send a body.

    Args:
        idle_s: in which the replica takes one piece.

    Attributes:
        limit: on the time until the replica answers; None once it did.
        has_begun: the replica asked for the body. is_done: it took all of it.
    """

    def __init__(self, body: Body, idle_s: float) -> None:
        self._body, self._idle_s = body, idle_s
        self.limit: asyncio.Timeout | None = None
        self.has_begun = self.is_done = False

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the body, up to an answer that comes before its end: nobody needs the rest then."""
        self.has_begun = True
        self._take_within(None)
        async for piece in self._body.pieces():
            if self.limit is None:
                await asyncio.Event().wait()  # an end here would look like the body's own
            self._take_within(self._idle_s)
            yield piece
            self._take_within(None)
        self.is_done = True

    def _take_within(self, seconds: float | None) -> None:
        if self.limit is not None:
            at = None if seconds is None else asyncio.get_running_loop().time() + seconds
            self.limit.reschedule(at)


def _outcome(answer: aiohttp.ClientResponse) -> Outcome:
    has_reason = errors.NAME in answer.headers or "Retry-After" in answer.headers
    return outcome(answer.status, has_reason=has_reason)


def check_site(sites: Sites, headers: Headers) -> None:
    """Refuse a change that another site's page asks for; raises as ``Sites.check``.

    Without a token in the request, the Host must be a known one: no page of a foreign name has a token.
    """
    has_token = any(name.decode() in headers for name in _CREDENTIALS)
    sites.check(headers, needs_token=has_token)
