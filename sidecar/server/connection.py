"""A connection's protocol: uvicorn's on httptools, and what that one leaves undone.

httptools parses in C, and judges less than HTTP/1.1 asks for. This module judges each head once more. It
declines upgrades, keeps the request's body, and answers HTTP/1.0 without chunks. A head has bounds in bytes
and in time, and a client that stops reading has a deadline: it would keep its stream's adapter in the engine
for ever.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import sys
import termios
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.joined_writes import JoinedWrites
from lora_fs.sidecar.server.middleware.body_limit import UNREAD
from lora_fs.sidecar.server.middleware.errors import error_response
from lora_fs.sidecar.server.turns import Turns
from lora_fs.sidecar.settings import KEEP_ALIVE_S, SEND_TIMEOUT_S

HEAD_BYTES = 1 << 16  # nginx, Envoy and node take between 8 and 60 KiB
HEAD_S = 60.0
TURN_BYTES = 1 << 14  # parsed in one turn of the loop: as chunks of one byte that takes 0.9 ms

logger = logging.getLogger(__name__)


class BadRequest(Exception):
    """The parser takes it, and HTTP/1.1 does not."""

    def __init__(self, why: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(why)
        self.status = status


def check_head(method: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a head that the parser takes and that another server may read in another way.

    Raises:
        BadRequest: a tunnel, another version than 1.0 and 1.1, not one ``Host``, or a coding besides chunked.
    """
    if method == b"CONNECT":
        raise BadRequest("this server opens no tunnel: send no CONNECT", HTTPStatus.NOT_IMPLEMENTED)
    if version not in ("1.0", "1.1"):
        raise BadRequest(f"the request's version is {version}")
    hosts = [name for name, _ in headers].count(b"host")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise BadRequest(f"the request has {hosts} Host headers: send one")
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise BadRequest("send no Transfer-Encoding besides chunked", HTTPStatus.NOT_IMPLEMENTED)


class _Reading(FlowControl):
    """Pause reading while received bytes wait for the parser."""

    is_behind = False

    def resume_reading(self) -> None:
        if not self.is_behind:
            super().resume_reading()


