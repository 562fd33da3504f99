"""Before every request: the adapter it names is ready, and stays until the answer has been sent.

An ASGI middleware of the API server. A request that names no adapter of the registry, or one that its
sender may not read, passes as it is: to vLLM that name is unknown. The gate checks the sender's rights before
it looks the name up, so that no answer tells the two apart. Any other request waits here for its load, while
the engine serves the rest. It waits until its client leaves or the server ends. A request during vLLM's
shutdown of its engine is refused, whatever its model: vLLM would fail it, or answer nothing.
A request that the shutdown cuts off, since vLLM may not wait for it, gets the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.lora.request import LoRARequest

from lora_fs.sidecar import tracing
from lora_fs.sidecar.errors import EngineUnavailable, InputError, LoraFsError, TooLarge
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.errors import error_response, refuse, respond
from lora_fs.sidecar.server.proxy.aborted import Unaborted
from lora_fs.sidecar.server.proxy.canary import counted, user_of
from lora_fs.sidecar.settings import BODY_MAX_BYTES
from lora_fs.worker_patch.api.answer import Answer, uncut
from lora_fs.worker_patch.api.asked import Asked, asked
from lora_fs.worker_patch.api.asks import Asks, read
from lora_fs.worker_patch.api.ending import TOLD, Ending
from lora_fs.worker_patch.api.engine import InProcess
from lora_fs.worker_patch.api.incoming import ClientLeft, Incoming, route_of

_OWN = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters", "/v1/loras", "/adapters"}
)
_OWN_UNDER = "/v1/lora_adapters/"
_ANTHROPICS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


class Behind(NamedTuple):
    """The parts that the gate needs, once vLLM has made them."""

    replica: Replica
    engine: InProcess
    hold_timeout_s: float
    admin: Admin
    user_header: str | None = None


class Gate:
    """``behind`` gives None as long as the server is starting."""

    def __init__(
        self,
        app: ASGIApp,
        behind: Callable[[], Behind | None],
        max_body_bytes: int = BODY_MAX_BYTES,
        ending: Ending | None = None,
    ) -> None:
        self._app, self._behind, self._max_body_bytes = app, behind, max_body_bytes
        self._ending = ending or Ending()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        behind = self._behind()
        if behind is None or scope["type"] != "http" or scope["method"] != "POST" or _is_own(route_of(scope)):
            await self._app(scope, receive, send)
            return
        incoming = Incoming(receive)
        try:
            asks = await read(scope, await incoming.read(self._max_body_bytes))
            if behind.engine.ends:
                raise EngineUnavailable(TOLD)
            chosen = await _chosen(behind, asks, Headers(scope=scope))
            if chosen is None:
                engine, own = behind.engine, behind.engine.of_vllm(asks.model)
                if own is None:
                    await self._ask(engine, scope, incoming, Unaborted(send))
                else:  # an adapter that vLLM was started with: a step tries again if it ran blank
                    await self._answer(engine, own, Answer(None, Unaborted(send)), scope, incoming)
            else:
                count = partial(behind.replica.answered, chosen)
                send = counted(send, count)
                whole = Unaborted(
                    send, lambda has_begun: count(HTTPStatus.BAD_GATEWAY) if has_begun else None
                )
                await self._pass(behind, str(asks.model), chosen, scope, incoming, whole)
        except (LoraFsError, HTTPException, ClientLeft) as error:
            await _refusal(scope, error)(scope, receive, send)
        finally:
            incoming.close()

    async def _ask(self, engine: InProcess, scope: Scope, incoming: Incoming, send: Send) -> None:
        """Let vLLM answer.

        Raises:
            EngineUnavailable: its engine ended before the answer began.
        """
        with engine.serving(), uncut(send, lambda: engine.ends) as sending:
            await self._app(scope, incoming.receive, sending)

    async def _answer(
        self, engine: InProcess, request: LoRARequest, answer: Answer, scope: Scope, incoming: Incoming
    ) -> None:
        """Let vLLM answer as long as every worker has the adapter's weights."""
        try:
            async with engine.answering(request):
                await self._ask(engine, scope, incoming, answer.send)
        except EngineUnavailable as error:
            await answer.broken(error, _last_events(scope, error))

    async def _pass(
        self, behind: Behind, name: str, chosen: Served, scope: Scope, incoming: Incoming, send: Send
    ) -> None:
        replica, engine = behind.replica, behind.engine
        for _ in range(2):  # an adapter may have been evicted meanwhile
            # hold() resolves the name once more, and at a retry it may serve another revision.
            chosen = replica.lookup(chosen.name) or chosen
            async with AsyncExitStack() as held:
                key, headers = str(chosen.record.key), Headers(scope=scope)
                with tracing.span("hold", carrier=headers, lora_fs__adapter=key):
                    async with incoming.while_it_waits(), self._ending.waiting():
                        hold = replica.hold(chosen.name, behind.hold_timeout_s)
                        engine_name = await held.enter_async_context(hold)
                request = engine.requests.get(engine_name)
                if request is not None:
                    with engine.using(request):
                        async with incoming.while_it_waits(), self._ending.waiting():
                            is_there = await engine.hold(request)
                        if is_there:
                            request = engine.requests.get(engine_name, request)  # not of before a blank run
                            token = asked.set(Asked(name, request))
                            answer = Answer(chosen.record, send)
                            try:
                                await self._answer(engine, request, answer, scope, incoming)
                            finally:
                                asked.reset(token)
                            return
            replica.forget(engine_name)
        raise EngineUnavailable(f"{name} was evicted from host memory while it was waited for")


def _is_own(route: str) -> bool:
    """Whether a path is lora-fs's: its body names no model, and may be an adapter's weights."""
    return route in _OWN or route.startswith(_OWN_UNDER)


async def _chosen(behind: Behind, asks: Asks, headers: Headers) -> Served | None:
    """The adapter that is to answer; None: vLLM says what it makes of the name.

    Raises:
        HTTPException: as ``Admin.sight``. VolumeUnavailable: the names are not known yet.
        InputError: adapters do not support this request.
    """
    name, replica = asks.model, behind.replica
    if not name or replica.passes_through(name):
        return None
    sight = await behind.admin.sight(headers)
    served = replica.lookup(name)
    if served is None or served.record.namespace not in sight:
        replica.check_read()
        return None
    if asks.is_fetched_later:
        raise InputError("`background`: an adapter is held until the answer is sent; ask without it")
    return replica.choose(served, user_of(headers, behind.user_header, asks.user))


def _refusal(scope: Scope, error: Exception) -> JSONResponse:
    """The answer to an error, in the shape that vLLM's have at this path."""
    match error:
        case LoraFsError():
            answer = respond(error, None if isinstance(error, TooLarge) else "model", as_vllm=True)
        case HTTPException():
            answer = refuse(error)
        case _:  # nobody reads it
            answer = error_response("the client left", 499, "ClientLeft")
    if route_of(scope) not in _ANTHROPICS:
        return answer
    told = json.loads(bytes(answer.body))["error"]
    body = {"type": "error", "error": {"type": told["type"], "message": told["message"]}}
    kept = {
        name: answer.headers[name] for name in ("retry-after", "www-authenticate") if name in answer.headers
    }
    return JSONResponse(body, answer.status_code, kept)


def _last_events(scope: Scope, error: Exception) -> bytes:
    """The end of a stream that broke. Anthropic's clients skip an event that has no name."""
    told = b"data: " + bytes(_refusal(scope, error).body) + b"\n\n"
    return b"event: error\n" + told if route_of(scope) in _ANTHROPICS else told + b"data: [DONE]\n\n"
