"""An HTTP server with vLLM's adapter routes and no model: for figures in which no engine is timed.

Many sidecars may share one. What it holds is told apart by the path it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lora_fs.demo.process import free_port, spawn

EVENTS, EVENT_S = 8, 0.001
# As vLLM says it after its first step.
_SLOTS = 'vllm:lora_requests_info{max_lora="4096",running_lora_adapters="",waiting_lora_adapters=""} 1\n'


def asked_model(body: dict[str, Any]) -> str:
    """Return the model that a request names; as to vLLM, none and an empty one are the base model.

    Raises:
        HTTPException: 400 in vLLM's words, since it is no text.
    """
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise HTTPException(400, "model: Input should be a valid string")
    return model or "tiny"


async def _refused(_: Request, error: Exception) -> Response:
    """An error in vLLM's shape."""
    assert isinstance(error, HTTPException)
    told = {"message": error.detail, "type": "Bad Request", "param": None, "code": error.status_code}
    return JSONResponse({"error": told}, error.status_code)


async def read(request: Request) -> dict[str, Any]:
    """Return a request's body. Raises HTTPException: it is no JSON object."""
    try:
        body = await request.json()
    except ValueError as error:
        raise HTTPException(400, f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, "Input should be a valid dictionary")
    return body


async def _events(answer: object) -> AsyncIterator[str]:
    for _ in range(EVENTS):
        await asyncio.sleep(EVENT_S)
        yield f"data: {json.dumps(answer, separators=(',', ':'))}\n\n"
    yield "data: [DONE]\n\n"


class StubEngine:
    """Lists, loads and unloads; answers every completion at once, or by EVENTS events."""

    def __init__(self) -> None:
        self._loaded: dict[str, str] = {}

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/version", self._version),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refused},
        )

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _models(self, _: Request) -> Response:
        base = {"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm", "parent": None}
        cards = [{**base, "id": name, "root": p, "parent": "tiny"} for name, p in self._loaded.items()]
        return JSONResponse({"object": "list", "data": [base, *cards]})

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(_SLOTS)

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        self._loaded[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    async def _unload(self, request: Request) -> Response:
        body = await request.json()
        self._loaded.pop(body["lora_name"], None)
        return PlainTextResponse("Success")

    async def _complete(self, request: Request) -> Response:
        body = await read(request)
        answer = {"model": asked_model(body), "choices": [{"index": 0, "text": "stub"}]}
        if body.get("stream"):
            return StreamingResponse(_events(answer), media_type="text/event-stream")
        return JSONResponse(answer)


@contextlib.contextmanager
def stub_engine(log: Path) -> Iterator[str]:
    """Serve one on loopback, in a process of its own; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = spawn("stub", [sys.executable, "-P", __file__, str(port)], log=log, url=url, env={})
    try:
        process.wait_ready("/v1/models")
        yield url
    finally:
        process.stop()


if __name__ == "__main__":
    uvicorn.run(StubEngine().app(), port=int(sys.argv[1]), log_level="warning", timeout_keep_alive=60)
