"""The allowed texts of a setting. Each check returns the setting's value.

Nothing here imports pydantic or click.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit


def engine_address(value: str) -> str:
    """Return vLLM's address without the slash at its end.

    Raises:
        ValueError: it is no http:// or https:// address, or one with /v1.
    """
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") == "/v1":
        raise ValueError("write vLLM's address as http://HOST:PORT, without /v1")
    _check_port(parts)
    return value.rstrip("/")


def server_address(value: str | None) -> str | None:
    """Return a sidecar's address without the slash at its end.

    Raises:
        ValueError: it is no http:// or https:// address, or one with credentials or /v1.
    """
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("write the sidecar's address as http://HOST:PORT or https://HOST")
    if parts.username is not None or parts.password is not None:
        raise ValueError("leave out what stands before the @: the token goes into a file (--token-file)")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("write the sidecar's address without /v1")
    _check_port(parts)
    return value.rstrip("/")


def _check_port(parts: SplitResult) -> None:
    """Raise ValueError if the port is no number from 1 to 65535: some clients ask 99999 at 34463."""
    try:
        fits = parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("the port must be a number from 1 to 65535")


def mounted(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mount point of each claim. Raises ValueError: one is not CLAIM=PATH."""
    for item in items:
        if not re.fullmatch(r"[^=/]+=/.*", item):
            raise ValueError(f"{item!r} is not CLAIM=PATH with a path that begins with /")
    return items


def weighed(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return namespaces' weights. Raises ValueError: one is not NAMESPACE=WEIGHT."""
    for item in items:
        if not re.fullmatch(r"[^=]+=[1-9][0-9]{0,5}", item):
            raise ValueError(f"{item!r} is not NAMESPACE=WEIGHT with a whole number above 0")
    return items
