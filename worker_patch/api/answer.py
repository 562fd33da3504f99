"""An answer on its way to a client: its headers name the adapter, and one that breaks says so."""

from __future__ import annotations

from starlette.types import Message, Send

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.server.middleware.answers import answered_by
from lora_fs.sidecar.server.middleware.errors import respond

EVENTS = b"text/event-stream"


class Answer:
    """Of one request; ``record``: of the adapter that serves it."""

    def __init__(self, record: Record, send: Send) -> None:
        self._record, self._send = record, send
        self._begun = self._is_stream = False

    async def send(self, message: Message) -> None:
        """Pass a message on, with the adapter's name among its headers."""
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            self._begun, self._is_stream = True, kind.startswith(EVENTS)
            message["headers"] = [*headers, *answered_by(self._record)]
        await self._send(message)

    async def broken(self, error: EngineUnavailable) -> None:
        """End an answer that is not the adapter's any more.

        A stream's last event is the error, as vLLM's own streams have it.

        Raises:
            EngineUnavailable: nothing was sent yet.
            ConnectionError: the rest is missing, which a client sees by its connection alone.
        """
        if not self._begun:
            raise error
        if not self._is_stream:
            raise ConnectionError(str(error)) from error
        body = bytes(respond(error, "model", as_vllm=True).body)
        last = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