class BoundedConnection(HttpToolsProtocol):
    """Close a connection whose head is over HEAD_BYTES or HEAD_S, or whose client reads nothing.

    It accepts a head that ends at most TURN_BYTES over the bound. Trailers and chunk extensions have the same
    bound. It drops trailers: a proxy in front has not judged them. Clients' bytes are parsed in
    turns, and nothing is parsed while a whole request waits for another's answer.
    """

    flow: _Reading
    _started: RequestResponseCycle  # of the request that is being answered, or was last
    _writes: JoinedWrites

    send_timeout_s: ClassVar[float]
    turns: ClassVar[Turns]  # of the whole server

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes, when it was last looked whether the client reads
        self._unparsed = bytearray()
        self._is_in_head = self._is_in_body = self._is_broken = False
        self._declined: list[tuple[bytes, bytes]] = []
        self._without_end = 0  # bytes that ended no head and were of no body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport)
        self._writes = JoinedWrites(transport, self.loop)
        self.transport = self._writes.as_transport()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_late()
        self._stop_stalled()
        self._unparsed.clear()
        if self.pipeline:  # uvicorn tells the last request alone that its client left
            self.cycle = self._started
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.flow.is_behind and not self.pipeline and len(data) <= TURN_BYTES:
            self._parse(data)
            return
        self._unparsed += data
        if not self.flow.is_behind:
            self._parse_some()

    def _parse_some(self) -> None:
        """Parse TURN_BYTES of what came, and leave the rest to the loop's next turn."""
        if self._unparsed and not self.pipeline:
            piece = bytes(memoryview(self._unparsed)[:TURN_BYTES])
            del self._unparsed[:TURN_BYTES]
            self._parse(piece)
        if self.transport.is_closing():
            return
        if self._unparsed:
            self.flow.is_behind = True
            self.flow.pause_reading()
            if not self.pipeline:  # else once the answer is complete
                self.turns.add(self.loop, self._parse_some)
        elif self.flow.is_behind:
            self.flow.is_behind = False
            if not self.pipeline and not (self._answers and len(self.cycle.body) > HIGH_WATER_LIMIT):
                self.flow.resume_reading()  # else uvicorn does, once the application took what it has

    def _parse(self, piece: bytes) -> None:
        if self._is_broken or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._without_end += len(piece)
        try:
            if piece[:1] in (b"\r", b"\n") and not (self._is_in_head or self._is_in_body):
                raise BadRequest("an empty line begins no request")
            while piece:
                try:
                    self.parser.feed_data(piece)
                    break
                except httptools.HttpParserUpgrade as offer:
                    rest = piece[offer.args[0] :]
                    piece = self._decline() + rest
        except (httptools.HttpParserError, BadRequest) as error:
            found = error.__context__ if isinstance(error.__context__, BadRequest) else error
            status = getattr(found, "status", HTTPStatus.BAD_REQUEST)
            self._refuse(status, f"this is not valid HTTP/1.1: {found}")
            return
        if self._without_end > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head is over {HEAD_BYTES} bytes")
        self._watch_head()

    def _decline(self) -> bytes:
        """Return a head without its offer to upgrade, for another parser: this one passes over its body.

        The answer is HTTP/1.1's, and the request keeps its body (RFC 9110, 7.8).
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        self._declined = [header for header in self.headers if header[0] == b"upgrade"]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {UNREAD: {"bytes": self._unread}}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        if not self.parser.should_upgrade():
            self.headers += self._declined
            self._declined = []
            super().on_headers_complete()  # raises if the target is no URL: refuse the head
            self._is_in_head, self._is_in_body, self._without_end = False, True, 0

    def on_body(self, body: bytes) -> None:
        self._without_end = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_in_body:
            self._is_in_body, self._without_end = False, 0
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._writes.keep_next()
        self._started = cycle
        if cycle.scope["http_version"] == "1.0":  # it knows neither chunks nor 100 (RFC 9110, 10.1.1)
            app, cycle.waiting_for_100_continue = _unchunked(app, cycle), False
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_head or self._unparsed:  # the next head has begun: that is no idle connection
            self._unset_keepalive_if_required()
        if self._unparsed and not self.pipeline:
            self.turns.add(self.loop, self._parse_some)
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._watch_client()

    def resume_writing(self) -> None:
        self._stop_stalled()
        super().resume_writing()

    def _unread(self) -> int:
        """Return how many of the client's bytes wait here for the parser or the application."""
        return len(self._unparsed) + len(self.cycle.body)

    @property
    def _answers(self) -> bool:
        """Whether a request has no whole answer yet."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _watch_head(self) -> None:
        """Run the head's deadline while a request, or the rest of an answered one, may come.

        The wait for another request without a byte of it is uvicorn's keep-alive.
        """
        if self._answers or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            self._stop_late()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._is_late)

    def _stop_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _is_late(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no whole head came in {HEAD_S:g} s")

    def _watch_client(self) -> None:
        self._unsent = self._left()
        self._stalled = self.loop.call_later(self.send_timeout_s, self._look)

    def _look(self) -> None:
        """Go on with a client that read anything of what was left at the last look."""
        if self._left() < self._unsent:
            self._watch_client()
        else:
            self._give_up()

    def _left(self) -> int:
        """How many bytes the client has not acknowledged: those of the buffer here and of the kernel's.

        A kernel's buffer of megabytes takes more only once it is a third empty: this one alone would not
        tell a slow client from one that stopped.
        """
        left = self.transport.get_write_buffer_size()
        try:
            number = self.transport.get_extra_info("socket").fileno()
            (sent,) = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)))
        except (AttributeError, OSError):  # no socket, or a system that does not say
            return left
        return left + int(sent)

    def _give_up(self) -> None:
        told = event("client.stalled", client=str(self.client))
        logger.warning("a client read nothing for %g s: it is cut off", self.send_timeout_s, extra=told)
        self.transport.abort()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answer, unless an answer has begun, and close. An earlier request gets its answer first."""
        if self._answers and not self._is_in_body:
            self._is_broken, self.cycle.keep_alive = True, False
            return
        is_next = not self.cycle.response_started if self._answers else not self._is_in_body
        if is_next and not self.pipeline:
            answer = error_response(why, status, status.phrase)
            lines = [(b"connection", b"close"), *answer.raw_headers]
            head = b"".join(b"%b: %b\r\n" % line for line in lines)
            self.transport.write(STATUS_LINE[status] + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """Answer without chunks: what has no length ends with its connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def sent(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif is_open and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answer


def configured(
    app: Any,
    *,
    send_timeout_s: float = SEND_TIMEOUT_S,
    keep_alive_s: float = KEEP_ALIVE_S,
    **options: Any,
) -> uvicorn.Config:
    """Return the server's configuration for ``app``, with ``options`` as uvicorn has them.

    Args:
        send_timeout_s: how long a client may read nothing of an answer that waits for it.
        keep_alive_s: how long a connection without a request stays open.
    """
    own = {"send_timeout_s": send_timeout_s, "turns": Turns()}
    protocol = type("Connection", (BoundedConnection,), own)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # any number of seconds: for ``call_later``
        proxy_headers=False,  # a client's address is its connection's, whatever it says
        **options,
    )
