"""A span around each request that passes, the child of its sender's, with the status of its answer."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_fs.sidecar import tracing

MAX_PATH = 200


class Traced:
    """Make the span ``name``. What lies behind adds to it by ``tracing.note``."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not tracing.is_on():
            await self._app(scope, receive, send)
            return
        path = scope["raw_path"].decode("latin-1")[:MAX_PATH]
        about = {"http__request__method": scope["method"], "url__path": path}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                tracing.answered(message["status"])
            await send(message)

        with tracing.span(self._name, carrier=Headers(scope=scope), **about):
            await self._app(scope, receive, sending)
