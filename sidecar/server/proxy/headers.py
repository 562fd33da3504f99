"""Which headers go on, in both directions, and what a proxy adds (RFC 9110, 7.6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from starlette.types import Scope

from lora_fs.sidecar.server.middleware.access import HEADER, address_of

Raw = tuple[bytes, bytes]

VIA = b"1.1 lora-fs"
BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade".split()
)
_OF_THE_BODY = frozenset({b"content-type", b"content-encoding"})  # this server judged the body by them
# This server answered "expect" when it read the body.
_NOT_FORWARDED = BY_HOP | {b"host", b"content-length", b"expect", b"authorization", HEADER.encode()}
_OURS = frozenset({b"date", b"server"})  # uvicorn writes them on every answer
_BODILESS = frozenset({204, 304})
_CORS = b"access-control-"  # who may read an answer is this server's to say, not the engine's


def onward(headers: Iterable[Raw], *, coded: bool, kept: frozenset[bytes] = frozenset()) -> Iterator[Raw]:
    """Yield a request's headers for the engine. No client removes those that its body was judged by.

    Args:
        coded: its answer may be compressed; if not, this server reads it.
        kept: credentials to pass on, since the next hop checks them.
    """
    given = list(headers)
    dropped = (_NOT_FORWARDED - kept) | (_named(given) - _OF_THE_BODY)
    if not coded:
        dropped |= {b"accept-encoding"}
    passed = [(name, value) for name, value in given if name not in dropped]
    if not any(name == b"accept-encoding" for name, _ in passed):
        yield b"accept-encoding", b"identity"
    yield from passed


def appended(headers: Iterable[Raw], scope: Scope, via: bytes = VIA) -> list[Raw]:
    """Add this hop to ``Via`` and ``X-Forwarded-*``; what stands there stays, in front."""
    host = next((value for name, value in scope["headers"] if name == b"host"), None)
    hop = {b"via": via, b"x-forwarded-for": address_of(scope).encode("latin-1", "replace")}
    first = {b"x-forwarded-proto": str(scope.get("scheme", "http")).encode()}
    if host is not None:
        first[b"x-forwarded-host"] = host
    before: dict[bytes, list[bytes]] = {}
    kept = []
    for name, value in headers:
        if name in hop:
            before.setdefault(name, []).append(value)
        else:
            first.pop(name, None)
            kept.append((name, value))
    added = [(name, b", ".join([*before.get(name, []), value])) for name, value in hop.items()]
    return [*kept, *added, *first.items()]


def backward(headers: Iterable[Raw], status: int) -> list[Raw]:
    """Return an answer's headers for the client. A 204 and a 304 have no length: uvicorn misses a body."""
    given = list(headers)
    dropped = BY_HOP | _OURS | (_named(given) - _OF_THE_BODY)
    if status in _BODILESS:
        dropped |= {b"content-length"}
    lowered = ((name.lower(), name, value) for name, value in given)
    return [(name, value) for low, name, value in lowered if low not in dropped and not low.startswith(_CORS)]


def written(headers: Iterable[Raw]) -> list[tuple[str, str]]:
    """Return headers as the HTTP client takes them, which writes them in UTF-8."""
    return [(name.decode("latin-1"), text_of(value)) for name, value in headers]


def text_of(value: bytes) -> str:
    """Decode a header's value: UTF-8, or else ISO 8859-1, which was HTTP's.

    A value in UTF-8 goes on unchanged. Another one goes on as the same text in UTF-8.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _named(headers: Iterable[Raw]) -> frozenset[bytes]:
    """Return what ``Connection`` says is this hop's alone."""
    lists = (value for name, value in headers if name.lower() == b"connection")
    return frozenset(word.strip().lower() for value in lists for word in value.split(b","))
