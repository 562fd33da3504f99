"""The files of a page: ``GET /``, and below ``/dashboard/`` what it is made of.

A page holds no data and asks nobody for a token. It loads from here alone, and says so.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Answer = Callable[[Request], Awaitable[Response]]


def page(name: str) -> dict[str, Answer]:
    """Read the files; return what answers each path. ``name``: the page at ``/``."""
    answers = {}
    for file in (resources.files(__package__) / "static").iterdir():
        if file.name == name:
            answers["/"] = _file(file.name, file.read_bytes())
        elif not file.name.endswith(".html"):
            answers[f"/dashboard/{file.name}"] = _file(file.name, file.read_bytes())
    return answers


def _file(name: str, data: bytes) -> Answer:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "ETag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    return answer
