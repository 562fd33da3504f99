"""Which folders and remote places a registration may name: the registry's own, and the allowed ones."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.uri import Uri, parse, scheme_of

EVERY = "*"
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # NAT64: an IPv4 address is its last 32 bits
_UNICAST = ipaddress.IPv6Network("2000::/3")  # global unicast: no site-local, no local NAT64
# Where clouds answer with a machine's credentials, besides link-local addresses.
METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"))
)


class Allowed:
    """Places an adapter may lie in, each with all that is under it. Callers resolve links before."""

    def __init__(self, root: Path, sources: Iterable[str | Path] = ()) -> None:
        self.places = tuple(Path(place).resolve() for place in (root, *sources))

    def covers(self, path: Path) -> bool:
        """Whether ``path`` is under an allowed place, wherever links on its way lead."""
        return self.find(path) is not None

    def find(
        self, path: Path, *, follow: bool = True, namespaces: Collection[str] | None = None
    ) -> Path | None:
        """Resolve ``path``, if it leads under an allowed place. No link is on the way to the result.

        Args:
            follow: whether its own name may be a link, too.
            namespaces: those whose folders are the only allowed ones of the root; None: the whole root.
        """
        try:
            whole = follow or path.name in ("", "..")
            real = path.resolve() if whole else path.parent.resolve() / path.name
        except (OSError, RuntimeError, ValueError):  # a link to itself; a NUL
            return None
        root = self.places[0]
        if namespaces is not None and real.is_relative_to(root):
            return None if {*real.relative_to(root).parts[:1]}.isdisjoint(namespaces) else real
        return real if any(real.is_relative_to(place) for place in self.places) else None


class AllowedRemotes:
    """URIs up to a segment: ``hf://``, ``hf://org``, ``s3://bucket/loras``, ``https://host:8443/a``, ``*``.

    Compared by scheme, host and whole segments: ``https://host`` does not cover ``https://host.org``.
    An entry without a host (``*``, ``https://``) covers public addresses alone: see ``check_address``.

    Raises:
        InputError: an entry is no such prefix.
    """

    def __init__(self, prefixes: Iterable[str] = ()) -> None:
        self._every = False
        self._schemes: set[str] = set()
        self._prefixes: list[Uri] = []
        for prefix in prefixes:
            scheme = scheme_of(prefix)
            if prefix == EVERY:
                self._every = True
            elif scheme and prefix.endswith("://"):
                self._schemes.add(scheme)
            else:
                self._prefixes.append(parse(prefix.rstrip("/")))

    def check(self, uri: Uri) -> None:
        """Raise InputError, saying what to set, unless ``uri`` is under an allowed place."""
        if self._every or uri.scheme in self._schemes or any(_covers(one, uri) for one in self._prefixes):
            return
        raise InputError(
            f"{uri} is not allowed here: name it, or what it begins with, in LORA_FS_ALLOWED_REMOTES"
        )

    def check_address(self, uri: Uri, address: str) -> None:
        """Refuse to connect to an address that is not public, unless an entry names the host of ``uri``.

        Args:
            address: the IP address that the host of ``uri`` resolved to, or the host's name where a
                proxy resolves it.
        Raises:
            InputError: it is loopback, link-local or private. The message leaves the address out: who
                sends the request must not learn the names of this network.
        """
        if is_public(address) or any(
            (one.scheme, one.place) == (uri.scheme, uri.place) for one in self._prefixes
        ):
            return
        raise InputError(
            f"{uri} leads to an address that is not public: name {uri.scheme}://{uri.place} in "
            "LORA_FS_ALLOWED_REMOTES if it is meant"
        )


def is_public(host: str) -> bool:
    """Whether an IP address is one of the internet; a name is, unless it is this machine's own."""
    try:
        address = ipaddress.ip_address(as_resolved(host).strip("[]"))
    except ValueError:
        return not f".{host.lower().rstrip('.')}".endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address):
        inner = [one for one in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())) if one]
        if address in _TRANSLATED:
            inner = [ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)]
        if inner:
            return all(is_public(str(one)) for one in inner)
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast and address not in METADATA


def as_resolved(host: str) -> str:
    """Return an IPv4 address in its usual form; resolvers also read 0xa9fea9fe and 2852039166."""
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return host


def _covers(prefix: Uri, uri: Uri) -> bool:
    if (prefix.scheme, prefix.place) != (uri.scheme, uri.place) or len(prefix.path) > len(uri.path):
        return False
    return all(
        asked == given or _without_revision(uri.scheme, asked) == given
        for given, asked in zip(prefix.path, uri.path, strict=False)
    )


def _without_revision(scheme: str, segment: str) -> str | None:
    """A segment of a path without the revision, the tag or the digest behind it; None if it can have none."""
    marks = {"hf": "@", "oci": ":@"}.get(scheme)
    return re.split(f"[{marks}]", segment, maxsplit=1)[0] if marks else None
