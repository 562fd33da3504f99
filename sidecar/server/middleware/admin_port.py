"""Keep operations on a port of their own, so that a NetworkPolicy can separate them from inference."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from lora_fs.sidecar.server.middleware.errors import error_response

OPERATIONS: Final = (
    "/metrics",
    "/readyz",
    "/openapi.json",
    "/dashboard",
    "/v1/dashboard",
    "/v1/events",
    "/v1/lora_adapters",
    "/v1/replicas",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/loras",
    "/adapters",
)
BOTH: Final = ("/health", "/metadata", "/v1/models", "/v1/list_lora_adapters")


class AdminPort:
    """Answer ``OPERATIONS`` and the page at ``/`` on ``port`` alone, and nothing else there but ``BOTH``."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app, self._port = app, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_under(scope["path"], BOTH):
            is_operation = scope["path"] == "/" or _is_under(scope["path"], OPERATIONS)
            if is_operation != (scope["server"][1] == self._port):
                where = f"port {self._port}" if is_operation else "the port for inference (LORA_FS_PORT)"
                await error_response(f"this path is served on {where}", 404, "NotFoundError")(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


def _is_under(path: str, tops: tuple[str, ...]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in tops)
