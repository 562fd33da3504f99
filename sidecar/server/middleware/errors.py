"""Errors become answers: one table of statuses and OpenAI error types, and the layer around all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_fs.sidecar import tracing
from lora_fs.sidecar.errors import (
    Conflict,
    EngineRejected,
    GateNotPassed,
    InputError,
    InvalidAdapter,
    InvalidName,
    LoraFsError,
    NotFound,
    OverQuota,
    RegistryLost,
    TemporaryError,
    TooLarge,
    TooManyRegistrations,
    name_of,
)

# The first match from the top wins. vLLM answers duplicates and bad input with 400.
TABLE: tuple[tuple[type[LoraFsError], int, str], ...] = (
    (NotFound, 404, "NotFoundError"),
    (TooLarge, 413, "InvalidUserInput"),
    (OverQuota, 403, "QuotaExceededError"),
    (GateNotPassed, 409, "ConflictError"),
    (Conflict, 400, "InvalidUserInput"),
    (InvalidAdapter, 422, "UnprocessableEntityError"),
    (InvalidName, 400, "InvalidUserInput"),
    (InputError, 400, "InvalidUserInput"),
    (TooManyRegistrations, 429, "RateLimitError"),
    (TemporaryError, 503, "ServiceUnavailableError"),
    (RegistryLost, 503, "ServiceUnavailableError"),
    (EngineRejected, 400, "BadRequestError"),
    (LoraFsError, 500, "InternalServerError"),
)

NAME: Final = "X-Lora-Fs-Error"  # the error's own name, for our command line: types are OpenAI's
# vLLM's own routes to load. There, and on model look-ups, a bad adapter is a bad request, as to vLLM.
VLLMS: Final = frozenset({"/v1/load_lora_adapter", "/adapters"})
AS_VLLM: Final = (400, "BadRequestError")
LOST_S = 10  # until somebody who lost the registry may have mounted it again
LATER: Final = frozenset({429, 503})  # a later repeat may succeed: each answer says when to repeat
AGAIN: Final = {"Retry-After": "1"}

KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    413: "InvalidUserInput",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def error_response(
    message: str, status: int, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """vLLM's error shape; 429 and 503 say when to repeat the request.

    A message may quote what a client sent, which JSON lets be no text.
    """
    if status in LATER:
        headers = {**AGAIN, **(headers or {})}
    message = message.encode(errors="replace").decode()
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(body, status, headers)


def respond(error: LoraFsError, param: str | None = None, *, as_vllm: bool = False) -> JSONResponse:
    """Turn an error into its response; temporary ones say when to come back.

    Args:
        as_vllm: the route is one of vLLM's own.
    """
    status, kind = next((s, k) for t, s, k in TABLE if isinstance(error, t))
    if as_vllm and isinstance(error, InvalidAdapter):
        status, kind = AS_VLLM
    headers = {NAME: name_of(error)}
    if isinstance(error, TemporaryError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, RegistryLost):
        headers["Retry-After"] = str(LOST_S)
    return error_response(str(error), status, kind, param, headers)


def refuse(error: HTTPException) -> JSONResponse:
    """The answer to who may not: 401, 403; and what the framework itself refuses."""
    kind = KINDS.get(error.status_code, "Error")
    return error_response(str(error.detail), error.status_code, kind, headers=dict(error.headers or {}))


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's handler for the whole tree."""
    assert isinstance(error, LoraFsError)
    return respond(error, as_vllm=getattr(request.scope.get("route"), "path", None) in VLLMS)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # its place is one in the text, and no field's name
        why = f"the body is no JSON: {first['ctx']['error']}, at character {first['loc'][-1]}"
        return error_response(why, 400, "Bad Request")
    if first["type"] == "model_attributes_type" and isinstance(first["input"], bytes):
        sent = request.headers.get("content-type", "")[:80]
        why = f"the body was sent as {sent!a}: send JSON, with Content-Type: application/json"
        return error_response(why, 400, "Bad Request")
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    return error_response(f"{field or 'body'}: {first['msg']}", 400, "Bad Request", field or None)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return refuse(error)


HANDLERS: Final[dict[int | type[Exception], Callable[[Request, Any], Any]]] = {
    LoraFsError: on_error,
    RequestValidationError: _invalid,
    HTTPException: _refused,
}


class Errors:
    """Answer an error that another layer raises, unless its answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (LoraFsError, HTTPException) as error:
            if has_begun or scope["type"] != "http":
                raise
            tracing.note(error__type=type(error).__name__)
            answer = respond(error) if isinstance(error, LoraFsError) else refuse(error)
            await answer(scope, receive, send)
