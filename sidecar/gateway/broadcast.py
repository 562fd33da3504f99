"""Calls that concern every replica: loads, unloads, pauses. All of them do it, or it is undone.

One replica registers the load, with the caller's own credentials, and each other one then loads that very
revision. A hint lets the others begin as soon as they see it, while the first one loads. So a registry that
some mount shows late costs that delay and no failed try.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.errors import InputError, TemporaryError
from lora_fs.sidecar.gateway.configuration import CONFIG, common, difference
from lora_fs.sidecar.gateway.forward import VIA, check_site
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.server.middleware.access import HEADER
from lora_fs.sidecar.server.middleware.answers import ADAPTER, LOAD
from lora_fs.sidecar.server.middleware.origin import Sites

MOST_BYTES: Final = 1 << 20  # of a call
MARGIN_S: Final = 10.0  # over what a replica itself waits
LEAVE_S: Final = 30.0  # in which an adapter leaves every replica
LOOK_S: Final = 0.02  # then twice as long each time
MOST_LOOK_S: Final = 0.5
_PASSED: Final = ("authorization", HEADER, "content-type", "traceparent")

Told = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Said:
    """A replica's answer; ``status`` 0: it gave none."""

    replica: str
    status: int
    body: bytes
    headers: Told

    @property
    def is_done(self) -> bool:
        """Whether the replica did the call."""
        return 200 <= self.status < 300

    @property
    def why(self) -> str:
        """Return what it says of a failure."""
        try:
            told = json.loads(self.body)
            error = told.get("error", told)
            why = str(error.get("message", error)) if isinstance(error, dict) else str(error)
        except (ValueError, AttributeError):
            why = self.body.decode(errors="replace")
        return f"replica {self.replica} answered {self.status}: {why[:500]}" if self.status else why[:500]


