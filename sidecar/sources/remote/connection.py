"""Connections of the standard library that wait for answers in steps, and ask at each whether to go on.

A socket's own timeout begins anew with every byte: a server that sends one now and then is never done.
It checks each address that a host resolves to before it connects, so no later DNS answer counts.
"""

from __future__ import annotations

import functools
import http.client
import io
import ipaddress
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from lora_fs.sidecar.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STEP_S = 0.25

Alive = Callable[[], None]
CheckAddress = Callable[[str], None]
Got = TypeVar("Got")


def opener(alive: Alive, check_address: CheckAddress = lambda _: None) -> urllib.request.OpenerDirector:
    """Open ``http`` and ``https``, by the environment's proxies; follow no redirect.

    Args:
        alive: called before each wait, for a connection, headers and body; what it raises ends the answer.
        check_address: raises InputError for a forbidden address. A proxy resolves
            names itself: with one it gets the host as the URL has it.
    """
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _Plain(alive, check_address),
        _Secure(alive, check_address),
    ):
        made.add_handler(handler)
    return made


def waited(call: Callable[[], Got], alive: Alive) -> Got:
    """Return the result of another client's ``call``, and wait for it in steps; raises what it raises.

    Args:
        alive: asked before each; where it ends the wait, the call is left to its own time.
    """
    done = futures.Future[Got]()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    alive()
    threading.Thread(target=run, name="source-ask", daemon=True).start()
    while not futures.wait([done], STEP_S).done:
        alive()
    return done.result()


def is_loopback(place: str) -> bool:
    """Whether a host, with its port or without, is this machine by its name or address."""
    host = place.rpartition(":")[0] if re.search(r":\d+$", place) else place
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, alive: Alive, check_address: CheckAddress) -> None:
        super().__init__()
        self._alive, self._check_address = alive, check_address

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connect = _connecting(http.client.HTTPConnection, req, self._alive, self._check_address)
        return self.do_open(connect, req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, alive: Alive, check_address: CheckAddress) -> None:
        super().__init__()
        self._alive, self._check_address = alive, check_address

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connect = _connecting(http.client.HTTPSConnection, req, self._alive, self._check_address)
        return self.do_open(connect, req, context=ssl.create_default_context())


def _connecting(
    kind: type[http.client.HTTPConnection],
    req: urllib.request.Request,
    alive: Alive,
    check_address: CheckAddress,
) -> Any:
    """Make connections for one request."""
    asked = urlsplit(req.full_url)
    proxied = req.host != asked.netloc
    if proxied:
        check_address(asked.hostname or "")

    def made(host: str, **more: Any) -> http.client.HTTPConnection:
        one = kind(host, **more)
        one.response_class = functools.partial(_Answer, alive)  # type: ignore[assignment]
        if not proxied:
            connect = functools.partial(_connected, alive, check_address)
            one._create_connection = connect  # type: ignore[attr-defined]
        return one

    return made


def _connected(
    alive: Alive,
    check_address: CheckAddress,
    address: tuple[str, int],
    timeout: Any,
    source_address: Any = None,
) -> socket.socket:
    """Connect to the first address of a host that is allowed and answers. Raises also what ``alive`` does."""
    host, port = address
    failure: InputError | OSError = OSError("the host has no address")
    for *_, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        alive()
        numeric = str(found[0])  # resolves to itself: the address checked is the one connected to
        try:
            check_address(numeric)
            return socket.create_connection((numeric, port), timeout, source_address)
        except (InputError, OSError) as error:
            failure = error
    raise failure


class _Answer(http.client.HTTPResponse):
    def __init__(self, alive: Alive, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_Steps(sock, self.fp, alive))


class _Steps(io.RawIOBase):
    """A socket, read. ``keeps``: what keeps it open while this is."""

    def __init__(self, sock: socket.socket, keeps: io.BufferedReader, alive: Alive) -> None:
        self._sock, self._keeps, self._alive = sock, keeps, alive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        stall_s = self._sock.gettimeout() or STEP_S
        until = time.monotonic() + stall_s
        self._sock.settimeout(min(STEP_S, stall_s))
        try:
            while True:
                self._alive()
                try:
                    return self._sock.recv_into(buffer)
                except TimeoutError:
                    if time.monotonic() >= until:
                        raise
        finally:
            self._sock.settimeout(stall_s)

    def close(self) -> None:
        self._keeps.close()
        super().close()
