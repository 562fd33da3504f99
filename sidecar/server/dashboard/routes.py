"""A replica's page at ``GET /``, and the data behind it: under ``/v1``, read as the other lists are."""

# No postponed annotations: FastAPI has to see ``Request``, of a function inside one.

import gzip
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.errors import LoraFsError, NotFound
from lora_fs.sidecar.registry.store.evaluations import Evaluations
from lora_fs.sidecar.server.bodies import ErrorBody
from lora_fs.sidecar.server.dashboard.board import MAX_WAIT_S, Board, Since
from lora_fs.sidecar.server.dashboard.page import page
from lora_fs.sidecar.server.dashboard.revisions import revisions_of
from lora_fs.sidecar.server.dashboard.usage import totals_of
from lora_fs.sidecar.server.leaving import while_it_waits
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.ports import ReplicaPort, Served


def router(replica: ReplicaPort, admin: Admin, board: Board) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["dashboard"])
    for path, answer in page("index.html").items():
        routes.add_api_route(path, answer, methods=["GET"], include_in_schema=False)

    @routes.get(
        "/v1/dashboard",
        summary="What the dashboard shows: all of it, or what changed",
        responses={
            200: {"content": {"application/json": {}}},
            204: {"description": "Nothing changed"},
            400: {"model": ErrorBody},
            "default": {"model": ErrorBody},
        },
        response_class=Response,
    )
    async def changes(
        request: Request,
        since: Annotated[str, Query(max_length=64, description="`since` of the last answer")] = "",
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="For a change")] = 0,
    ) -> Response:
        sight = await admin.sight(request.headers)
        known = await admin.knows(request.headers)
        news = board.answer(Since.parse(since), sight, wait_s, known=known)
        body = await while_it_waits(news, request.receive)
        if body is None:
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return Response(body, media_type="application/json", headers=headers)

    @routes.get(
        "/v1/dashboard/adapters/{name:path}",
        summary="One adapter on every replica",
        responses={
            200: {"content": {"application/json": {}}},
            404: {"model": ErrorBody},
            "default": {"model": ErrorBody},
        },
        response_class=JSONResponse,
    )
    async def adapter(name: str, request: Request) -> Response:
        sight = await admin.sight(request.headers)
        served = replica.catalog().served.get(name)
        if served is None or served.record.namespace not in sight:
            replica.check_read()
            raise NotFound(f"The model `{name[:200]}` does not exist.")
        said = await board.described(served)
        usage, whole = totals_of(said.values())
        evaluations = await _evaluations(replica, served)
        told: dict[str, Any] = {
            "name": name,
            "record": served.record.model_dump(mode="json"),
            "residency": replica.residency().get(name),
            "staged": replica.staged(served),
            "revisions": revisions_of(
                replica.catalog(), served, usage, evaluations or Evaluations(), whole=whole
            ),
            "evaluations_known": evaluations is not None,
            "usage_whole": whole,
            "replicas": {
                other: one.status.model_dump(mode="json") for other, one in said.items() if one.status
            },
        }
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    return routes


async def _evaluations(replica: ReplicaPort, served: Served) -> Evaluations | None:
    """Read the evaluations of a name's revisions afresh; None if they are unreadable now."""
    try:
        return (await replica.administration.named(served.record.key.scope, served.record.name))[2]
    except LoraFsError:
        return None
