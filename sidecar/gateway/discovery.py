"""Where the replicas are: a list of URLs, the addresses of a DNS name, or the registry's status files.

If a source cannot be read, the replicas that it had stay, and those of other sources come and go.
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

DNS: Final = "dns://"
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
        self._urls, self._names = list[str](), dict[str, _Name]()
        for one in replicas:
            if one.lower().startswith(DNS):
                self._names[one] = _Name(one)
            else:
                self._urls.append(checked(one))

    async def find(self) -> Mapping[str, str | None]:
        """As ``Discovery.find``. A name that does not resolve keeps its addresses, and is refused.

        Raises:
            TemporaryError: no name resolves, and there is no URL.
        """
        found: dict[str, str | None] = dict.fromkeys(self._urls)
        whys = await asyncio.gather(*(name.look() for name in self._names.values()))
        if whys and all(whys) and not found:
            raise TemporaryError("; ".join(filter(None, whys)))
        for (one, name), why in zip(self._names.items(), whys, strict=True):
            for url in name.urls:
                _add(found, url)
            if why is not None:
                found[one] = why
        return found


class _Name:
    """A name in DNS.

    Attributes:
        urls: of each address, as of the last look that had an answer.
    Raises:
        InputError: ``given`` is no dns://NAME:PORT.
    """

    def __init__(self, given: str) -> None:
        try:
            parts = urlsplit(checked("http://" + given[len(DNS) :]))
            if parts.hostname is None or parts.port is None:
                raise InputError("it has no port")
        except InputError as error:
            raise InputError(f"write {given[:200]!r} as dns://NAME:PORT") from error
        self._host, self._port = parts.hostname, parts.port
        self._threads = Daemons(1, "lora-fs-gateway-names")
        self.urls: list[str] = []

    async def look(self) -> str | None:
        """Ask for the addresses. Return why they are unknown for now, or None."""
        try:
            async with asyncio.timeout(READ_S):
                await self._threads.run(self._look)
        except (OSError, UnicodeError) as error:
            why = str(error) or f"no answer in {READ_S:g} s"
            return f"the name {self._host} of the replicas is not resolved: {why}"
        return None

    def _look(self) -> None:
        """Find the addresses. What a look finds stays known, also if nobody waits for it any more."""
        kind, only = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
        found = socket.getaddrinfo(self._host, self._port, type=kind, flags=only)
        hosts = (f"[{at[0]}]" if of is socket.AF_INET6 else str(at[0]) for of, *_, at in found)
        self.urls = [f"http://{host}:{self._port}" for host in hosts]


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
        except TimeoutError as error:
            why = f"the registry's status files are not read: no answer in {READ_S:g} s"
            raise VolumeUnavailable(why) from error
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
