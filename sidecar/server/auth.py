"""Admin calls take a bearer token when a token file is configured. The token is never logged."""

from __future__ import annotations

import hmac
from pathlib import Path

import anyio
from fastapi import HTTPException, Request


class Admin:
    """Checks the token; the file is read at each admin call, so a rotation needs no restart."""

    def __init__(self, token_file: Path | None) -> None:
        self._token_file = token_file

    async def __call__(self, request: Request) -> str:
        """FastAPI dependency: who calls, for the record; 401 otherwise."""
        client = request.client.host if request.client else "unknown"
        if self._token_file is None:
            return f"http:{client}"
        try:
            wanted = (await anyio.Path(self._token_file).read_bytes()).strip()
        except OSError as error:
            raise HTTPException(503, f"the token file cannot be read: {error.strerror}") from error
        given = request.headers.get("authorization", "").encode()
        if not wanted or not hmac.compare_digest(given, b"Bearer " + wanted):
            raise HTTPException(
                401, "this call needs the admin token", headers={"WWW-Authenticate": "Bearer"}
            )
        return f"http:{client}"