class Broadcast:
    """Ask every ready replica.

    Args:
        sites: whose pages may ask: a replica sees the gateway's address and Host, and cannot tell.
        hold_timeout_s: how long a replica waits for a load.

    Attributes:
        session: opened by the app.
    """

    def __init__(self, watch: Watch, sites: Sites, *, hold_timeout_s: float) -> None:
        self._watch, self._sites = watch, sites
        self._timeout = aiohttp.ClientTimeout(total=hold_timeout_s + MARGIN_S)
        self.session: aiohttp.ClientSession | None = None

    async def load(self, request: Request) -> Response:
        """Register an adapter, and answer when every replica has it loaded. Undone where one refuses."""
        body, headers = await _object(request), self._passed(request)
        async with self._hinted(body["lora_name"], headers):
            return await self._load(body, headers)

    @asynccontextmanager
    async def _hinted(self, name: str, headers: Told) -> AsyncIterator[None]:
        """Let the other replicas load what ``name`` serves next, beside the first one. No answer counts."""
        path, body = "/v1/lora_adapters/next", {"lora_name": name}
        hints = [
            asyncio.create_task(self._ask(one, "POST", path, body, headers), name=f"hint {one}")
            for one in self._ready()[1:]
        ]
        try:
            yield
        finally:
            for hint in hints:
                hint.cancel()
            await asyncio.gather(*hints, return_exceptions=True)

    async def _load(self, body: dict[str, Any], headers: Told) -> Response:
        first, others, said = await self._first("/v1/load_lora_adapter", body, headers)
        made = said.headers.get(LOAD.decode())
        if not said.is_done and made is None:
            return _as_it_is(said)  # it wrote nothing
        namespace, model, revision, name = said.headers[ADAPTER.decode()].split("/", 3)
        path = "/v1/lora_adapters/" + "/".join(quote(one, safe="") for one in (namespace, model, name))
        told = [said]
        if said.is_done:
            told += await self._all(others, "POST", f"{path}/load", {"revision": revision}, headers)
        if not (refused := self._refused(told)):
            return _as_it_is(said)
        undone = await self._undo([first, *others], path, made, headers)
        raise _failed(refused, [undone], "the load was undone everywhere")

    async def _undo(self, replicas: Sequence[str], path: str, made: str | None, headers: Told) -> Said:
        """Take back what a load wrote, by the first replica that takes the call: they share the registry."""
        said = Said("", 0, f"replica {replicas[0]} did not say what it wrote".encode(), {})
        if made is not None:
            body = json.loads(made)
            for one in replicas:
                said = await self._ask(one, "POST", f"{path}/undo", body, headers)
                if said.status:
                    break
        return said

    async def unload(self, request: Request) -> Response:
        """Unregister an adapter, and answer when no replica has it any more."""
        body, headers = await _object(request), self._passed(request)
        _, others, said = await self._first("/v1/unload_lora_adapter", body, headers)
        if not said.is_done:
            return _as_it_is(said)
        name, pause_s = body["lora_name"], LOOK_S
        try:
            async with asyncio.timeout(LEAVE_S):
                while True:
                    have = await self._have(name, others, headers)
                    if not have:
                        return _as_it_is(said)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MOST_LOOK_S)
        except TimeoutError as error:
            raise TemporaryError(
                f"{name} is unregistered; requests that began before still hold it at {', '.join(have)}"
            ) from error

    async def _have(self, name: str, replicas: Sequence[str], headers: Told) -> list[str]:
        """Return the replicas that still have an adapter; one that does not say counts as one."""
        listed = await self._all(replicas, "GET", "/v1/list_lora_adapters", None, headers)
        have = []
        for one in listed:
            if one.replica not in self._watch.ready:
                continue
            loras = json.loads(one.body)["loras"] if one.is_done else [{"lora_id": name}]
            if any(lora["lora_id"] == name for lora in loras):
                have.append(one.replica)
        return have

    async def pause(self, request: Request) -> Response:
        """Pause every replica, or none."""
        headers, query = self._passed(request), request.url.query
        told = await self._all(self._ready(), "POST", f"/pause?{query}", None, headers)
        if refused := self._refused(told):
            name = request.query_params.get("lora_name")
            again = "/resume" + ("?" + urlencode({"lora_name": name}) if name is not None else "")
            done = [one.replica for one in told if one.is_done]
            undone = await self._all(done, "POST", again, None, headers)
            raise _failed(refused, undone, "no replica is paused")
        return _together(told)

    async def resume(self, request: Request) -> Response:
        """Resume every replica. Asks each one, whatever another one answers."""
        told = await self._all(
            self._ready(), "POST", f"/resume?{request.url.query}", None, self._passed(request)
        )
        if refused := self._refused(told):
            raise _failed(refused, (), "the other replicas go on")
        return _together(told)

    async def server_info(self, request: Request) -> Response:
        """The configuration that all engines share. 409 where they differ."""
        path = f"/server_info?{request.url.query}"
        told = await self._all(self._ready(), "GET", path, None, self._passed(request))
        if refused := self._refused(told):
            raise _failed(refused, (), "the engines' configuration is unknown")
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
        client = request.client.host if request.client is not None else "unknown"
        given = {name: request.headers[name] for name in _PASSED if name in request.headers}
        return given | {"via": VIA.decode(), "x-forwarded-for": client}

    def _ready(self) -> list[str]:
        ready = sorted(self._watch.ready)
        if not ready:
            raise TemporaryError("no replica is ready")
        return ready

    def _refused(self, told: Sequence[Said]) -> list[Said]:
        """Return what failed, but for replicas that are gone: those load at a request once they are back."""
        return [one for one in told if not one.is_done and (one.status or one.replica in self._watch.ready)]

    async def _first(self, path: str, body: Any, headers: Told) -> tuple[str, list[str], Said]:
        """Ask one replica; another one only where the first took no connection."""
        ready = self._ready()
        for one in ready:
            said = await self._ask(one, "POST", path, body, headers)
            if said.status:
                return one, [other for other in ready if other != one], said
        raise TemporaryError(f"no replica took the call: {said.why}")

    async def _all(
        self, replicas: Sequence[str], method: str, path: str, body: Any, headers: Told
    ) -> list[Said]:
        return await asyncio.gather(*(self._ask(one, method, path, body, headers) for one in replicas))

    async def _ask(self, replica: str, method: str, path: str, body: Any, headers: Told) -> Said:
        assert self.session is not None, "the app's lifespan opens it"
        try:
            url = self._watch.url_of(replica) + path.removesuffix("?")
            async with self.session.request(
                method, url, json=body, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as answer:
                text = await answer.read()
                return Said(replica, answer.status, text, {k.lower(): v for k, v in answer.headers.items()})
        except aiohttp.ClientConnectorError as error:
            why = f"replica {replica} takes no connection: {error}"
            self._watch.not_reached(replica, why)
            return Said(replica, 0, why.encode(), {})
        except (aiohttp.ClientError, TimeoutError) as error:
            return Said(replica, 504, f"{type(error).__name__}: {error}".encode(), {})


async def _object(request: Request) -> dict[str, Any]:
    """Read a call's body. Raises InputError: it is no object with a ``lora_name``, or too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"the body of this call is over {MOST_BYTES} bytes")
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("lora_name"), str):
        raise InputError('the body has no lora_name: send {"lora_name": …}')
    return told


def _as_it_is(said: Said) -> Response:
    kept = {name: said.headers[name] for name in ("retry-after", "www-authenticate") if name in said.headers}
    return Response(said.body, said.status, kept, media_type=said.headers.get("content-type"))


def _together(told: Sequence[Said]) -> Response:
    return JSONResponse({"replicas": {one.replica: _read(one) for one in told}})


def _read(said: Said) -> Any:
    try:
        return json.loads(said.body)
    except ValueError:
        return said.body.decode(errors="replace")


def _info(said: Said) -> dict[str, Any]:
    info = _read(said)
    if not isinstance(info, dict):
        raise HTTPException(502, f"the configuration of replica {said.replica}'s engine is no JSON object")
    return info


def _failed(refused: Sequence[Said], undone: Sequence[Said], outcome: str) -> HTTPException:
    """Tell who refused and why, and whether what others did was undone."""
    left = [one.why for one in undone if not one.is_done]
    outcome = outcome if not left else f"undoing it failed, too: {'; '.join(left)}"
    status = refused[0].status or 503
    return HTTPException(status, f"{'; '.join(one.why for one in refused)}; {outcome}")
