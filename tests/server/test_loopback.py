"""Which requests come from this machine."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from lora_fs.sidecar.server.middleware.loopback import is_from_here

NONE = Headers({"host": "127.0.0.1", "user-agent": "x", "origin": "http://127.0.0.1"})


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1"])
def test_loopback(address: str) -> None:
    """Of both families, and of a socket that takes both."""
    assert is_from_here(address, NONE)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.7",
        "0.0.0.0",
        "169.254.1.1",
        "::",
        "fe80::1%eth0",
        "::ffff:10.0.0.7",
        "localhost",
        "",
        "unknown",
    ],
)
def test_elsewhere(address: str) -> None:
    """Other addresses, and what is no address: a name proves nothing."""
    assert not is_from_here(address, NONE)


@pytest.mark.parametrize(
    "name", ["Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Envoy-Attempt-Count"]
)
def test_through_a_proxy(name: str) -> None:
    """The proxy is on this machine; its caller may be anywhere."""
    assert not is_from_here("127.0.0.1", Headers({name: ""}))
