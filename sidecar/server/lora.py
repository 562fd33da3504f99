"""Load and unload in vLLM's shapes, and what this replica knows of every adapter.

Load and unload write the desired state, then wait, bounded, for this replica to follow.
"""

# No postponed annotations: FastAPI has to see ``Depends(admin)``, whose ``admin`` is local.

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from lora_fs.sidecar.model import JsonObject
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.server.ports import LoadRequest, ReplicaPort


class LoadBody(BaseModel):
    """vLLM's LoadLoRAAdapterRequest."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadBody(BaseModel):
    """vLLM's UnloadLoRAAdapterRequest."""

    lora_name: str
    lora_int_id: int | None = None


def router(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["adapters"])
    identify = Depends(admin)

    @routes.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(body: LoadBody, writer: str = identify) -> str:
        request = LoadRequest(body.lora_name, body.lora_path, body.load_inplace)
        await replica.load_adapter(request, writer=writer)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @routes.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(body: UnloadBody, writer: str = identify) -> str:
        await replica.unload_adapter(body.lora_name, writer=writer)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def described() -> list[JsonObject]:
        statuses, residency = replica.statuses(), replica.residency()
        return [
            {
                "name": name,
                "record": served.record.model_dump(mode="json"),
                "status": statuses[name].model_dump(mode="json"),
                "residency": residency.get(name),
            }
            for name, served in replica.catalog().served.items()
        ]

    @routes.get("/v1/lora_adapters", summary="Records with this replica's status and residency")
    async def adapters() -> JsonObject:
        return {"object": "list", "replica": replica.replica_id, "data": described()}

    @routes.get("/v1/list_lora_adapters", summary="The same, in Dynamo's shape")
    async def loras() -> JsonObject:
        return {"status": "success", "loras": described()}

    return routes
