"""Headers of every answer: no browser guesses its type, and no cache keeps JSON."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOSNIFF = (b"x-content-type-options", b"nosniff")
NO_STORE = (b"cache-control", b"no-store")
JSON = b"application/json"


class AnswerHeaders:
    """Add ``X-Content-Type-Options`` to every answer, and ``Cache-Control: no-store`` to JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def added(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                given = {name.lower(): value for name, value in headers}
                if NOSNIFF[0] not in given:
                    headers.append(NOSNIFF)
                if NO_STORE[0] not in given and given.get(b"content-type", b"").startswith(JSON):
                    headers.append(NO_STORE)
            await send(message)

        await self._app(scope, receive, added)
