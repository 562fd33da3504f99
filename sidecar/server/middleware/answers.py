"""Headers of answers: no browser guesses a type, no cache keeps JSON, and which adapter answered."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_fs.sidecar.model import Record

NOSNIFF = (b"x-content-type-options", b"nosniff")
NO_STORE = (b"cache-control", b"no-store")
JSON = b"application/json"
ADAPTER: Final = b"x-lora-fs-adapter"
REVISION: Final = b"x-lora-fs-revision"
LOAD: Final = b"x-lora-fs-load"  # what a load wrote, as the call to undo it takes it


def answered_by(record: Record) -> list[tuple[bytes, bytes]]:
    """The headers that say which adapter answered, ``namespace/model/revision/name``, and its revision."""
    return [(ADAPTER, str(record.key).encode()), (REVISION, record.revision.encode())]


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
