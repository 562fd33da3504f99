"""Which of a message's headers are one connection's alone, and which go on (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lora_fs.sidecar.server.middleware.access import HEADER

BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer trailers "
    b"transfer-encoding upgrade".split()
)
_OF_THE_BODY = frozenset({b"content-type", b"content-encoding"})  # by them it was judged here
# "expect" was answered here, when the body was read.
_NOT_FORWARDED = BY_HOP | {b"host", b"content-length", b"expect", b"authorization", HEADER.encode()}


def onward(headers: Iterable[tuple[bytes, bytes]], *, coded: bool) -> Iterator[tuple[bytes, bytes]]:
    """A request's headers that are meant for the engine. No client takes off what its body was judged by.

    Args:
        coded: its answer may be compressed; if not, it is read here.
    """
    given = list(headers)
    hops = {
        hop.strip().lower() for name, value in given if name == b"connection" for hop in value.split(b",")
    }
    dropped = _NOT_FORWARDED | (hops - _OF_THE_BODY) | (set() if coded else {b"accept-encoding"})
    kept = [(name, value) for name, value in given if name not in dropped]
    if not any(name == b"accept-encoding" for name, _ in kept):
        yield b"accept-encoding", b"identity"
    yield from kept
