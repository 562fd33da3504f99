"""``GET /v1/models``: the engine's own cards, then every adapter of the volume, sorted by name.

The adapters' part is the same bytes on every replica, for whoever may read the same namespaces.
Rendered once a change, and only for changed adapters. Whatever a record says, it keeps no other adapter
off the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.model import JsonObject
from lora_fs.sidecar.registry.format.ids import written_at
from lora_fs.sidecar.server.bodies import ErrorBody, ModelCard, ModelList
from lora_fs.sidecar.server.middleware.access import Admin, Sight
from lora_fs.sidecar.server.middleware.errors import error_response
from lora_fs.sidecar.server.ports import Catalog, ReplicaPort, Served
from lora_fs.sidecar.server.routes.listing import around
from lora_fs.sidecar.server.routes.render_cache import RenderCache

MAX_SIGHTS = 16  # lists kept rendered, each for callers who may read the same namespaces
_MADE_ANEW = frozenset({"created", "permission"})  # by vLLM, at each answer


class AsItIs(APIRoute):
    """A route whose endpoint takes the request as it is: all that FastAPI does is to document it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint."""
        return self.endpoint


def card(served: Served, parent: str) -> JsonObject:
    """One adapter in vLLM's ModelCard shape. ``root`` is its place on the volume."""
    return {
        "id": served.name,
        "object": "model",
        "created": int(unix_s(served.record.updated_at) or 0),
        "owned_by": "vllm",
        "root": served.record.spec.path,
        "parent": parent,
        "max_model_len": None,
        "permission": [],
    }


def unix_s(written: str) -> float | None:
    """Seconds; None if it is no date, which a record or a report may hold: such times are for people."""
    at = written_at(written)
    return at.timestamp() if at is not None else None


def _lasting(cards: Iterable[JsonObject]) -> list[JsonObject]:
    return [{name: value for name, value in card.items() if name not in _MADE_ANEW} for card in cards]


def router(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["models"])
    rendered: dict[Sight, bytes] = {}
    rendered_from: object = None
    cards: dict[str, RenderCache[bytes]] = {}  # by the parent that they name

    def parent() -> str:
        bases = replica.base_cards()
        return str(bases[0]["id"]) if bases else replica.model

    def render(bases: Iterable[JsonObject], catalog: Catalog, sight: Sight) -> bytes:
        base = parent()
        if base not in cards:
            cards.clear()
            cards[base] = RenderCache(lambda one: json.dumps(card(one, base)).encode())
        made = cards[base].of(catalog.served)
        seen = (made[one.name] for one in catalog.in_order() if one.record.namespace in sight)
        data = b", ".join([*(json.dumps(one).encode() for one in bases), *seen])
        return around([data], {"object": "list"}, "data")

    async def list_models(request: Request) -> Response:
        nonlocal rendered_from
        sight = await admin.sight(request.headers)
        replica.check_read()
        bases, catalog = replica.base_cards(), replica.catalog()
        kept_to = [replica.kept_to(str(base["id"])) for base in bases]
        key = (catalog.version, _lasting(bases), kept_to)
        if rendered_from != key or len(rendered) > MAX_SIGHTS:
            rendered.clear()
            rendered_from = key
        if sight not in rendered:
            shown = [base for base, to in zip(bases, kept_to, strict=True) if to is None or to in sight]
            rendered[sight] = render(shown, catalog, sight)
        return Response(rendered[sight], media_type="application/json")

    routes.add_api_route(
        "/v1/models",
        list_models,
        methods=["GET"],
        summary="List the base model and every adapter",
        responses={200: {"model": ModelList}},
        response_class=JSONResponse,
        route_class_override=AsItIs,
    )

    @routes.get(
        "/v1/models/{model:path}",
        summary="One model",
        responses={200: {"model": ModelCard}, 404: {"model": ErrorBody}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def get_model(model: str, request: Request) -> Response:
        base = next((one for one in replica.base_cards() if one.get("id") == model), None)
        kept_to = replica.kept_to(model)
        if base is not None and kept_to is None:
            return JSONResponse(base)
        sight = await admin.sight(request.headers)  # for any name: no answer reveals a hidden one
        if base is not None and kept_to in sight:
            return JSONResponse(base)
        served = replica.lookup(model)
        if served is None or served.record.namespace not in sight:
            replica.check_read()
            message = f"The model `{model[:200]}` does not exist."
            return error_response(message, 404, "NotFoundError", "model")
        return JSONResponse(card(served, parent()))

    return routes
