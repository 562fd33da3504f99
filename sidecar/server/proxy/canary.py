"""Which revision answers a request: the user, the name in the answer, and the status to count.

A client asks for a plain name and gets an answer under it, whatever the engine calls the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Message, Send

from lora_fs.sidecar.model import public_of
from lora_fs.sidecar.server.proxy.headers import text_of

_MODEL = re.compile(rb'("model": ?")([^"\\]+)"')
_NAMED = ("application/json", "text/event-stream")


def user_of(headers: Headers, header: str | None, said: object) -> str | None:
    """The user for a canary: by the header that the settings name, else the body's ``user``.

    One user is the same text in UTF-8, in ISO 8859-1 and in the body, whichever hop reads it.
    """
    given = headers.get(header) if header is not None else None
    return (given and text_of(given.encode("latin-1"))) or (said if isinstance(said, str) and said else None)


def counted(send: Send, count: Callable[[int], None]) -> Send:
    """Wrap ``send``: ``count`` gets the status of the answer that is sent."""

    async def counting(message: Message) -> None:
        if message["type"] == "http.response.start":
            count(message["status"])
        await send(message)

    return counting


class Renamed:
    """An answer's bytes with the model's name in place of the engine's, as they come.

    No text contains an unescaped ``"model":"name"``, so a match is always a field. Bytes that may be
    the beginning of one wait for the next bytes.

    Args:
        is_error: the answer is one, in which the name is the engine's wherever it stands.
    """

    def __init__(self, engine_name: str, name: str, *, is_error: bool = False) -> None:
        forms = ("{}",) if is_error else ('"model":"{}"', '"model": "{}"')
        self._forms = [(form.format(engine_name).encode(), form.format(name).encode()) for form in forms]
        self._first, self._longest = self._forms[0][0][:1], max(len(form) for form, _ in self._forms)
        self._kept = b""

    @staticmethod
    def concerns(content_type: str) -> bool:
        """Whether a body of this type names its model."""
        return content_type.partition(";")[0].strip().lower() in _NAMED

    def feed(self, data: bytes) -> bytes:
        """The bytes so far that may be sent."""
        data = self._kept + data
        for engines, ours in self._forms:
            data = data.replace(engines, ours)
        at = self._begun(data)
        self._kept = data[at:]
        return data[:at]

    def end(self) -> bytes:
        """The rest, when nothing more comes."""
        rest, self._kept = self._kept, b""
        return rest

    def _begun(self, data: bytes) -> int:
        """Where a form begins that may go on with the next bytes; the end, if none does."""
        ends_at = data.rfind(b"\n") + 1  # no form has a line's end, and an event ends in one
        at = data.find(self._first, max(ends_at, len(data) - self._longest + 1))
        while at >= 0 and not any(form.startswith(data[at:]) for form, _ in self._forms):
            at = data.find(self._first, at + 1)
        return at if at >= 0 else len(data)


class Stored:
    """As ``Renamed``, for a request without a model: a stored answer has the engine's own names.

    Sends line by line, as events come.

    Args:
        is_known: whether clients know a name of the engine's as it is.
    """

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        self._is_known = is_known
        self._pieces: list[bytes] = []  # of a line that is not whole

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole."""
        self._pieces.append(data)
        if b"\n" not in data:
            return b""
        whole, end, rest = b"".join(self._pieces).rpartition(b"\n")
        self._pieces = [rest]
        return _MODEL.sub(self._public, whole + end)

    def end(self) -> bytes:
        """The rest, when nothing more comes."""
        return _MODEL.sub(self._public, b"".join(self._pieces))

    def _public(self, found: re.Match[bytes]) -> bytes:
        name = found[2].decode(errors="replace")
        return found[0] if self._is_known(name) else found[1] + public_of(name).encode() + b'"'
