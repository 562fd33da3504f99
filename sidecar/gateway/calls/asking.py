"""Ask replicas, one or all of them, and make one answer of theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.errors import TemporaryError
from lora_fs.sidecar.gateway.watch import MOST_BYTES, NO_FILES, NO_MORE, Watch
from lora_fs.sidecar.server.proxy.upstream import whole

MARGIN_S: Final = 10.0  # over what a replica itself waits
LOOK_S: Final = 0.2  # between two looks at which replicas are in

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Said:
    """A replica's answer.

    Attributes:
        status: 0: the replica took no connection. 504, and not ``has_answered``: it may have the call.
    """

    replica: str
    status: int
    body: bytes
    headers: Headers
    has_answered: bool = True

    @property
    def is_done(self) -> bool:
        """Whether the replica did the call."""
        return 200 <= self.status < 300

    @property
    def why(self) -> str:
        """Return what it says of a failure."""
        told = read(self)
        error = told.get("error", told) if isinstance(told, dict) else told
        why = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        return f"replica {self.replica} answered {self.status}: {why}" if self.has_answered else why


@dataclass(frozen=True, slots=True)
class Call:
    """What to ask a replica.

    Attributes:
        path: with the query. body: sent as JSON; None: no body.
        timeout_s: None: as long as a load may take.
    """

    method: str
    path: str
    headers: Headers
    body: Any = None
    timeout_s: float | None = None


class Asking:
    """Ask the replicas of a watch.

    Args:
        hold_timeout_s: how long a replica waits for a load.

    Attributes:
        session: opened by the app.
    """

    def __init__(self, watch: Watch, *, hold_timeout_s: float) -> None:
        self.watch = watch
        self._timeout_s = hold_timeout_s + MARGIN_S
        self.session: aiohttp.ClientSession | None = None

    def ready(self) -> list[str]:
        """List the ready replicas, by id. Raises TemporaryError: there is none."""
        ready = sorted(self.watch.ready)
        if not ready:
            raise TemporaryError("no replica is ready")
        return ready

    def refused(self, told: Sequence[Said]) -> list[Said]:
        """Return what failed, but for replicas that are gone: those load at a request once they are back."""
        return [one for one in told if not one.is_done and (one.status or one.replica in self.watch.ready)]

    async def first(self, call: Call) -> tuple[str, list[str], Said]:
        """Ask one replica; another one only where the first took no connection.

        Raises:
            TemporaryError: no replica is ready, or none took a connection.
            HTTPException: 504 if the replica did not answer: it may have done the call.
        """
        ready = self.ready()
        for one in ready:
            said = await self.one(one, call)
            if said.status == 504 and not said.has_answered:
                raise HTTPException(504, f"{said.why}; it may have done the call: look before you repeat it")
            if said.status:
                return one, [other for other in ready if other != one], said
        raise TemporaryError(f"no replica took the call: {said.why}")

    async def all(self, replicas: Sequence[str], call: Call) -> list[Said]:
        """Ask replicas at the same time."""
        return await asyncio.gather(*(self.one(one, call) for one in replicas))

    async def all_that_stay(self, replicas: Sequence[str], call: Call) -> list[Said]:
        """Ask replicas at the same time, each for as long as it is in. One that goes is in no answer."""
        asked = {one: asyncio.create_task(self.one(one, call), name=f"call {one}") for one in replicas}
        try:
            while under_way := {task for task in asked.values() if not task.done()}:
                await asyncio.wait(under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for one in asked.keys() - self.watch.ready:
                    asked[one].cancel()
        finally:
            for task in asked.values():
                task.cancel()
        return [task.result() for task in asked.values() if not task.cancelled()]

    async def one(self, replica: str, call: Call) -> Said:
        """Ask a replica that was in once."""
        said = await self.at(self.watch.url_of(replica), replica, call)
        if not said.status:
            self.watch.not_reached(replica, said.why)
        return said

    async def at(self, url: str, replica: str, call: Call) -> Said:
        """Ask the replica at a URL, whether it is in or not."""
        assert self.session is not None, "the app's lifespan opens it"
        seconds = self._timeout_s if call.timeout_s is None else call.timeout_s
        try:
            async with self.session.request(
                call.method,
                url + call.path.removesuffix("?"),
                json=call.body,
                headers=call.headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as answer:
                text = await whole(answer, MOST_BYTES)
                return Said(replica, answer.status, text, {k.lower(): v for k, v in answer.headers.items()})
        except aiohttp.ClientConnectorError as error:
            if error.errno in NO_FILES:
                return Said(replica, 503, NO_MORE.encode(), {"retry-after": "1"}, has_answered=False)
            why = f"replica {replica} takes no connection: {error}"
            return Said(replica, 0, why.encode(), {}, has_answered=False)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            what = str(error) or type(error).__name__
            why = f"replica {replica} did not answer: {what}"
            return Said(replica, 504, why.encode(), {}, has_answered=False)


def as_it_is(said: Said) -> Response:
    """Pass one replica's answer on."""
    kept = {name: said.headers[name] for name in ("retry-after", "www-authenticate") if name in said.headers}
    return Response(said.body, said.status, kept, media_type=said.headers.get("content-type"))


def together(told: Sequence[Said], **more: Any) -> Response:
    """Answer with what each replica said, and with ``more``."""
    return JSONResponse({"replicas": {one.replica: read(one) for one in told}, **more})


def read(said: Said) -> Any:
    """Return the JSON of an answer, or its text if the gateway cannot send it on as JSON, such as NaN."""
    try:
        told = json.loads(said.body)
        JSONResponse(told)
    except (ValueError, RecursionError):
        return said.body.decode(errors="replace")
    return told


def failed(refused: Sequence[Said], undone: Sequence[Said], outcome: str) -> HTTPException:
    """Return the error that says who refused and why, and whether what others did was undone."""
    left = [one.why for one in undone if not one.is_done]
    outcome = outcome if not left else f"undoing it failed, too: {'; '.join(left)}"
    status = refused[0].status or 503
    if status < 400:  # a server before the replica sends the call elsewhere
        status = 502
    return HTTPException(status, f"{'; '.join(one.why for one in refused)}; {outcome}")
