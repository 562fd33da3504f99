"""A worker's unasked reports: a load ended, or a step ran an adapter without its weights.

A datagram to a socket of each API server on the machine. A notice wakes who waits, and a call says what is
so: a lost notice costs a later look. No server asks a worker all the time: for each call of several workers
vLLM drains the steps that are under way.

Linux queues 11 datagrams for a socket (``net.unix.max_dgram_qlen``, of each container). An API server that is
busy for some milliseconds may have more to read: those wait in a thread of the worker, and no step does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import socket
import struct
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

MOST_REASON = 1000  # characters; vLLM's own may name every module of an adapter
MOST_BYTES = 16384  # JSON takes up to 12 bytes for each of them
PATIENCE_S = 5  # so long a notice waits for a server that does not read; until its next call it gets no other


class Notices:
    """A worker's side; any thread may. ``name``: no other worker's."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._listeners: dict[str, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        weakref.finalize(self, self._socket.close)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE_S, 0))
        self._late = ThreadPoolExecutor(1, "lora-fs-notices")

    def reach(self, user: str, path: str) -> bool:
        """Send to a user at ``path`` from now on; False if that is no path here, as on another machine."""
        if not path or not os.path.exists(path):
            return False
        self._listeners[user] = path
        return True

    def ended(self, adapter: int, load: str, size_bytes: int | None, but: str | None = None) -> None:
        """A load ended, and what it brought takes so much; None: it failed. ``but`` gets no notice."""
        self._send({"ended": adapter, "load": load, "from": self.name, "bytes": size_bytes}, but)

    def blank(self, adapter: int, reason: str) -> None:
        """A step ran an adapter without its weights."""
        self._send({"blank": adapter, "reason": reason[:MOST_REASON]})

    def _send(self, said: dict[str, object], but: str | None = None) -> None:
        notice = json.dumps(said).encode()
        for user, path in list(self._listeners.items()):
            if user != but and not self._sent(notice, user, path, socket.MSG_DONTWAIT):
                with suppress(RuntimeError):  # this process ends, or has no thread left
                    self._late.submit(self._send_late, notice, user, path)

    def _send_late(self, notice: bytes, user: str, path: str) -> None:
        if self._listeners.get(user) == path and not self._sent(notice, user, path):
            logger.warning("API server %s has read no notice for %d s, and looks later", user, PATIENCE_S)
            self._listeners.pop(user, None)

    def _sent(self, notice: bytes, user: str, path: str, flags: int = 0) -> bool:
        """Send it, or log why that cannot be; False if the server has too much to read."""
        try:
            self._socket.sendto(notice, flags, path)
        except BlockingIOError:
            return False
        except (FileNotFoundError, ConnectionRefusedError):  # that server is gone
            self._listeners.pop(user, None)
        except OSError as error:
            logger.warning("an API server was not notified, and looks again later: %r", error)
        return True


End = tuple[str, str]  # of a load: its number, and the worker's name


class Waiting:
    """A wait for the end of an adapter's loads. ``ended``: the ended ones, and the bytes of each."""

    def __init__(self) -> None:
        self.ended: dict[End, int | None] = {}
        self._more = asyncio.Event()

    def add(self, end: End, size_bytes: int | None) -> None:
        self.ended[end] = size_bytes
        self._more.set()

    async def until(self, ends: Collection[End], most_s: float) -> None:
        """Return when all these have ended, or after ``most_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not self.ended.keys() >= set(ends):
                    self._more.clear()
                    await self._more.wait()


class Listener:
    """An API server's side; its loop reads.

    Args:
        blank: called with an adapter and a reason.
        beside: the folder in which to make the socket's own; None: the system's temporary one.
    """

    def __init__(self, blank: Callable[[int, str], None], beside: str | None = None) -> None:
        self._blank = blank
        self._waiting: dict[int, list[Waiting]] = {}
        folder = tempfile.mkdtemp(prefix="lora-fs-notices-", dir=beside)  # which only this user may enter
        self.path = os.path.join(folder, "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        weakref.finalize(self, _end, self._socket, folder)  # with its loop, or at the end of the process
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    @contextmanager
    def of(self, adapter: int) -> Iterator[Waiting]:
        """Count the loads of an adapter that end."""
        waiting = Waiting()
        self._waiting.setdefault(adapter, []).append(waiting)
        try:
            yield waiting
        finally:
            self._waiting[adapter].remove(waiting)
            if not self._waiting[adapter]:
                del self._waiting[adapter]

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._take(self._socket.recv(MOST_BYTES))

    def _take(self, notice: bytes) -> None:
        try:
            said = json.loads(notice)
            if "blank" in said:
                self._blank(int(said["blank"]), str(said["reason"]))
            for waiting in self._waiting.get(said.get("ended"), ()):
                waiting.add((str(said["load"]), str(said["from"])), said["bytes"])
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("a notice that is none: %r", notice[:100])


def _end(heard: socket.socket, folder: str) -> None:
    heard.close()
    shutil.rmtree(folder, ignore_errors=True)
