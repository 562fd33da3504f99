"""A path of ours with a method that it does not have: 405 with ``Allow``; ``HEAD`` is ``GET`` without a body.

Without these the proxy's route for all of ``/v1/`` would take such a request to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send


class OtherMethods:
    """The end of one path: what no route of it takes."""

    def __init__(self, router: Router, methods: Iterable[str]) -> None:
        self._router = router
        self._allowed = {*methods, *(["HEAD"] if "GET" in methods else [])}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" and "GET" in self._allowed:
            # The server's own scope still says HEAD: it sends no body.
            await self._router({**scope, "method": "GET"}, receive, send)
            return
        allowed = ", ".join(sorted(self._allowed))
        message = f"{scope['path'][:200]} takes {allowed}, not {scope['method']}"
        raise HTTPException(405, message, headers={"Allow": allowed})


def other_methods(router: Router, owned: Iterable[BaseRoute]) -> Iterator[Route]:
    """Yield one route for each path of ``owned``, which takes the methods that the path does not have."""
    methods: dict[str, set[str]] = {}
    for route in owned:
        if isinstance(route, Route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    for path, has in methods.items():
        yield Route(path, OtherMethods(router, has), include_in_schema=False)
