"""The proxy's connections to the engine: bounded in number and in time, and what an error on one says."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver

from lora_fs.sidecar.server.proxy.model_rewrite import Parts
from lora_fs.sidecar.settings import ENGINE_CONNECTIONS, ENGINE_IDLE_TIMEOUT_S

CONNECT_S = 5.0
PIECE_BYTES = 1 << 18
# What aiohttp would add where there is none.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
SAFE = frozenset({"GET", "HEAD"})
_ERROR_BYTES = 65_536
# After 10 s without a byte the kernel asks the host: what waits for one that is gone ends within 25 s. Bytes
# that a host never acknowledged wait for TCP's own limit, about 15 minutes.
_PROBES = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@dataclass(frozen=True, slots=True)
class Upstream:
    """Bounds on connections to the engine.

    Attributes:
        connections: at once, 0: any number; a request that finds none free waits CONNECT_S.
        idle_timeout_s: in which the engine sends no byte of an answer.
    """

    connections: int = ENGINE_CONNECTIONS
    idle_timeout_s: float = ENGINE_IDLE_TIMEOUT_S

    @property
    def full(self) -> str:
        """The error for a client that got no connection."""
        return (
            f"the engine took no connection in {CONNECT_S:g} s, or all {self.connections} are in use "
            "(LORA_FS_ENGINE_CONNECTIONS)"
        )

    @property
    def silent(self) -> str:
        """The error for a client whose answer did not begin."""
        return f"the engine sent nothing for {self.idle_timeout_s:g} s (LORA_FS_ENGINE_IDLE_TIMEOUT_S)"


@asynccontextmanager
async def connected(
    upstream: Upstream, resolver: AbstractResolver | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Keep connections to the engine, or to replicas, inside the block.

    Args:
        resolver: of host names; None: the system's.
    """
    # vLLM closes idle connections after 5 s: never reuse one that it may be closing.
    connector = aiohttp.TCPConnector(
        limit=upstream.connections, keepalive_timeout=4, resolver=resolver, socket_factory=_probing
    )
    timeout = aiohttp.ClientTimeout(
        total=None, connect=CONNECT_S, sock_connect=CONNECT_S, sock_read=upstream.idle_timeout_s
    )
    jar = aiohttp.DummyCookieJar()  # what the engine gives to one client is no other's
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        cookie_jar=jar,
        auto_decompress=False,
        skip_auto_headers=_NOT_ADDED,
        raise_for_status=_check_status,
        middlewares=(_once,),
    ) as session:
        yield session


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send a change once. aiohttp repeats a DELETE or a PUT that broke off, which may have run."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if request.method in SAFE:
            raise
        raise aiohttp.ClientConnectionError(str(error)) from error


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    """Refuse what cannot go on: 101, as nobody offered an upgrade, and a status that HTTP does not have."""
    if not 200 <= answer.status < 600:
        answer.close()
        raise aiohttp.ClientPayloadError(f"the answer's status is {answer.status}")


def _probing(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices a host that is gone: nothing else ends a request that waits for it."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if (option := getattr(socket, name, None)) is not None:  # macOS lacks one
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def pieces(body: Parts) -> AsyncIterator[memoryview]:
    """A body in pieces of the engine's size: as one piece it would be copied twice."""
    for part in body:
        view = memoryview(part)
        for at in range(0, len(view), PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]


async def whole(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return an answer's body. Raises ValueError: it is over ``most_bytes``."""
    body = bytearray()
    while piece := await answer.content.readany():
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"over {most_bytes} bytes")
    return bytes(body)


async def said_by(answer: aiohttp.ClientResponse) -> bytes:
    """The beginning of an error's body, which is all of it, if it is vLLM's."""
    said = b""
    with suppress(aiohttp.ClientError, TimeoutError):  # reported when the answer is passed on
        while len(said) < _ERROR_BYTES and (more := await answer.content.readany()):
            said += more
    return said


def lost_the_adapter(said: bytes, engine_name: str) -> bool:
    """Return whether a 404's body is the engine's word that it does not have the adapter.

    The error says in some sentence that it found nothing, and names the adapter or the field
    ``model``. This server resolved the client's own name before, so the client's name is not wrong.
    """
    if not said:
        return False
    try:
        error = json.loads(said)["error"]
        kind, message = str(error["type"]).lower().replace("_", ""), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return False
    name = rf"(?<![\w.@/-]){re.escape(engine_name)}(?![\w@/-])"
    return "notfound" in kind and (error.get("param") == "model" or re.search(name, message) is not None)
