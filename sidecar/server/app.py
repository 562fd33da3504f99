"""The application: which layers a request passes, in their order, and which routes there are.

Every request passes ``layers``, and on its way to the engine ``proxied``. An admin route itself checks its
caller and writes the audit: the plugin puts these routes into vLLM's application, which has no such layers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from lora_fs.sidecar import __version__
from lora_fs.sidecar.server.dashboard import routes
from lora_fs.sidecar.server.dashboard.board import Board
from lora_fs.sidecar.server.dashboard.fleet import Fleet
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin_port import AdminPort, operations
from lora_fs.sidecar.server.middleware.answers import ADAPTER, REVISION, AnswerHeaders
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.body_limit import Intake, WholeBody
from lora_fs.sidecar.server.middleware.errors import HANDLERS, Errors
from lora_fs.sidecar.server.middleware.traced import Traced
from lora_fs.sidecar.server.ports import ReplicaPort
from lora_fs.sidecar.server.proxy.forward import Proxy
from lora_fs.sidecar.server.proxy.paths import COMMON, INFERENCE, METHODS, Forwardable
from lora_fs.sidecar.server.proxy.upstream import Upstream
from lora_fs.sidecar.server.routes import (
    acts,
    dynamo,
    events,
    lora,
    models,
    observe,
    registered,
    uploads,
)
from lora_fs.sidecar.server.routes.fleet import control, follow
from lora_fs.sidecar.server.routes.methods import other_methods
from lora_fs.sidecar.settings import BODY_MAX_BYTES

OPENAPI = "/openapi.json"


def layers(cors_origins: Sequence[str], admin_port: int | None, paths: tuple[str, ...]) -> list[Middleware]:
    """List what every request passes before its route, the outermost first.

    Args:
        cors_origins: see ``Settings.cors_origins``; errors carry the headers, too.
        admin_port, paths: see ``AdminPort``; None: every port answers all.
    """
    cors = Middleware(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=[ADAPTER.decode(), REVISION.decode()],
    )
    apart = [] if admin_port is None else [Middleware(AdminPort, port=admin_port, operations=paths)]
    return [*([cors] if cors_origins else []), Middleware(AnswerHeaders), *apart, Middleware(Errors)]


def proxied(max_body_bytes: int) -> list[Middleware]:
    """List what a request passes besides on its way to the engine, the outermost first.

    Args:
        max_body_bytes: of one request; those under way may have twice as much.
    """
    # One intake for all routes: Starlette makes a layer for each.
    whole = Middleware(WholeBody, intake=Intake(max_body_bytes))
    forwardable, *traced = passing()
    return [forwardable, whole, *traced]


def passing() -> list[Middleware]:
    """List what a request passes besides whose body goes on as it comes, the outermost first.

    A span has the status of an answer, so what lies behind it answers errors.
    """
    return [Middleware(Forwardable), Middleware(Traced, name="proxy"), Middleware(Errors)]


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
    cors_origins: Sequence[str] = (),
    upstream: Upstream | None = None,
) -> FastAPI:
    """Assemble the API.

    Args:
        admin: who may do what. trail: records admin calls; None: only the log does.
        user_header: the header that names a request's user, for canaries.
        engine_key: the engine's ``--api-key``: see ``Proxy``.
        admin_port: see ``AdminPort``; None: every port answers all.
        background: what runs while the app runs (the replica's loop).
        fleet: the other replicas' reports, for the dashboard; None: it shows this replica alone.
        cors_origins: whose pages may read answers. upstream: bounds on connections to the engine.
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
        user_header=user_header,
        upstream=upstream,
        engine_key=engine_key,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            proxy.running(),
            board.running(),
            background() if background is not None else nullcontext(),
        ):
            yield

    ours: list[BaseRoute] = [*models.router(replica, admin).routes]
    asked_most = len(ours)
    for router in (
        lora.router(replica, admin, trail),
        uploads.router(replica, admin, trail),
        registered.router(replica, admin),
        acts.router(replica, admin, trail),
        follow.router(replica, admin, trail, hold_timeout_s=hold_timeout_s),
        control.router(
            replica, admin, trail, proxy.pauses, proxy.asked_plainly, hold_timeout_s=hold_timeout_s
        ),
        dynamo.router(replica, admin, trail, hold_timeout_s=hold_timeout_s),
        events.router(replica, admin),
        observe.router(
            replica, admin, trail, proxy.engine_metrics, pauses=proxy.pauses, admin_port=admin_port
        ),
        routes.router(replica, admin, board),
    ):
        ours.extend(router.routes)  # include_router would compile each route's models a second time
    app = FastAPI(
        title="lora-fs sidecar",
        version=__version__,
        lifespan=lifespan,
        openapi_url=OPENAPI,
        docs_url=None,
        redoc_url=None,
        middleware=layers(cors_origins, admin_port, (OPENAPI, *operations(ours))),
        exception_handlers=HANDLERS,
    )
    app.state.end = board.end
    ours.extend(list(other_methods(app.router, [*app.router.routes, *ours])))
    way = proxied(max_body_bytes)
    ways = {
        path: Route(path, proxy, methods=list(METHODS), middleware=way)
        for path in (*COMMON, "/v1/{path:path}", *INFERENCE)
    }
    ours[asked_most:asked_most] = [ways.pop(path) for path in COMMON]
    app.router.routes.extend([*ours, *ways.values()])
    return app
