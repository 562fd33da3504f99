"""Refuse what a web page of another site asks for, by what its browser says.

A browser sends what any page asks it to, from inside the network that it is in. ``Origin`` and
``Sec-Fetch-Site`` tell which page asked. They say nothing of a page whose own name was made to resolve
to this replica (DNS rebinding): that name is in ``Host``. No page can set one of the three.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers

EVERY: Final = "*"
_OWN: Final = (".localhost", ".local", ".internal", ".svc")  # no registrar sells a name under these
_PORT: Final = re.compile(r":\d*$")
_DEFAULT_PORT: Final = re.compile(r":(80|443)?$")


class Sites:
    """``hosts``: names by which clients reach this replica, and whose pages may change it; ``*``: all."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)

    def check(self, headers: Headers, *, needs_token: bool) -> None:
        """Refuse a request that another site makes.

        Args:
            needs_token: the call needs a token, which no page of another name has: ``Host`` may be any.
        Raises:
            HTTPException: 403, with what to set.
        """
        if EVERY in self._hosts:
            return
        origin, host = headers.get("origin"), headers.get("host")
        if self._is_foreign(origin, headers.get("sec-fetch-site"), host or ""):
            raise HTTPException(
                403,
                f"a web page of {(origin or 'another site')[:80]!a} may not change adapters: name its host "
                "in LORA_FS_ALLOWED_HOSTS if it is yours",
            )
        if not needs_token and host is not None and not self._is_known(_name_of(host)):
            raise HTTPException(
                403,
                f"the Host {host[:80]!a} is none by which this replica is known: name it in "
                "LORA_FS_ALLOWED_HOSTS, or ask for tokens (LORA_FS_TOKEN_FILE)",
            )

    def _is_foreign(self, origin: str | None, site: str | None, host: str) -> bool:
        page = None if origin is None else _authority_of(origin)
        if page and _name_of(page) in self._hosts:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        return page is not None and (not page or _authority(page) != _authority(host))

    def _is_known(self, name: str) -> bool:
        """Whether it is an address, a name inside a network, or one that is set: no stranger has those."""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return "." not in name or name.endswith(_OWN) or name in self._hosts
        return True


def _authority_of(origin: str) -> str:
    """The host and port of an ``Origin``; empty of ``null`` and of what is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _authority(text: str) -> str:
    return _DEFAULT_PORT.sub("", text.lower())


def _name_of(authority: str) -> str:
    return _PORT.sub("", authority.lower()).strip("[]").rstrip(".")
