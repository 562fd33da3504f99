"""The application: which layers a request passes, in their order, and which routes there are.

A layer that every request passes is an ASGI middleware of ``layers``. What needs the route first is at
the route: the verb that a token must allow, the audit of what was done, the room for a proxied body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import aiohttp
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.routing import Route

from lora_fs.sidecar import __version__
from lora_fs.sidecar.server.dashboard import routes
from lora_fs.sidecar.server.dashboard.board import Board
from lora_fs.sidecar.server.dashboard.fleet import Fleet
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin_port import AdminPort
from lora_fs.sidecar.server.middleware.answers import AnswerHeaders
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.errors import HANDLERS, Errors
from lora_fs.sidecar.server.ports import ReplicaPort
from lora_fs.sidecar.server.proxy.forward import METHODS, PATHS, Proxy
from lora_fs.sidecar.server.routes import dynamo, events, lora, models, observe, uploads
from lora_fs.sidecar.settings import BODY_MAX_BYTES


def layers(admin_port: int | None = None) -> list[Middleware]:
    """List what every request passes before its route, the outermost first."""
    apart = [] if admin_port is None else [Middleware(AdminPort, port=admin_port)]
    return [Middleware(AnswerHeaders), *apart, Middleware(Errors)]


def create_app(
    replica: ReplicaPort,
    *,
    engine_url: str,
    admin: Admin,
    trail: Trail | None = None,
    hold_timeout_s: float = 120.0,
    max_body_bytes: int = BODY_MAX_BYTES,
    user_header: str | None = None,
    engine_key: str | None = None,
    admin_port: int | None = None,
    background: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    fleet: Fleet | None = None,
) -> FastAPI:
    """Assemble the API.

    Args:
        admin: who may do what. trail: where admin calls are recorded; None: in the log alone.
        user_header: the header of a request that says who asks, for canaries.
        engine_key: the engine's ``--api-key``: see ``Proxy``.
        admin_port: see ``AdminPort``; None: every port answers all.
        background: what runs while the app runs (the replica's loop).
        fleet: the other replicas' reports, for the dashboard; None: it shows this replica alone.
    Returns:
        The application; ``state.end()`` lets those who wait for news go, before the server ends.
    """
    trail = trail or Trail(None)
    board = Board(replica, fleet)
    proxy = Proxy(
        replica,
        engine_url,
        admin,
        hold_timeout_s=hold_timeout_s,
        max_body_bytes=max_body_bytes,
        user_header=user_header,
        engine_key=engine_key,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        # vLLM closes idle connections after 5 s: one that it may be closing is not used again.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            proxy.session = session
            async with board.running(), background() if background is not None else nullcontext():
                yield

    app = FastAPI(
        title="lora-fs sidecar",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        middleware=layers(admin_port),
        exception_handlers=HANDLERS,
    )
    app.state.end = board.end
    app.include_router(models.router(replica, admin))
    app.include_router(lora.router(replica, admin, trail))
    app.include_router(uploads.router(replica, admin, trail))
    app.include_router(dynamo.router(replica, admin, trail, hold_timeout_s=hold_timeout_s))
    app.include_router(events.router(replica, admin))
    app.include_router(observe.router(replica, admin, trail))
    app.include_router(routes.router(replica, admin, board))
    for path in ("/v1/{path:path}", *PATHS):
        app.router.routes.append(Route(path, proxy, methods=list(METHODS)))
    return app
