"""Calls that concern every replica: loads, unloads, pauses. All of them do it, or it is undone.

One replica registers the load, with the caller's own credentials, and each other one then loads that very
revision. A hint lets the others begin as soon as they see it, while the first one loads. So a registry that
some mount shows late costs that delay and no failed try.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lora_fs.sidecar.errors import InputError, TemporaryError, TooLarge
from lora_fs.sidecar.gateway.calls.asking import Asking, Call, Headers, Said, as_it_is, failed, read
from lora_fs.sidecar.gateway.calls.configuration import CONFIG, common, difference
from lora_fs.sidecar.gateway.calls.pauses import Pauses
from lora_fs.sidecar.gateway.forward import VIA, check_site
from lora_fs.sidecar.gateway.watch import WRONG
from lora_fs.sidecar.server.middleware.access import HEADER, address_of
from lora_fs.sidecar.server.middleware.answers import ADAPTER, LOAD
from lora_fs.sidecar.server.middleware.body_limit import Intake
from lora_fs.sidecar.server.middleware.origin import Sites

MOST_BYTES: Final = 1 << 20  # of a call
BODY_S: Final = 30.0  # in which nothing of a call's body comes
ADMIT_S: Final = 5.0  # in which a replica says whether it knows the caller
LEAVE_S: Final = 30.0  # in which an adapter leaves every replica
LOOK_S: Final = 0.02  # then twice as long each time
MOST_LOOK_S: Final = 0.5
_CREDENTIALS: Final = ("authorization", HEADER)
_PASSED: Final = (*_CREDENTIALS, "content-type", "traceparent")
_QUOTED: Final = re.compile(rb"'([^']+)'")


class Broadcast:
    """Ask every ready replica.

    Args:
        sites: whose pages may ask: a replica sees the gateway's address and Host, and cannot tell.
    """

    def __init__(self, asking: Asking, sites: Sites) -> None:
        self._asking, self._watch, self._sites = asking, asking.watch, sites
        self._pauses = Pauses(asking)
        self._intake = Intake(MOST_BYTES, idle_s=BODY_S)

    async def load(self, request: Request) -> Response:
        """Register an adapter, and answer when every replica has it loaded. Undone where one refuses."""
        return await self._with_body(request, "/v1/load_lora_adapter", self._load)

    async def unload(self, request: Request) -> Response:
        """Unregister an adapter, and answer when no replica has it any more."""
        return await self._with_body(request, "/v1/unload_lora_adapter", self._unload)

    async def pause(self, request: Request) -> Response:
        """Pause every replica, or none."""
        return await self._pauses.pause(request, self._passed(request))

    async def resume(self, request: Request) -> Response:
        """Resume every replica. Asks each one, whatever another one answers."""
        return await self._pauses.resume(request, self._passed(request))

    async def _with_body(
        self, request: Request, path: str, act: Callable[[str, dict[str, Any], Headers], Awaitable[Response]]
    ) -> Response:
        """Do a call with a body, of a caller whom a replica knows.

        A replica checks the caller first. So one that is asked without a body refuses it for the caller, or
        for the body, and does nothing.
        """
        headers = self._passed(request)
        asked = Call("POST", path, headers, timeout_s=ADMIT_S)
        known = await self._asking.one(self._asking.ready()[0], asked)
        if known.status in (401, 403):
            return as_it_is(known)
        try:
            body = await self._object(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        return await act(path, body, headers)

    @asynccontextmanager
    async def _hinted(self, name: str, headers: Headers) -> AsyncIterator[None]:
        """Let the other replicas load what ``name`` serves next, beside the first one. No answer counts."""
        call = Call("POST", "/v1/lora_adapters/next", headers, {"lora_name": name})
        hints = [
            asyncio.create_task(self._asking.one(one, call), name=f"hint {one}")
            for one in self._asking.ready()[1:]
        ]
        try:
            yield
        finally:
            for hint in hints:
                hint.cancel()
            await asyncio.gather(*hints, return_exceptions=True)

    async def _load(self, path: str, body: dict[str, Any], headers: Headers) -> Response:
        async with self._hinted(body["lora_name"], headers):
            first, others, said = await self._asking.first(Call("POST", path, headers, body))
            return await self._loaded_by(first, others, said, headers)

    async def _loaded_by(self, first: str, others: Sequence[str], said: Said, headers: Headers) -> Response:
        made = said.headers.get(LOAD.decode())
        if not said.is_done and made is None:
            return as_it_is(said)  # it wrote nothing
        try:
            namespace, model, revision, name = said.headers[ADAPTER.decode()].split("/", 3)
        except (KeyError, ValueError) as error:
            why = f"replica {first} registered something, and did not say what: no other replica loads it now"
            raise HTTPException(502, why) from error
        path = "/v1/lora_adapters/" + "/".join(quote(one, safe="") for one in (namespace, model, name))
        told = [said]
        if said.is_done:
            load = Call("POST", f"{path}/load", headers, {"revision": revision})
            told += await self._asking.all_that_stay(others, load)
        if not (refused := self._asking.refused(told)):
            return as_it_is(said)
        undone = await self._undo([first, *others], path, made, headers)
        raise failed(refused, [undone], "the load was undone everywhere")

    async def _undo(self, replicas: Sequence[str], path: str, made: str | None, headers: Headers) -> Said:
        """Take back what a load wrote, by the first replica that can: they share the registry."""
        said = Said("", 0, f"replica {replicas[0]} did not say what it wrote".encode(), {}, False)
        try:
            call = Call("POST", f"{path}/undo", headers, json.loads(made or ""))
        except (ValueError, RecursionError):
            return said
        for one in replicas:
            said = await self._asking.one(one, call)
            if said.has_answered and said.status < 500:
                break
        return said

    async def _unload(self, path: str, body: dict[str, Any], headers: Headers) -> Response:
        # Whose list of a replica's adapters shows this one: afterwards an empty list could mean either.
        viewers = [(one, await self._namespaces(one)) for one in (headers, self._watch.headers)]
        _, others, said = await self._asking.first(Call("POST", path, headers, body))
        if not said.is_done or not others:
            return as_it_is(said)
        name, pause_s = _unregistered(said, body), LOOK_S
        namespace = name.rpartition("/")[0]
        viewer = next((one for one, seen in viewers if seen and (not namespace or namespace in seen)), None)
        if viewer is None:
            why = "neither the caller's token nor the gateway's may read its namespace"
            where = ", ".join(others)
            return PlainTextResponse(f"{name} is unregistered; {why}, so {where} may hold it for now", 202)
        try:
            async with asyncio.timeout(LEAVE_S):
                while have := await self._have(name, others, viewer):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MOST_LOOK_S)
        except TimeoutError as error:
            raise TemporaryError(
                f"{name} is unregistered; requests that began before still hold it at {', '.join(have)}"
            ) from error
        return as_it_is(said)

    async def _namespaces(self, headers: Headers) -> list[str]:
        """List the namespaces with adapters whose names ``headers`` let one read."""
        call = Call("GET", "/metadata", headers, timeout_s=ADMIT_S)
        said = await self._asking.one(self._asking.ready()[0], call)
        told = read(said) if said.is_done else None
        return [str(one) for one in told.get("namespaces", ())] if isinstance(told, dict) else []

    async def _have(self, name: str, replicas: Sequence[str], headers: Headers) -> list[str]:
        """Return the replicas that may still have an adapter."""
        listed = await self._asking.all(replicas, Call("GET", "/v1/list_lora_adapters", headers))
        return [one.replica for one in listed if one.replica in self._watch.ready and _may_have(one, name)]

    async def server_info(self, request: Request) -> Response:
        """The configuration that all engines share. 409 where they differ."""
        call = Call("GET", f"/server_info?{request.url.query}", self._passed(request))
        told = await self._asking.all_that_stay(self._asking.ready(), call)
        if refused := self._asking.refused(told):
            raise failed(refused, (), "the engines' configuration is unknown")
        told = [one for one in told if one.is_done]
        if not told:
            raise TemporaryError("no replica is ready any more")
        infos = [_info(one) for one in told]
        for other, info in zip(told[1:], infos[1:], strict=True):
            if (where := difference(infos[0].get(CONFIG), info.get(CONFIG))) is not None:
                raise HTTPException(
                    409,
                    f"replicas {told[0].replica} and {other.replica} differ in their configuration: {where}",
                )
        return JSONResponse(common(infos))

    def _passed(self, request: Request) -> dict[str, str]:
        """Return the headers that go on: the caller's credentials, which each replica checks.

        Raises:
            HTTPException: 403 if a page of another site asks; 508 if it came through a gateway.
        """
        if any(VIA.decode() in one for one in request.headers.getlist("via")):
            raise HTTPException(508, "the call came through a gateway already: a replica's address is one")
        check_site(self._sites, request.headers)
        given = {name: request.headers[name] for name in _PASSED if name in request.headers}
        return given | {"via": VIA.decode(), "x-forwarded-for": address_of(request.scope)}

    async def _object(self, request: Request) -> dict[str, Any]:
        """Read a call's body.

        Raises:
            ClientDisconnect: the client left.
            HTTPException: the body is too large.
            InputError: the body comes too slowly, or is no object with a ``lora_name``.
        """
        try:
            async with self._intake.read(request.scope, request.receive) as held:
                told = json.loads(held.body)
        except TooLarge as error:
            raise HTTPException(413, f"the body of this call is over {MOST_BYTES} bytes") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"the body is no JSON: {error}") from error
        if not isinstance(told, dict) or not isinstance(told.get("lora_name"), str):
            raise InputError('the body has no lora_name: send {"lora_name": …}')
        return told


def _unregistered(said: Said, body: Mapping[str, Any]) -> str:
    """Return the name that a replica unregistered, with its namespace where replicas serve several."""
    quoted = _QUOTED.search(said.body)
    return quoted[1].decode(errors="replace") if quoted is not None else str(body["lora_name"])


def _may_have(said: Said, name: str) -> bool:
    """Return whether a replica's list has an adapter. One that is no list may."""
    try:
        return not said.is_done or any(_is_of(name, lora) for lora in json.loads(said.body)["loras"])
    except WRONG:
        return True


def _is_of(name: str, listed: Mapping[str, Any]) -> bool:
    """Return whether an adapter in a replica's list is ``name``, or a revision of it."""
    namespace, _, own = name.rpartition("/")
    other = str(listed["lora_id"]).rpartition("/")[2]
    if "@" not in own:
        other = other.partition("@")[0]
    return other == own and namespace in ("", listed.get("namespace"))


def _info(said: Said) -> dict[str, Any]:
    info = read(said)
    if not isinstance(info, dict):
        raise HTTPException(502, f"the configuration of replica {said.replica}'s engine is no JSON object")
    return info
