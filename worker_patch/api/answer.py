"""An answer on its way to a client: its headers name the adapter, and one that breaks or is cut says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.types import Message, Send

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.server.middleware.answers import answered_by
from lora_fs.worker_patch.api.ending import TOLD

EVENTS = b"text/event-stream"


@contextmanager
def uncut(send: Send, ends: Callable[[], bool]) -> Iterator[Send]:
    """Keep back the 500 that vLLM answers to a request which the end of its engine cut.

    Args:
        ends: whether the engine has begun to end.

    Raises:
        EngineUnavailable: at the context's end, if that request got no other answer.
    """
    has_begun = is_cut = False

    async def sending(message: Message) -> None:
        nonlocal has_begun, is_cut
        if message["type"] == "http.response.start":
            is_cut = message["status"] == HTTPStatus.INTERNAL_SERVER_ERROR and ends()
            has_begun = not is_cut
        if not is_cut:
            await send(message)

    try:
        yield sending
    except (Exception, asyncio.CancelledError) as error:  # vLLM's answer to it is made outside of the gate
        if has_begun or not ends():
            raise
        raise EngineUnavailable(TOLD) from error
    if is_cut:
        raise EngineUnavailable(TOLD)


class Answer:
    """The answer to one request; ``record``: of the adapter that serves it, if it is the registry's."""

    def __init__(self, record: Record | None, send: Send) -> None:
        self._record, self._send = record, send
        self._begun = self._is_stream = False

    async def send(self, message: Message) -> None:
        """Pass a message on, with the name of a registry's adapter among its headers."""
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            self._begun, self._is_stream = True, kind.startswith(EVENTS)
            if self._record is not None:
                headers += answered_by(self._record)
            message["headers"] = headers
        await self._send(message)

    async def broken(self, error: EngineUnavailable, last: bytes) -> None:
        """End an answer that is not the adapter's any more.

        Args:
            last: a stream's last events, which say the error.
        Raises:
            EngineUnavailable: nothing was sent yet.
            ConnectionError: the rest is missing, which a client sees by its connection alone.
        """
        if not self._begun:
            raise error
        if not self._is_stream:
            raise ConnectionError(str(error)) from error
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
