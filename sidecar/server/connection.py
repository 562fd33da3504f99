"""A connection's protocol: uvicorn's, with bounds on what a request is before it has a body.

Neither the parser nor uvicorn has one, and both keep what came until the head is whole; a client without
a token could take the loop and the memory of all. A peer that begins a request and does not end its
head, or sends what begins none, is waited for as long as proxies commonly wait.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lora_fs.sidecar.server.middleware.errors import error_response

HEAD_BYTES = 1 << 16  # what nginx, Envoy and node take is between 8 and 60 KiB
HEAD_S = 60.0


class BoundedHeads(HttpToolsProtocol):
    """Refuses a head of more than HEAD_BYTES and one piece of what was read at once, or of HEAD_S.

    Trailers, and what stands beside a chunk's size, are bounded likewise. Trailers are read over: whoever
    they would be taken from as header fields, a proxy in front has not seen them (RFC 9110, 6.5.1).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._got_on, self._without_bytes = False, 0
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waited()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """uvicorn's wait for another request ends with any byte: from then on it is waited for here."""
        self._got_on = False
        super().data_received(data)
        idle = self.timeout_keep_alive_task is not None
        if self._late is None and not idle and not self._answers and self in self.connections:
            self._wait()  # after a blank line, or more of what was answered; a websocket is uvicorn's alone
        self._without_bytes = 0 if self._got_on else self._without_bytes + len(data)
        if self._without_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head is over {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._got_on = self._in_head = True
        if self._late is None:
            self._wait()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._got_on, self._in_head = True, False
        self._waited()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()

    def _wait(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self._is_late)

    def _waited(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        if self._answers:
            self._wait()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no whole head came in {HEAD_S:g} s")

    @property
    def _answers(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        if not self._answers:
            body = bytes(error_response(why, status, status.phrase).body)
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
