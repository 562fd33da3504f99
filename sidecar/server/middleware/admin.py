"""An admin call: admitted or not, and audited however it ends.

It refuses a caller without a token before it reads a body. The body of such a call has a bound on its bytes
and on its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Message, Receive

from lora_fs.sidecar.errors import LoraFsError, WaitTimeout
from lora_fs.sidecar.server.middleware.access import Admin, Caller, NotPermitted, address_of
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import ReplicaPort, namespace_of

MAX_BODY_BYTES: Final = 1 << 20  # of a load or an unload, which are names and a path
BODY_S: Final = 60.0  # in which all of it comes


class AdminCalls:
    """``trail``: records admin calls."""

    def __init__(self, replica: ReplicaPort, admin: Admin, trail: Trail) -> None:
        self._replica, self._admin, self._told = replica, admin, trail

    def token_first(self, body_bytes: int | None = MAX_BODY_BYTES, /, **verbs: Verb) -> type[APIRoute]:
        """Make routes ask for a token before FastAPI reads the query and the body, and bound the body.

        Args:
            body_bytes: at most, which come within BODY_S; None: the route bounds its body itself.
            verbs: by the name of the route's function; other routes are as they were.
        """
        calls = self

        class TokenFirst(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handle, verb = super().get_route_handler(), verbs.get(self.name)
                if verb is None:
                    return handle

                async def bounded(request: Request) -> Response:
                    await calls._ask_for_a_token(request, verb)
                    if body_bytes is not None:
                        request = Request(request.scope, _at_most(body_bytes, request.receive))
                    return await handle(request)

                return bounded

        return TokenFirst

    async def _ask_for_a_token(self, request: Request, verb: Verb) -> None:
        """Refuse a caller without a token. A token that does not suffice is refused later, with the name."""
        try:
            await self._admin.admit(request, verb, None)
        except NotPermitted:
            return
        except HTTPException as error:
            what, address = {"model": self._replica.model}, address_of(request.scope)
            await self._told.tell(verb, None, address, "denied", str(error.detail), what)
            raise

    @asynccontextmanager
    async def admitted(
        self,
        request: Request,
        verb: Verb,
        name: str,
        *,
        namespace: str | None = None,
        act: str | None = None,
        dry_run: bool = False,
    ) -> AsyncIterator[tuple[Caller, dict[str, object]]]:
        """Let the block act for a caller who may, and tell how it ended and what the block adds.

        Args:
            namespace: where it acts; None: as the name says.
            act: the audit's word for it; None: ``verb``.
            dry_run: it changes nothing, and audits only a refusal.
        """
        replica, act = self._replica, act or verb.value
        namespace = namespace or namespace_of(name, replica.namespaces)
        what: dict[str, object] = {"namespace": namespace, "model": replica.model, "name": name}
        caller: Caller | None = None
        address = address_of(request.scope)

        async def tell(outcome: str, why: str = "") -> None:
            if not dry_run:
                await self._told.tell(act, caller, address, outcome, why, what)

        try:
            caller = await self._admin.admit(request, verb, namespace)
            yield caller, what
        except HTTPException as error:
            caller = error.caller if isinstance(error, NotPermitted) else caller
            await self._told.tell(act, caller, address, "denied", str(error.detail), what)
            raise
        except LoraFsError as error:
            is_written = isinstance(error, WaitTimeout) and error.wrote is not None
            await tell("done" if is_written else "failed", str(error))
            raise
        except BaseException as error:  # the client left, or a fault of ours: it may have been done
            why = f"ended before it was known to be done: {type(error).__name__}"
            await tell("failed", why)
            raise
        await tell("done")


def _at_most(most: int, receive: Receive) -> Receive:
    """``receive``, which ends in a 413 at the first byte too many, and in a 400 where the body is late."""
    size = 0
    late_at: float | None = asyncio.get_running_loop().time() + BODY_S

    async def counted() -> Message:
        nonlocal size, late_at
        try:
            async with asyncio.timeout_at(late_at):
                message = await receive()
        except TimeoutError:
            raise HTTPException(400, f"the body comes too slowly: {size} bytes in {BODY_S:g} s") from None
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, f"the body is over {most} bytes")
        if not message.get("more_body"):
            late_at = None  # what may come now is that the client leaves
        return message

    return counted
