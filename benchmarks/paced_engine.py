"""The stub of an engine whose loads and requests take their time, and which knows what it holds.

Loads come one after another, and a request takes longer the more are under way. It answers for an adapter
only if that is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lora_fs.demo.process import Process, free_port, spawn

sys.path.append(str(Path(__file__).parent))  # its own process is started with -P

from stub_engine import StubEngine, asked_model, read


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a load takes, a request, and a request more for each that is under way."""

    load_s: float = 0.0
    request_s: float = 0.0
    each_s: float = 0.0


class PacedEngine(StubEngine):
    """Counts its loads and completions.

    After ``POST /fail`` each completion is an error. From ``POST /hold`` to ``POST /release`` no load ends,
    nor does a completion that is not streamed.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace, self._loading = pace, asyncio.Lock()
        self._under_way = self._loads = self._completions = 0
        self._fails, self._asked, self._held = False, 0, asyncio.Event()
        self._held.set()

    def app(self) -> Starlette:
        """The ASGI application."""
        app = super().app()
        app.router.routes.append(Route("/counts", self._counts))
        for path, call in (("/fail", self._fail), ("/hold", self._hold), ("/release", self._release)):
            app.router.routes.append(Route(path, call, methods=["POST"]))
        app.router.routes.append(Route("/server_info", self._server_info))
        return app

    async def _hold(self, _: Request) -> Response:
        self._held.clear()
        return Response()

    async def _release(self, _: Request) -> Response:
        self._held.set()
        return Response()

    async def _load(self, request: Request) -> Response:
        self._asked += 1
        await self._held.wait()
        async with self._loading:
            await asyncio.sleep(self._pace.load_s)
        self._loads += 1
        return await super()._load(request)

    async def _fail(self, _: Request) -> Response:
        self._fails = True
        return Response()

    async def _complete(self, request: Request) -> Response:
        if self._fails:
            return JSONResponse({"error": {"message": "it fails", "type": "InternalServerError"}}, 500)
        body = await read(request)
        model = asked_model(body)
        if model != "tiny" and model not in self._loaded:
            error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError", "code": 404}
            return JSONResponse({"error": error}, 404)
        self._completions += 1
        if body.get("stream"):
            return StreamingResponse(self._events(model, body["max_tokens"]), media_type="text/event-stream")
        self._under_way += 1
        try:
            await self._held.wait()
            await asyncio.sleep(self._pace.request_s + self._under_way * self._pace.each_s)
        finally:
            self._under_way -= 1
        return JSONResponse({"model": model, "choices": [{"index": 0, "text": "stub"}]})

    async def _events(self, model: str, tokens: int) -> AsyncIterator[bytes]:
        self._under_way += 1
        try:
            for number in range(tokens):
                choice = {"index": 0, "text": f"{number} "}
                yield b"data: " + json.dumps({"model": model, "choices": [choice]}).encode() + b"\n\n"
                await asyncio.sleep(max(self._pace.each_s, 0.001))
            yield b"data: [DONE]\n\n"
        finally:
            self._under_way -= 1

    async def _server_info(self, _: Request) -> Response:
        own = {"instance_id": str(os.getpid())}
        return JSONResponse(
            {
                "vllm_config": {"pace": asdict(self._pace), **own},
                "vllm_env": {"VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": str(os.getpid()), "VLLM_PLUGINS": ""},
                "system_env": {"env_vars": f"PID={os.getpid()}"},
            }
        )

    async def _metrics(self, request: Request) -> Response:
        """With its requests: those under way run, and a load that is held waits."""
        slots = bytes((await super()._metrics(request)).body).decode()
        waiting = self._asked - self._loads
        text = f"vllm:num_requests_running {self._under_way}\nvllm:num_requests_waiting {waiting}\n"
        return PlainTextResponse(slots + text)

    async def _counts(self, _: Request) -> Response:
        return JSONResponse(
            {
                "asked": self._asked,
                "loads": self._loads,
                "completions": self._completions,
                "under_way": self._under_way,
            }
        )


@contextlib.contextmanager
def paced_engine(log: Path, pace: Pace, *, start: Callable[..., Process] = spawn) -> Iterator[str]:
    """Serve one on loopback, in a process of its own, which ``start`` starts; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = [f"--{name}={getattr(pace, name)}" for name in Pace.__slots__]
    process = start("stub", [sys.executable, "-P", __file__, str(port), *options], log=log, url=url, env={})
    try:
        process.wait_ready("/v1/models")
        yield url
    finally:
        process.stop()


def serve() -> None:
    """Serve one, as the words of this process's command say."""
    options = argparse.ArgumentParser()
    options.add_argument("port", type=int)
    for name in Pace.__slots__:
        options.add_argument(f"--{name}", type=float, default=0.0)
    given = vars(options.parse_args())
    port = given.pop("port")
    uvicorn.run(PacedEngine(Pace(**given)).app(), port=port, log_level="warning", timeout_keep_alive=60)


if __name__ == "__main__":
    serve()
