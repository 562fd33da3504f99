"""Connections of the standard library whose answers are waited for in steps: each asks whether to go on.

A socket's own timeout begins anew with every byte: a server that sends one now and then is never done.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STEP_S = 0.25

Alive = Callable[[], None]
Got = TypeVar("Got")


def opener(alive: Alive) -> urllib.request.OpenerDirector:
    """Opens ``http`` and ``https``, by the environment's proxies; follows no redirect.

    Args:
        alive: asked before each wait, for headers and body; what it raises ends the answer.
    """
    made = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), _Plain(alive), _Secure(alive)):
        made.add_handler(handler)
    return made


def waited(call: Callable[[], Got], alive: Alive) -> Got:
    """What ``call`` of another client gives, waited for in steps; raises what it raises.

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


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self._alive = alive

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connect: Any = functools.partial(_connection, http.client.HTTPConnection, self._alive)
        return self.do_open(connect, req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self._alive = alive

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connect: Any = functools.partial(_connection, http.client.HTTPSConnection, self._alive)
        return self.do_open(connect, req, context=ssl.create_default_context())


def _connection(
    kind: type[http.client.HTTPConnection], alive: Alive, host: str, **more: Any
) -> http.client.HTTPConnection:
    made = kind(host, **more)
    made.response_class = functools.partial(_Answer, alive)  # type: ignore[assignment]
    return made


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
