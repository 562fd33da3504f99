"""Where the replicas are: a list of URLs, the addresses of a DNS name, or the registry's status files.

If a source cannot be read, the known replicas stay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Final, Protocol
from urllib.parse import urlsplit

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InputError, TemporaryError, VolumeUnavailable
from lora_fs.sidecar.gateway.address import checked
from lora_fs.sidecar.reconcile.watch.reports import Reports
from lora_fs.sidecar.registry.format.layout import Layout

DNS: Final = "dns"
MAX_REPLICAS: Final = 1000
BEYOND: Final = f"beyond {MAX_REPLICAS}"  # stands in a URL's place
READ_S: Final = 10.0
MOST_SHOWN: Final = 200  # characters of an address that is refused


class Discovery(Protocol):
    """Says where replicas are."""

    async def find(self) -> Mapping[str, str | None]:
        """Return each replica's URL, and None, or why it is refused.

        Raises:
            TemporaryError: the answer is unknown for now.
        """


class Given:
    """URLs, and ``dns://NAME:PORT`` for each address that a name has now.

    Raises:
        InputError: one is neither.
    """

    def __init__(self, replicas: Iterable[str]) -> None:
        self._urls, self._names = list[str](), list[tuple[str, int]]()
        for one in replicas:
            parts = urlsplit(one)
            if parts.scheme == DNS:
                if not parts.hostname or parts.port is None or parts.path not in ("", "/"):
                    raise InputError(f"write {one[:200]!r} as dns://NAME:PORT")
                self._names.append((parts.hostname, parts.port))
            else:
                self._urls.append(checked(one))

    async def find(self) -> Mapping[str, str | None]:
        """As ``Discovery.find``. Raises TemporaryError: a name does not resolve."""
        found: dict[str, str | None] = dict.fromkeys(self._urls)
        loop = asyncio.get_running_loop()
        for name, port in self._names:
            try:
                addresses = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                raise TemporaryError(f"the name {name} of the replicas is not resolved: {error}") from error
            for family, *_, address in addresses:
                host = f"[{address[0]}]" if family is socket.AF_INET6 else address[0]
                _add(found, f"http://{host}:{port}")
        return found


class Registered:
    """The status files of ``model``'s replicas in the registry, which each replica writes about itself."""

    def __init__(self, layout: Layout, model: str) -> None:
        self._model = model
        self._reports = Reports(layout)
        self._urls: dict[str, str] = {}
        self._threads = Daemons(1, "lora-fs-gateway-registry")

    async def find(self) -> Mapping[str, str | None]:
        """As ``Discovery.find``. Raises VolumeUnavailable: the registry does not answer."""
        try:
            async with asyncio.timeout(READ_S):
                urls = await self._threads.run(self._look)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer in {READ_S:g} s"
            raise VolumeUnavailable(f"the registry's status files are not read: {why}") from error
        found: dict[str, str | None] = {}
        for url in urls:
            _add(found, url)
        return found

    def _look(self) -> list[str]:
        """Return the URLs. What a look finds stays known, also if nobody waits for it any more."""
        look = self._reports.look("")
        for replica, status in look.changed.items():
            self._urls.pop(replica, None)
            if status.model == self._model and status.url is not None:
                self._urls[replica] = status.url
        for replica in look.gone:
            self._urls.pop(replica, None)
        return [self._urls[replica] for replica in sorted(self._urls)]


def _add(found: dict[str, str | None], url: str) -> None:
    """Add a URL that another party named. A refused one is reported, and disturbs no other."""
    if len(found) >= MAX_REPLICAS:
        if url not in found:
            found[BEYOND] = f"a gateway asks at most {MAX_REPLICAS} replicas: the others get no requests"
        return
    try:
        found.setdefault(checked(url), None)
    except InputError as error:
        shown = url[:MOST_SHOWN].encode(errors="backslashreplace").decode()
        found[shown] = str(error)
