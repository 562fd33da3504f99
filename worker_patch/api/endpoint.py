"""vLLM's ``EndpointPlugin``: lora-fs's routes in place of vLLM's, the gate, and the replica behind both.

Official hooks throughout, save one object: ``openai_serving_models``, which every handler uses,
gets another ``lora_requests``, ``resolve_lora`` and ``model_name``. See docs/engine.md.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from starlette.datastructures import State
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lora_fs.sidecar import logs, tracing
from lora_fs.sidecar.engine.protocol import Facts
from lora_fs.sidecar.errors import EngineUnavailable, InputError, LoraFsError
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.reconcile.assembly import Assembly, assemble
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.server.dashboard import routes as dashboard
from lora_fs.sidecar.server.dashboard.board import Board
from lora_fs.sidecar.server.dashboard.fleet import Fleet
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.errors import on_error
from lora_fs.sidecar.server.middleware.tokens import digest_of
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
from lora_fs.sidecar.server.routes.fleet import follow
from lora_fs.sidecar.settings import Settings, load_settings
from lora_fs.sidecar.validate import expect
from lora_fs.worker_patch import compat
from lora_fs.worker_patch.api.ending import Ending
from lora_fs.worker_patch.api.shared_series import SharedSeries, server_number, shared_among

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.tasks import SupportedTask

    from lora_fs.worker_patch.api.gate import Behind

logger = logging.getLogger(__name__)
vllms_logger = logging.getLogger("vllm.lora_fs")  # vLLM prints its own from INFO on, ours from WARNING

MOST_WAIT_S = 2.0  # for news on the dashboard: a vLLM that ends waits for its requests


class _Late:
    """A replica that is made after its routes are: until then every call is a 503."""

    def __init__(self) -> None:
        self.replica: Replica | None = None

    def __getattr__(self, name: str) -> Any:
        if self.replica is None:
            raise EngineUnavailable("this server is starting: its adapters are not known yet")
        return getattr(self.replica, name)


class Endpoint:
    """``fit``: this vLLM is one that the plugin can serve in; otherwise nothing is done to it."""

    _settings: Settings
    _admin: Admin
    name = compat.NAME
    required_tasks: tuple[SupportedTask, ...] | None = None

    def __init__(self, *, fit: bool) -> None:
        self._fit = fit
        self._late = _Late()
        self._static: frozenset[str] = frozenset()  # names of --lora-modules
        self._series, self._workers = CollectorRegistry(), CollectorRegistry()
        self._shared: SharedSeries | None = None  # where there are several API servers
        self._assembly: Assembly | None = None
        self._behind: Behind | None = None
        self._ending = Ending()
        self._engine_client: EngineClient | None = None
        self._end_tracing: Callable[[], None] = lambda: None

    def attach_router(self, app: FastAPI) -> None:
        """Serve the registry, or log that this server serves nothing of it."""
        if not self._fit:
            compat.tell_base_alone()
            return
        from lora_fs.worker_patch.api.gate import Gate

        settings = self._settings = load_settings()
        if "log_format" in settings.model_fields_set:  # vLLM prints warnings of ours alone, as text
            logs.configure(settings.log_level, settings.log_format, ids=tracing.ids, logger="lora_fs")
        elif (
            logging.getLogger("lora_fs").level == logging.NOTSET
        ):  # what vLLM imports sets the root's to ERROR
            logging.getLogger("lora_fs").setLevel(logging.WARNING)
        self._end_tracing = tracing.start(settings.traces, settings.replica_id)
        replica = cast(Replica, self._late)
        admin = self._admin = Admin(
            settings.token_file,
            settings.public_namespaces,
            hosts=settings.hosts(),
            insecure=settings.insecure,
        )
        trail = Trail(settings.audit_file)
        self._series.register(observe.Refusals(trail))
        fleet = Fleet(Layout(settings.root)) if settings.root is not None else None
        board = Board(replica, fleet, most_wait_s=MOST_WAIT_S)
        routers = (
            models.router(replica, admin),
            lora.router(replica, admin, trail),
            uploads.router(replica, admin, trail),
            registered.router(replica, admin),
            acts.router(replica, admin, trail),
            follow.router(replica, admin, trail, hold_timeout_s=settings.hold_timeout_s),
            dynamo.router(replica, admin, trail, hold_timeout_s=settings.hold_timeout_s),
            events.router(replica, admin),
            observe.discovery(replica, admin),
            dashboard.router(replica, admin, board),
        )
        ours = [cast(Route, route) for router in (*routers, self._metrics()) for route in router.routes]
        for route in ours:
            self._bound(route)
        app.router.routes.extend(ours)  # for those that look at the application before it runs
        app.add_exception_handler(LoraFsError, on_error)
        most = settings.body_max_bytes
        app.add_middleware(Gate, behind=lambda: self._behind, max_body_bytes=most, ending=self._ending)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            _put_first(app, ours)
            try:
                async with inner(app) as state:
                    if self._assembly is None:
                        yield state
                        return
                    ends = partial(self._ends, app.state)
                    async with (
                        self._assembly.running(),
                        self._shared.running() if self._shared is not None else nullcontext(),
                        board.running(),
                        admin.watching(),
                        self._ending.watched(ends, self._end),
                    ):
                        yield state
            finally:
                await anyio.to_thread.run_sync(self._end_tracing, limiter=anyio.CapacityLimiter(1))

        app.router.lifespan_context = lifespan

    def _bound(self, route: Route) -> None:
        """Let no act keep the server up. What only reads never waits for long, and tells how it ends."""
        if not (route.methods or set()) <= {"GET", "HEAD"}:
            route.app = self._ending.bounds(route.app)

    def _ends(self, state: State) -> bool:
        """Whether vLLM ends this server, or will, since its engine is dead."""
        server, client = getattr(state, "server", None), self._engine_client
        return bool(getattr(server, "should_exit", False) or (client is not None and client.errored))

    def _end(self) -> None:
        assert self._assembly is not None
        logger.info("lora-fs ends: requests that wait for an adapter fail", extra=event("plugin.ends"))
        self._ending.begin()
        self._assembly.end()
        self._assembly.replica.wake()  # it finds that the engine does not answer, which /readyz then tells

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Raises InputError, VolumeUnavailable and their kin: the server does not start without."""
        if not self._fit or engine_client is None:
            return
        from lora_fs.worker_patch.api.engine import InProcess
        from lora_fs.worker_patch.api.gate import Behind
        from lora_fs.worker_patch.api.metrics import Tiers

        serving: OpenAIServingModels = state.openai_serving_models
        settings = self._complete(engine_client, serving)
        _answer_from_the_registry(serving)
        engine = InProcess(
            engine_client,
            serving,
            settings.replica_id,
            timeout_s=settings.engine_timeout_s,
            ending=self._ending,
            facts=_facts(engine_client),
        )
        self._admin.keys = _keys(args)
        self._admin.announce()
        await self._admin.look()
        self._engine_client = engine_client
        expectation = expect(settings)
        expectation.learned.base_config = engine_client.model_config.hf_config.to_dict()
        self._assembly = await assemble(settings, expectation, engine)
        self._assembly.volume.beside.append(self._admin.conditions)
        self._assembly.reporter.changed_by = lambda: self._admin.changed_by
        if (untested := compat.untested()) is not None:
            logger.warning("%s", untested, extra=event("plugin.untested"))
            self._assembly.volume.beside.append(lambda: (untested,))
        self._assembly.stager.aside = engine.step_aside
        replica = self._late.replica = self._assembly.replica
        bases = {base.name for base in serving.base_model_paths}
        self._static = frozenset(serving.lora_requests)
        replica.names.of_engine = self._static.union(bases)  # before the first look at the engine
        self._behind = Behind(replica, engine, settings.hold_timeout_s, self._admin, settings.user_header)
        self._workers.register(Tiers(lambda: engine.seen))
        for collector in (observe.Scrape(replica), observe.Revisions(replica)):
            self._series.register(collector)
        self._shared = shared_among(engine_client, self._own_series)
        told = event("plugin.begins", model=settings.model, root=str(settings.root))
        shown_logger = logger if "log_format" in settings.model_fields_set else vllms_logger
        shown_logger.info("lora-fs serves %s from %s", settings.model, settings.root, extra=told)

    def _metrics(self) -> APIRouter:
        """vLLM's series and ours. Its own registry is another one where there are several API servers."""
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        from lora_fs.worker_patch.api.metrics import public

        router, by_vllm = APIRouter(), get_prometheus_registry()

        @router.get("/metrics", include_in_schema=False)
        async def metrics() -> Response:
            theirs = await anyio.to_thread.run_sync(lambda: public(generate_latest(by_vllm), self._static))
            if self._shared is not None:
                return Response(theirs + await self._shared.exposed(), media_type=CONTENT_TYPE_LATEST)
            own = await observe.exposed(self._series) + await observe.exposed(self._workers)
            return Response(theirs + own, media_type=CONTENT_TYPE_LATEST)

        return router

    def _own_series(self) -> tuple[list[Metric], list[Metric]]:
        return list(self._series.collect()), list(self._workers.collect())

    def _complete(self, client: EngineClient, serving: OpenAIServingModels) -> Settings:
        """Add what the engine knows of itself to what the environment said."""
        lora_config = client.vllm_config.lora_config
        if lora_config is None:
            raise InputError("lora-fs needs a vLLM that was started with --enable-lora")
        settings = self._settings
        known = {
            "model": settings.model or serving.base_model_paths[0].name,
            "base_model": settings.base_model or client.model_config.model,
            "max_rank": settings.max_rank or lora_config.max_lora_rank,
        }
        number = server_number(client)
        if number:  # one API server of several: each observes for itself
            known["replica_id"] = f"{settings.replica_id}-{number}"
        return load_settings(**{**settings.model_dump(exclude_unset=True), **known})


