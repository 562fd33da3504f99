"""A connection's protocol: uvicorn's on h11, with bounds in bytes and in time on what a peer does not do.

h11 refuses what is no HTTP/1.1, keeps the body of a request whose upgrade is declined, and answers HTTP/1.0
without chunks. uvicorn has no deadline for a head that does not end, nor for a client that stops reading:
such a client would keep its stream's adapter in the engine for ever.
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

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.middleware.errors import error_response
from lora_fs.sidecar.settings import SEND_TIMEOUT_S

HEAD_BYTES = 1 << 16  # nginx, Envoy and node take between 8 and 60 KiB
HEAD_S = 60.0
TURN_BYTES = 1 << 14  # parsed in one turn of the loop: as chunks of one byte that takes h11 20 ms

logger = logging.getLogger(__name__)


class _Reading(FlowControl):
    """Read nothing while what was read before is not parsed."""

    is_behind = False

    def resume_reading(self) -> None:
        if not self.is_behind:
            super().resume_reading()


class BoundedConnection(H11Protocol):
    """Close a connection whose head is over HEAD_BYTES or HEAD_S, or whose client reads nothing.

    A head whose end came with TURN_BYTES over the bound is taken. Trailers and chunk extensions have the
    same bound. Trailers are dropped: a proxy in front has not
    judged them. What a client sends is parsed in turns with what others send.
    """

    flow: _Reading

    send_timeout_s: ClassVar[float] = SEND_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes, when it was last looked whether the client reads
        self._unparsed = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_late()
        self._stop_stalled()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if not self.flow.is_behind:
            self._parse()

    def _parse(self) -> None:
        """Parse TURN_BYTES of what came, and leave the rest to the loop's next turn."""
        if self.transport.is_closing():
            return
        piece = bytes(memoryview(self._unparsed)[:TURN_BYTES])
        del self._unparsed[:TURN_BYTES]
        if piece:
            super().data_received(piece)
            self._watch_head()
        if self._unparsed:
            self.flow.is_behind = True
            self.flow.pause_reading()
            self.loop.call_soon(self._parse)
        elif self.flow.is_behind:
            self.flow.is_behind = False
            if not self._has_enough():
                self.flow.resume_reading()

    def _has_enough(self) -> bool:
        """Whether reading goes on only once the application took what it has: uvicorn resumes it then."""
        theirs = self.conn.their_state
        is_next = theirs is h11.DONE and bool(self.conn.trailing_data[0])
        return is_next or (theirs is h11.SEND_BODY and len(self.cycle.body) > HIGH_WATER_LIMIT)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the next head has begun: that is no idle connection
            self._unset_keepalive_if_required()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._watch_client()

    def resume_writing(self) -> None:
        self._stop_stalled()
        super().resume_writing()

    def _should_upgrade(self) -> bool:
        """Decline every upgrade: the request is answered as HTTP/1.1, with its body (RFC 9110, 7.8)."""
        return False

    def _watch_head(self) -> None:
        """Run the head's deadline while a request may come, or one that was answered goes on.

        The wait for another request without a byte of it is uvicorn's keep-alive.
        """
        theirs, ours = self.conn.their_state, self.conn.our_state
        comes = theirs is h11.IDLE or (theirs is h11.SEND_BODY and ours is h11.DONE)
        if not comes or self.timeout_keep_alive_task is not None or self.transport.is_closing():
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

    def send_400_response(self, msg: str) -> None:
        """Say in the API's shape what is wrong. uvicorn calls it while it handles h11's error."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(HTTPStatus(hint), f"the head is over {HEAD_BYTES} bytes")
        else:
            self._refuse(HTTPStatus(hint), f"this is not valid HTTP/1.1: {error or msg}")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answer, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(why, status, status.phrase)
            head = h11.Response(
                status_code=status,
                headers=[*answer.raw_headers, (b"connection", b"close")],
                reason=status.phrase.encode(),
            )
            for part in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part))
        self.transport.close()


def configured(app: Any, *, send_timeout_s: float = SEND_TIMEOUT_S, **options: Any) -> uvicorn.Config:
    """Return the server's configuration for ``app``, with ``options`` as uvicorn has them.

    Args:
        send_timeout_s: how long a client may read nothing of an answer that waits for it.
    """
    protocol = type("Connection", (BoundedConnection,), {"send_timeout_s": send_timeout_s})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        h11_max_incomplete_event_size=HEAD_BYTES,
        proxy_headers=False,  # a client's address is its connection's, whatever it says
        **options,
    )
