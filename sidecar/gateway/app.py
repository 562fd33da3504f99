"""The gateway's application: its own few routes, and every path of a replica's, one hop away."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from lora_fs.sidecar import __version__
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.gateway.address import Resolver
from lora_fs.sidecar.gateway.broadcast import Broadcast
from lora_fs.sidecar.gateway.calls.asking import Asking
from lora_fs.sidecar.gateway.discovery import Discovery
from lora_fs.sidecar.gateway.forward import MOST_NAME, VIA, Hop
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.uploads import PATHS, Uploads
from lora_fs.sidecar.gateway.view import view
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.server.app import layers, passing, proxied
from lora_fs.sidecar.server.dashboard.page import page
from lora_fs.sidecar.server.middleware.access import HEADER
from lora_fs.sidecar.server.middleware.admin_port import operations
from lora_fs.sidecar.server.middleware.errors import AGAIN, HANDLERS
from lora_fs.sidecar.server.middleware.origin import Sites
from lora_fs.sidecar.server.proxy.paths import COMMON, INFERENCE, METHODS
from lora_fs.sidecar.server.proxy.upstream import Upstream, connected
from lora_fs.sidecar.server.routes.methods import other_methods
from lora_fs.sidecar.server.routes.observe import exposed
from lora_fs.sidecar.settings import BODY_MAX_BYTES, ENGINE_IDLE_TIMEOUT_S

CONNECTIONS: Final = 0  # to all replicas: no bound but the process's open files
# A replica's own paths that pass through the gateway, each with all that is below it: see ``AdminPort``.
OPERATIONS: Final = ("/v1/dashboard", "/v1/events", "/v1/lora_adapters", "/v1/loras", "/v1/replicas")


def create_gateway(
    discovery: Discovery,
    *,
    token: Callable[[], str] | None = None,
    model: str | None = None,
    admin_port: int | None = None,
    max_body_bytes: int = BODY_MAX_BYTES,
    hold_timeout_s: float = 120.0,
    idle_timeout_s: float = ENGINE_IDLE_TIMEOUT_S,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Assemble the gateway.

    Args:
        discovery: finds the replicas.
        token: reads the token for polls of the replicas, which shows the adapters of namespaces that are not
            public. Called now, and every second in a thread.
        model: the folder of the base model's scopes; None: that of the first replica to answer.
        admin_port: see ``AdminPort``; None: every port answers all.
        idle_timeout_s: in which a replica may send no byte of an answer, and take none of a body.
        cors_origins: whose pages may read answers. allowed_hosts: see ``Sites``.
    """
    clock = time.monotonic
    router = Router(clock)
    headers = {"Via": VIA.decode()} | ({HEADER: token()} if token is not None else {})
    watch = Watch(router, discovery, clock, headers=headers, token=token, model=model)
    metrics = Metrics(router, watch)
    sites = Sites(allowed_hosts)
    hop = Hop(
        router,
        watch,
        metrics,
        clock,
        sites=sites,
        hold_timeout_s=hold_timeout_s,
        idle_timeout_s=idle_timeout_s,
    )
    asking = Asking(watch, hold_timeout_s=hold_timeout_s)
    every = Broadcast(asking, sites)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        upstream = Upstream(CONNECTIONS, idle_timeout_s)
        async with connected(upstream, Resolver()) as session, watch.running(session):
            hop.session = asking.session = session
            # A full collection of all imported objects takes 50 ms, in which every stream stands still.
            gc.collect()
            gc.freeze()
            yield

    async def health(request: Request) -> Response:
        """200 while a replica is ready, else 503 with what keeps each one out. An ejected one is ready."""
        ready = sorted(watch.ready)
        out = {one.url: one.why for one in watch.seen.values() if one.why}
        ejected = {name: round(left, 1) for name, left in router.ejected.items()}
        body = {"ready": ready, "ejected": ejected, "out": out, "problem": watch.problem}
        return JSONResponse(body, 200 if ready else 503, None if ready else AGAIN)

    async def fleet(request: Request) -> Response:
        """Every replica; with ``adapter``, that one's order of them."""
        adapter = request.query_params.get("adapter")
        if adapter is not None and len(adapter) > MOST_NAME:  # each replica costs a hash of it
            raise InputError(f"an adapter's name has at most {MOST_NAME} characters")
        told = view(router, watch, clock(), adapter)
        return JSONResponse(told.model_dump(mode="json"))

    async def scrape(request: Request) -> Response:
        """Prometheus metrics."""
        return Response(await exposed(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    own: list[BaseRoute] = [
        *(Route(path, health) for path in ("/health", "/readyz")),
        Route("/metrics", scrape),
        Route("/v1/fleet", fleet),
        *(Route(path, answer) for path, answer in page("fleet.html").items()),
        Route("/v1/load_lora_adapter", every.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", every.unload, methods=["POST"]),
        Route("/pause", every.pause, methods=["POST"]),
        Route("/resume", every.resume, methods=["POST"]),
        Route("/server_info", every.server_info),
    ]
    app = FastAPI(
        title="lora-fs gateway",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        middleware=layers(cors_origins, admin_port, (*operations(own), *OPERATIONS)),
        exception_handlers=HANDLERS,
    )
    app.router.routes.extend([*own, *other_methods(app.router, own)])
    uploads = Uploads(hop, clock)
    app.router.routes.extend(Route(path, uploads, methods=["POST"], middleware=passing()) for path in PATHS)
    way = proxied(max_body_bytes)
    app.router.routes.extend(
        Route(path, hop, methods=list(METHODS), middleware=way)
        for path in (*COMMON, "/v1/{path:path}", "/metadata", *INFERENCE)
    )
    return app
