"""Headers of every answer: no browser guesses its type, and no cache keeps JSON."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AnswerHeaders:
    """Add ``X-Content-Type-Options`` to every answer, and ``Cache-Control: no-store`` to JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def added(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-content-type-options", "nosniff")
                if headers.get("content-type", "").startswith("application/json"):
                    headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, added)