def _facts(client: EngineClient) -> Facts:
    """The facts about this vLLM."""
    lora, dtype = client.vllm_config.lora_config, str(client.model_config.dtype)
    rank = lora.max_lora_rank if lora is not None else None
    return Facts(rank, dtype.removeprefix("torch."))


def _keys(args: Namespace) -> frozenset[bytes]:
    """The digests of the keys that vLLM asks for: ``--api-key``, else ``VLLM_API_KEY``."""
    from vllm import envs

    return frozenset(digest_of(key) for key in (args.api_key or [envs.VLLM_API_KEY]) if key)


def _put_first(app: FastAPI, ours: Sequence[Route]) -> None:
    """Let ``ours`` answer, and drop the routes that they replace.

    vLLM's own routes of one path that none of ours answers come first: routing compares a request twice with
    each route before its own. Call when the application is whole: SageMaker's bootstrap adds routes, and
    replaces some, after the plugins have added theirs.
    """

    def alike(route: Route) -> list[Route]:
        return [one for one in ours if one.path_regex.match(route.path)]

    def replaced(route: BaseRoute) -> bool:
        return route in ours or (
            isinstance(route, Route)
            and any((route.methods or set()) <= (one.methods or set()) for one in alike(route))
        )

    theirs = [route for route in app.router.routes if not replaced(route)]
    apart = [
        route
        for route in theirs
        if isinstance(route, Route) and not route.param_convertors and not alike(route)
    ]
    app.router.routes[:] = [*apart, *ours, *(route for route in theirs if route not in apart)]
    app.openapi_schema = None


def _answer_from_the_registry(serving: OpenAIServingModels) -> None:
    """Let vLLM's handlers see the adapter that the gate has ready, and no other."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.lora.request import LoRARequest

    from lora_fs.worker_patch.api.asked import Requests, asked
    from lora_fs.worker_patch.worker.put import put

    by_vllm = serving.model_name

    async def resolve_lora(lora_name: str) -> ErrorResponse:
        """Answer "unknown": the gate has seen every servable name. Looks nothing up, and keeps nothing."""
        message = f"The model `{lora_name[:200]}` does not exist."
        return create_error_response(
            message=message, err_type="NotFoundError", status_code=HTTPStatus.NOT_FOUND
        )

    def model_name(lora_request: LoRARequest | None = None) -> str:
        now = asked.get()
        return now.name if now is not None and now.request is lora_request else by_vllm(lora_request)

    put(serving, "lora_requests", Requests(serving.lora_requests))
    put(serving, "resolve_lora", resolve_lora)
    put(serving, "model_name", model_name)
