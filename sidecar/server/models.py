"""``GET /v1/models``: the engine's own cards, then every adapter of the volume, sorted by name.

The adapters' part is the same bytes on every replica. Rendered once a change.
"""

from __future__ import annotations

import datetime
import json

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.model import JsonObject
from lora_fs.sidecar.server.bodies import ErrorBody, ModelCard, ModelList
from lora_fs.sidecar.server.errors_http import error_response
from lora_fs.sidecar.server.ports import ReplicaPort, Served


def card(served: Served, parent: str) -> JsonObject:
    """One adapter in vLLM's ModelCard shape. ``root`` is its place on the volume."""
    created = datetime.datetime.fromisoformat(served.record.updated_at)
    return {
        "id": served.name,
        "object": "model",
        "created": int(created.timestamp()),
        "owned_by": "vllm",
        "root": served.record.spec.path,
        "parent": parent,
        "max_model_len": None,
        "permission": [],
    }


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
        key = (catalog.version, tuple(c.get("id") for c in bases))
        if rendered[0] != key:
            cards = [card(served, parent()) for served in catalog.served.values()]
            rendered = (key, json.dumps({"object": "list", "data": [*bases, *cards]}).encode())
        return Response(rendered[1], media_type="application/json")

    @routes.get(
        "/v1/models/{model:path}",
        summary="One model",
        responses={200: {"model": ModelCard}, 404: {"model": ErrorBody}},
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
