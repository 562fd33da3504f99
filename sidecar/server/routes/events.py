"""``GET /v1/events``: what happened lately on this replica, to whom may read it."""

from fastapi import APIRouter, Request

from lora_fs.sidecar.server.bodies import ErrorBody, Events
from lora_fs.sidecar.server.middleware.access import ALL, Admin
from lora_fs.sidecar.server.ports import ReplicaPort


def router(replica: ReplicaPort, admin: Admin) -> APIRouter:
    """The route. What befell the replica itself is for those who may read every namespace."""
    routes = APIRouter(tags=["adapters"])

    @routes.get(
        "/v1/events",
        summary="What happened lately on this replica",
        responses={"default": {"model": ErrorBody}},
    )
    async def events(request: Request, name: str | None = None) -> Events:
        """``name``: of this adapter alone, without its namespace."""
        sight = await admin.sight(request.headers)
        told = [
            event
            for event in replica.events.events()
            if (sight == ALL if event.key is None else event.key[0] in sight)
            and (name is None or (event.key is not None and event.key[3] == name))
        ]
        return Events(replica=replica.replica_id, data=told)

    return routes
