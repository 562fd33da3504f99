"""Which addresses a replica may have: no status file leads a request to a cloud's metadata service.

The connection goes to the address that the check resolved: no later DNS answer counts.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.allowed import METADATA, as_resolved

THREADS: Final = 1000  # one for each replica's name
_NUMBERS: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


def is_refused(host: str) -> bool:
    """Return whether ``host`` is an IP address that no replica has: link-local, multicast, 0.0.0.0."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in METADATA


def checked(url: str) -> str:
    """Return a replica's URL without the slash at its end.

    Raises:
        InputError: it is no http:// or https:// address of a host alone, or one that no replica may have.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"the replica's address {url[:200]!r} is no URL: {error}") from error
    is_plain = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or port == 0:
        raise InputError(f"write the replica's address {url[:200]!r} as http://HOST:PORT")
    try:
        host = as_resolved(parts.hostname)
    except ValueError as error:  # it has a NUL, or is no text that UTF-8 has
        raise InputError(f"the replica's address {url[:200]!r} has no host's name: {error}") from error
    if is_refused(host):
        raise InputError(f"{url[:200]} is no replica's address: it is link-local, or a metadata service's")
    return url.rstrip("/")


class Resolver(AbstractResolver):
    """The system's resolver, without addresses that no replica has.

    It asks for each name in a thread of its own: a name without an answer delays no other one.
    """

    def __init__(self) -> None:
        self._threads = Daemons(THREADS, "lora-fs-gateway-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve ``host``. Raises OSError: it has no address that a replica may have."""
        kind, only = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
        found = await self._threads.run(lambda: socket.getaddrinfo(host, port, family, kind, flags=only))
        kept = [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=of, proto=proto, flags=_NUMBERS
            )
            for of, _, proto, _, address in found
            if not is_refused(str(address[0]))
        ]
        if not kept:
            raise OSError(None, f"{host} leads to a link-local address or a metadata service, and is refused")
        return kept

    async def close(self) -> None:
        """Close nothing: a thread ends when it has no name to ask for."""
