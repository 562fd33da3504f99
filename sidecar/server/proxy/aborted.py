"""An answer that the engine aborted never looks whole, and one that its end cut is no defect of the server.

A vLLM that gets SIGTERM ends what is under way: status 200, a text that is cut off, and the
``finish_reason`` "abort". Clients take that for an answer. Here it becomes 503, or an error event in a
stream. If it sent more of the answer than it keeps, it closes the connection in the middle.
vLLM kills its engine right after the signal. If the abort does not come through, it answers 500: 503 here.
Each 503 says when to ask again: vLLM's own do not, as a paused engine's, and a gateway takes such a one for a
defect of the replica.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from starlette.types import Message, Send

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.middleware.errors import AGAIN, respond

KEPT_BYTES: Final = 1 << 16
"""Of a JSON answer that is not whole, so many bytes are kept back, with its status."""
# A text holds no unescaped quotes: these are fields.
_ABORT = re.compile(rb'"finish_reason": ?"abort"')
_DEAD = re.compile(  # vLLM's EngineDeadError, which answers the second from 0.33 on
    rb'"message": ?"(EngineCore encountered an issue|The server had an error while processing your request)'
)
_MARK_MOST_BYTES = 80
_TOLD = (
    "the engine aborted this request before its answer was whole, as vLLM does when it stops: send the "
    "request again"
)
_ENDED = "the engine ended before it answered this request: send the request again"

logger = logging.getLogger(__name__)


class Unaborted:
    """Wrap an ASGI ``send``.

    Args:
        aborted: called once, on the engine's abort; it gets whether the answer had begun.

    Attributes:
        has_begun: something was sent.
    """

    def __init__(self, send: Send, aborted: Callable[[bool], object] = bool) -> None:
        self._send, self._aborted = send, aborted
        self._take: Callable[[bytes, bool], Awaitable[None]] = self._as_it_is
        self._mark, self._why = _ABORT, _TOLD
        self._head: Message | None = None
        self._kept = b""
        self._pieces: list[bytes] = []  # of a line that is not whole
        self.has_begun = self._is_told = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                message = _with_retry(message)
            self._take = self._reader(message)
            self._head = message
            if self._take != self._json:
                await self._begin()
        elif message["type"] == "http.response.body":
            await self._take(message.get("body", b""), message.get("more_body", False))
        else:
            await self._send(message)

    def _reader(self, head: Message) -> Callable[[bytes, bool], Awaitable[None]]:
        headers = {name.lower(): value for name, value in head.get("headers", ())}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        match head["status"], kind, b"content-encoding" in headers:
            case 200, b"application/json", False:
                return self._json
            case 200, b"text/event-stream", False:
                return self._events
            case 500, b"application/json", False:
                self._mark, self._why = _DEAD, _ENDED
                return self._json
        return self._as_it_is

    async def _begin(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self.has_begun = True
            await self._send(head)

    async def _as_it_is(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _nothing(self, data: bytes, more: bool) -> None:
        """An answer without an end: the server closes the connection."""

    async def _json(self, data: bytes, more: bool) -> None:
        seen = self._kept + data
        if self._mark.search(seen):
            self._tell()
            self._take = self._nothing
            if not self.has_begun:
                answer = respond(EngineUnavailable(self._why), "model")
                self._head = {
                    "type": "http.response.start",
                    "status": answer.status_code,
                    "headers": answer.raw_headers,
                }
                await self._begin()
                await self._as_it_is(bytes(answer.body), False)
            return
        if not self.has_begun:
            if more and len(seen) < KEPT_BYTES:
                self._kept = seen
                return
            data = seen
        self._kept = seen[-_MARK_MOST_BYTES:]
        await self._begin()
        await self._as_it_is(data, more)

    async def _events(self, data: bytes, more: bool) -> None:
        """Line by line, as events are. A line may have megabytes: its pieces are joined once."""
        self._pieces.append(data)
        if more and b"\n" not in data:
            return
        whole, end, rest = b"".join(self._pieces).rpartition(b"\n")
        self._pieces = [rest]
        if not more:
            end += rest
        if b'"abort"' in whole or b'"abort"' in end:
            whole, end = b"\n".join(map(self._line, (whole + end).split(b"\n"))), b""
        if whole or end or not more:
            await self._as_it_is(whole + end, more)

    def _line(self, line: bytes) -> bytes:
        if not _ABORT.search(line):
            return line
        self._tell()
        return b"data: " + bytes(respond(EngineUnavailable(_TOLD), "model").body)

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning("the engine aborted an answer", extra=event("engine.broke_off", error="abort"))
            self._aborted(self.has_begun)


def _with_retry(head: Message) -> Message:
    headers = list(head.get("headers", ()))
    if not any(name.lower() == b"retry-after" for name, _ in headers):
        headers += [(name.lower().encode(), value.encode()) for name, value in AGAIN.items()]
    return {**head, "headers": headers}
