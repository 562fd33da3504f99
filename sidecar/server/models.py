"""``GET /v1/models``: the engine's own cards, then every adapter of the volume, sorted by name.

The adapters' part is the same bytes on every replica. Rendered once a change, whatever the records
say: none of them keeps the others from being listed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.model import JsonObject
from lora_fs.sidecar.server.bodies import ErrorBody, ModelCard, ModelList
from lora_fs.sidecar.server.errors_http import error_response
from lora_fs.sidecar.server.ports import ReplicaPort, Served

_MADE_ANEW = frozenset({"created", "permission"})  # by vLLM, at each answer


def card(served: Served, parent: str) -> JsonObject:
    """One adapter in vLLM's ModelCard shape. ``root`` is its place on the volume."""
    return {
        "id": served.name,
        "object": "model",
        "created": _unix_s(served.record.updated_at),
        "owned_by": "vllm",
        "root": served.record.spec.path,
        "parent": parent,
        "max_model_len": None,
        "permission": [],
    }


def _unix_s(written: str) -> int:
    """Seconds; 0 if it is no date, which a record may hold: ``updated_at`` is for people."""
    try:
        at = datetime.datetime.fromisoformat(written)
    except ValueError:
        return 0
    at = at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
    return int((at - datetime.datetime.fromtimestamp(0, datetime.UTC)).total_seconds())


def _lasting(cards: Iterable[JsonObject]) -> list[JsonObject]:
    return [{name: value for name, value in card.items() if name not in _MADE_ANEW} for card in cards]


def router(replica: ReplicaPort) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["models"])
    rendered: tuple[object, bytes] = (None, b"")

    def parent() -> str:
        bases = replica.base_cards()
        return str(bases[0]["id"]) if bases else replica.model

    @routes.get(
        "/v1/models",
        summary="List the base model and every adapter",
        responses={200: {"model": ModelList}},
        response_class=JSONResponse,
    )
    async def list_models() -> Response:
        nonlocal rendered
        bases, catalog = replica.base_cards(), replica.catalog()
        key = (catalog.version, _lasting(bases))
        if rendered[0] != key:
            base = parent()
            cards = [card(served, base) for served in catalog.served.values()]
            rendered = (key, json.dumps({"object": "list", "data": [*bases, *cards]}).encode())
        return Response(rendered[1], media_type="application/json")

    @routes.get(
        "/v1/models/{model:path}",
        summary="One model",
        responses={200: {"model": ModelCard}, 404: {"model": ErrorBody}, "default": {"model": ErrorBody}},
        response_class=JSONResponse,
    )
    async def get_model(model: str) -> Response:
        for base in replica.base_cards():
            if base.get("id") == model:
                return JSONResponse(base)
        served = replica.lookup(model)
        if served is None:
            message = f"The model `{model[:200]}` does not exist."
            return error_response(message, 404, "NotFoundError", "model")
        return JSONResponse(card(served, parent()))

    return routes
