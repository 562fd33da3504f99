"""Tell whether a request comes from this machine, by its connection's address.

No header proves where a request comes from. A header that a proxy writes disproves it: the connection is
then the proxy's, and may well be from loopback, as with a mesh's proxy in the same pod.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from starlette.datastructures import Headers

_PROXIES: Final = frozenset({"forwarded", "via", "x-real-ip"})
_PROXIES_BEGIN: Final = ("x-forwarded-", "x-envoy-")


def is_from_here(address: str, headers: Headers) -> bool:
    """Whether the peer's address is a loopback address, and no proxy passed the request on.

    Args:
        address: of the connection; what is no address, as a Unix socket's, is not from here.
    """
    return _is_loopback(address) and not any(
        name in _PROXIES or name.startswith(_PROXIES_BEGIN) for name in headers
    )


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
