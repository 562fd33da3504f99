"""Keep operations on a port of their own, so that a NetworkPolicy can separate them from inference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_fs.sidecar.server.middleware.errors import error_response

BOTH: Final = ("/health", "/metadata", "/v1/models", "/v1/list_lora_adapters")


class AdminPort:
    """Answer ``operations`` on ``port`` alone, and nothing else there but ``BOTH``.

    Args:
        operations: paths, each with all that is below it.
    """

    def __init__(self, app: ASGIApp, port: int, operations: tuple[str, ...]) -> None:
        self._app, self._port, self._operations = app, port, operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_under(scope["path"], BOTH):
            is_operation = _is_under(scope["path"], self._operations)
            if is_operation != (scope["server"][1] == self._port):
                where = f"port {self._port}" if is_operation else "the port for inference (LORA_FS_PORT)"
                await error_response(f"this path is served on {where}", 404, "NotFoundError")(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


def operations(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Yield the paths of the sidecar's own routes, without their parameters, but for those of ``BOTH``.

    So a new route is an operation unless somebody lists it in ``BOTH``.
    """
    for route in routes:
        if isinstance(route, Route) and not _is_under(route.path, BOTH):
            yield route.path.partition("/{")[0]


def _is_under(path: str, tops: tuple[str, ...]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in tops)
