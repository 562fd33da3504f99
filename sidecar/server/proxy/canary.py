"""Which revision answers a request: who asks, the name in the answer, and the status that is counted.

A client asks for a plain name and is answered under it, whatever the engine calls what answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Send

from lora_fs.sidecar.model import Record

ADAPTER: Final = b"x-lora-fs-adapter"
REVISION: Final = b"x-lora-fs-revision"
_NAMED = ("application/json", "text/event-stream")


def answered_by(record: Record) -> list[tuple[bytes, bytes]]:
    """The headers that say which adapter answered, ``namespace/model/revision/name``, and its revision."""
    return [(ADAPTER, str(record.key).encode()), (REVISION, record.revision.encode())]


def user_of(headers: Headers, header: str | None, said: object) -> str | None:
    """Who asks, for a canary: what the header says that is set for it, else the body's ``user``."""
    given = headers.get(header) if header is not None else None
    return given or (said if isinstance(said, str) and said else None)


def counted(send: Send, count: Callable[[int], None]) -> Send:
    """Wrap ``send``: ``count`` gets the status of the answer that is sent."""

    async def counting(message: Message) -> None:
        if message["type"] == "http.response.start":
            count(message["status"])
        await send(message)

    return counting


class Renamed:
    """An answer's bytes with the model's name in place of the engine's, as they come.

    A text cannot hold ``"model":"name"`` unescaped, so only fields are meant, and vLLM's message about a
    name that it does not know. What may be the beginning of one is kept until the next bytes come.
    """

    def __init__(self, engine_name: str, name: str) -> None:
        forms = ('"model":"{}"', '"model": "{}"', '"message":"The model `{}`')
        self._forms = [(form.format(engine_name).encode(), form.format(name).encode()) for form in forms]
        self._kept = b""

    @staticmethod
    def concerns(content_type: str) -> bool:
        """Whether a body of this type names its model."""
        return content_type.partition(";")[0].strip().lower() in _NAMED

    def feed(self, data: bytes) -> bytes:
        """What may be sent of what came so far."""
        data = self._kept + data
        for engines, ours in self._forms:
            data = data.replace(engines, ours)
        ends = max(_ends_with_the_beginning_of(form, data) for form, _ in self._forms)
        self._kept = data[len(data) - ends :]
        return data[: len(data) - ends]

    def end(self) -> bytes:
        """The rest, when nothing more comes."""
        rest, self._kept = self._kept, b""
        return rest


def _ends_with_the_beginning_of(form: bytes, data: bytes) -> int:
    first = form[:2]  # few places have it
    at = data.find(first, max(0, len(data) - len(form) + 1))
    while at >= 0:
        if form.startswith(data[at:]):
            return len(data) - at
        at = data.find(first, at + 1)
    return int(data.endswith(first[:1]))
