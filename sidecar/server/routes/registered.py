"""The registry and the replicas' reports, for our own command line, in the form that a volume gives it.

The lists are of what this replica read last, which has every change that was made through it. One name is
read afresh. A caller sees the namespaces that it may read, and nothing else.
"""

# No postponed annotations: FastAPI has to see ``Request``, of a function inside one.

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import anyio
import anyio.to_thread
from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.errors import NotFound
from lora_fs.sidecar.model import EventList, ReplicaStatus, Scope
from lora_fs.sidecar.server.bodies import ErrorBody, NameBody, ReplicaEventsBody, ReplicasBody, ScopeBody
from lora_fs.sidecar.server.middleware.access import ALL, Admin, Sight
from lora_fs.sidecar.server.ports import ReplicaPort

SCOPE: Final = "/v1/lora_adapters/{namespace}/{model}"
NAME: Final = f"{SCOPE}/{{name}}"
AT_ONCE: Final = 2  # renderings; further callers wait for one of them
HIDDEN: Final = "cannot be read"

Namespace = Annotated[str, Path(description="A namespace that this replica serves")]
Model = Annotated[str, Path(description="The folder of the base model: Qwen--Qwen2.5-7B")]
Name = Annotated[str, Path(description="The adapter's name, without a revision")]


def scope_of(replica: ReplicaPort, namespace: str, model: str, sight: Sight = ALL) -> Scope:
    """Return the scope, if this replica serves it and the caller may see it; else raises NotFound."""
    if model != replica.model:
        raise NotFound(f"the base model served here is {replica.model}, not {model[:200]!r}")
    if namespace not in replica.namespaces or namespace not in sight:
        raise NotFound(f"no namespace {namespace[:200]!r} that you may read is served here")
    return Scope(namespace, model)


def router(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["registry"])
    threads = anyio.CapacityLimiter(AT_ONCE)

    async def rendered(render: Callable[[], str]) -> Response:
        text = await anyio.to_thread.run_sync(render, limiter=threads)
        return Response(text, media_type="application/json")

    @routes.get(
        SCOPE,
        summary="The registered adapters of a scope",
        responses={200: {"model": ScopeBody}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def scope(namespace: Namespace, model: Model, request: Request) -> Response:
        sight = await admin.sight(request.headers)
        replica.check_read()
        of, desired = scope_of(replica, namespace, model, sight), replica.catalog().source

        def render() -> str:
            records = [one for one in desired.records_of(of).values() if one.present]
            pointers = list(desired.pointers.parts.get(of, {}).values())
            problems = replica.administration.problems_of(of.namespace, desired.problems)
            return ScopeBody.model_construct(
                records=records, pointers=pointers, problems=problems
            ).model_dump_json()

        return await rendered(render)

    @routes.get(
        NAME,
        summary="What a name serves, and its revisions",
        responses={200: {"model": NameBody}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def named(namespace: Namespace, model: Model, name: Name, request: Request) -> Response:
        sight = await admin.sight(request.headers)
        of = scope_of(replica, namespace, model, sight)
        pointer, revisions, known = await replica.administration.named(of, name)
        body = NameBody(
            pointer=pointer,
            revisions=list(revisions),
            evaluations=dict(known.found),
            unreadable_evaluations=dict(known.unreadable),
        )
        return JSONResponse(body.model_dump(mode="json"))

    @routes.get(
        "/v1/replicas",
        summary="What every replica of the volume reports",
        responses={200: {"model": ReplicasBody}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def replicas(request: Request) -> Response:
        sight = await admin.sight(request.headers)
        reports = await replica.administration.reports()

        def render() -> str:
            seen = (_within(sight, one) for one in reports.replicas if one.model == replica.model)
            told = [one for one in seen if one is not None]
            unreadable = _told(sight, reports.unreadable)
            return ReplicasBody.model_construct(
                replicas=told, unreadable=unreadable, young=list(reports.young)
            ).model_dump_json()

        return await rendered(render)

    @routes.get(
        "/v1/replicas/events",
        summary="What happened on every replica lately",
        responses={200: {"model": ReplicaEventsBody}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def events(request: Request) -> Response:
        sight = await admin.sight(request.headers)
        happened = await replica.administration.happened()

        def render() -> str:
            lists = [_seen(sight, one) for one in happened.lists if one.model == replica.model]
            unreadable = _told(sight, happened.unreadable)
            return ReplicaEventsBody.model_construct(lists=lists, unreadable=unreadable).model_dump_json()

        return await rendered(render)

    return routes


def _within(sight: Sight, status: ReplicaStatus) -> ReplicaStatus | None:
    """Keep of a report what is of namespaces that may be read; None if it serves none of them.

    Conditions are reduced to their kind. It leaves out figures, which count every namespace. Names have
    their namespace in front as long as several are left.
    """
    if sight == ALL:
        return status
    namespaces = tuple(one for one in status.namespaces if one in sight)
    if not namespaces:
        return None
    adapters = {public: one for public, one in status.adapters.items() if one.key[0] in sight}
    if len(namespaces) == 1 < len(status.namespaces):
        adapters = {public.removeprefix(f"{namespaces[0]}/"): one for public, one in adapters.items()}
    return status.model_copy(
        update={
            "namespaces": namespaces,
            "adapters": adapters,
            "recent": {series: at for series, at in status.recent.items() if series.split("/")[0] in sight},
            "usage": {key: counts for key, counts in status.usage.items() if key.split("/")[0] in sight},
            "downloads": {name: one for name, one in status.downloads.items() if one.namespace in sight},
            "conditions": tuple(one.partition(":")[0] for one in status.conditions),
            "counts": {},
            "figures": {},
        }
    )


def _seen(sight: Sight, told: EventList) -> EventList:
    """Keep the events of namespaces that may be read; a replica's own only if all may be read."""
    if sight == ALL:
        return told
    kept = tuple(one for one in told.events if one.key is not None and one.key[0] in sight)
    return told.model_copy(update={"events": kept})


def _told(sight: Sight, unreadable: Mapping[str, str]) -> dict[str, str]:
    """The unreadable files; also why, and their places, if the caller may read all."""
    if not sight:
        return {}
    return {replica: why if sight == ALL else HIDDEN for replica, why in unreadable.items()}
