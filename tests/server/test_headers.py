"""Which headers of a request reach the engine."""

from __future__ import annotations

import pytest

from lora_fs.sidecar.server.middleware.access import HEADER
from lora_fs.sidecar.server.proxy.headers import onward

IDENTITY = (b"accept-encoding", b"identity")
GZIP = (b"accept-encoding", b"gzip")
OTHER = (b"x-request-id", b"7")


@pytest.mark.parametrize(
    ("given", "coded", "sent"),
    [
        ([GZIP, OTHER], True, [GZIP, OTHER]),
        ([GZIP, OTHER], False, [IDENTITY, OTHER]),
        ([OTHER], True, [IDENTITY, OTHER]),
        ([OTHER], False, [IDENTITY, OTHER]),
        ([], True, [IDENTITY]),
        ([GZIP], True, [GZIP]),
    ],
)
def test_what_is_read_here_is_not_compressed(
    given: list[tuple[bytes, bytes]], coded: bool, sent: list[tuple[bytes, bytes]]
) -> None:
    """The engine compresses an answer only if the client asks for it and nobody reads it on the way."""
    assert list(onward(given, coded=coded)) == sent


@pytest.mark.parametrize(
    "name", [b"host", b"content-length", b"expect", b"te", b"keep-alive", HEADER.encode()]
)
def test_what_is_for_the_next_hop_alone_stays_here(name: bytes) -> None:
    """The connection's own headers, and lora-fs's own token, are not the engine's business."""
    assert list(onward([(name, b"x"), GZIP], coded=True)) == [GZIP]


@pytest.mark.parametrize("name", [b"content-type", b"content-encoding"])
def test_what_a_body_was_judged_by_goes_on(name: bytes) -> None:
    """Whatever the client calls its connection's own: without it the engine might read another model."""
    given = [(b"connection", name + b", x-one"), (name, b"x"), (b"x-one", b"1"), GZIP]
    assert list(onward(given, coded=True)) == [(name, b"x"), GZIP]


def test_what_a_connection_header_names_stays_here() -> None:
    """Each of its words, in any case and spacing, and in every such header."""
    hops = [(b"connection", b"X-One, x-two"), (b"connection", b"x-three")]
    named = [(b"x-one", b"1"), (b"x-two", b"2"), (b"x-three", b"3")]
    assert list(onward([*hops, *named, GZIP, OTHER], coded=True)) == [GZIP, OTHER]
