"""Load and unload in vLLM's shapes, and what this replica knows of every adapter.

Load and unload write the desired state, then wait, bounded, for this replica to follow.
"""

# No postponed annotations: FastAPI has to see ``Depends(admin)``, whose ``admin`` is local.

from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.server.bodies import (
    AdapterDescription,
    AdapterList,
    DynamoList,
    ErrorBody,
    LoadBody,
    UnloadBody,
)
from lora_fs.sidecar.server.ports import LoadRequest, ReplicaPort

# With a response class that has a media type of its own, FastAPI gives it to the errors, too.
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    **{code: {"model": ErrorBody} for code in (400, 401, 404, 422, 503)},
}


def router(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["adapters"])
    identify = Depends(admin)

    @routes.post("/v1/load_lora_adapter", response_class=Response, responses=_ANSWERS)
    async def load(body: LoadBody, writer: str = identify) -> Response:
        request = LoadRequest(body.lora_name, body.lora_path, body.load_inplace)
        await replica.load_adapter(request, writer=writer)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_class=Response, responses=_ANSWERS)
    async def unload(body: UnloadBody, writer: str = identify) -> Response:
        await replica.unload_adapter(body.lora_name, writer=writer)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def described() -> list[AdapterDescription]:
        statuses, residency = replica.statuses(), replica.residency()
        return [
            AdapterDescription.model_validate(
                {
                    "name": name,
                    "record": served.record,
                    "status": statuses[name],
                    "residency": residency.get(name),
                    "staged": replica.staged(served),
                }
            )
            for name, served in replica.catalog().served.items()
            if name in statuses  # the catalog may have grown since
        ]

    @routes.get("/v1/lora_adapters", summary="Records with this replica's status and residency")
    async def adapters() -> AdapterList:
        return AdapterList(replica=replica.replica_id, data=described())

    @routes.get("/v1/list_lora_adapters", summary="The same, in Dynamo's shape")
    async def loras() -> DynamoList:
        return DynamoList(loras=described())

    return routes
