"""A folder seen through a slow shared volume: so many MB/s for all its readers together, and a
latency for every request, as a mount of its own, read only, served by a process of its own.

Speaks the kernel's FUSE protocol itself, so it needs no library; it needs Linux, ``/dev/fuse``
and the right to mount, which is root's. Refuses to write. Files keep their pages in the page
cache between opens, as a network filesystem's do: only what was never read is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGTERM

from lora_fs.demo.process import Process, spawn

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY_NOSUID_NODEV = 7
_MNT_DETACH = 2
# Opcodes and layouts of <linux/fuse.h>, protocol 7.31.
_LOOKUP, _FORGET, _GETATTR, _READLINK, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 26, 27, 28, 29, 36, 42
_NO_ANSWER = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_IN_HEADER, _OUT_HEADER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ASYNC_READ, _AUTO_INVAL_DATA, _MAX_PAGES = 1 << 0, 1 << 12, 1 << 22
_KEEP_CACHE = 2
_CACHED_S = 1
_PAGES_A_READ = 256
_READAHEAD_KB = 1024
_THREADS = 16


@contextlib.contextmanager
def slow_volume(
    source: Path, mount_point: Path, log: Path, *, mbps: int = 100, latency_ms: int = 2
) -> Iterator[Path]:
    """Mount ``source`` at ``mount_point`` and yield it; unmounted at the end, open files or not."""
    mount_point.mkdir(parents=True, exist_ok=True)
    numbers = ["--mbps", str(mbps), "--latency-ms", str(latency_ms)]
    command = [sys.executable, "-P", __file__, str(source), str(mount_point), *numbers]
    server = spawn("slow-volume", command, log=log, url="", env={}, on_parent_death=SIGTERM)
    try:
        _wait_mounted(server, mount_point)
        yield mount_point
    finally:
        server.stop()
        _LIBC.umount2(os.fsencode(mount_point), _MNT_DETACH)


def _wait_mounted(server: Process, mount_point: Path, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not os.path.ismount(mount_point):
        if server.wait_ended(timeout_s=0.02) or time.monotonic() > deadline:
            raise SystemExit(f"no slow volume, which needs root and /dev/fuse:\n{server.log_tail()}")


class Passthrough:
    """Answers the kernel's requests from ``source``, each after its share of the volume's time."""

    def __init__(self, source: Path, mbps: float, latency_s: float) -> None:
        self._bytes_per_s, self._latency_s = mbps * 1e6, latency_s
        self._mutex = threading.Lock()
        self._free_at = 0.0
        self._paths = {1: os.fsencode(source)}
        self._nodes: dict[bytes, int] = {}
        self._handlers: dict[int, Callable[[int, bytes], bytes]] = {
            _INIT: self._init,
            _LOOKUP: self._lookup,
            _GETATTR: lambda node, body: struct.pack("<QII", _CACHED_S, 0, 0) + self._attr(node),
            _READLINK: lambda node, body: os.readlink(self._paths[node]),
            _OPEN: lambda node, body: self._opened(os.open(self._paths[node], os.O_RDONLY)),
            _READ: self._read,
            _RELEASE: self._release,
            _OPENDIR: lambda node, body: self._opened(0),
            _READDIR: self._readdir,
            _RELEASEDIR: lambda node, body: b"",
            _STATFS: lambda node, body: struct.pack("<5Q10I", 2**30, 0, 0, 0, 0, 4096, 255, 4096, *[0] * 7),
        }

    def serve(self, device: int) -> None:
        """Answer until the mount is gone; run by as many threads as may wait at once."""
        while True:
            try:
                request = os.read(device, 65536)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if opcode in _NO_ANSWER:
                continue
            started = time.perf_counter()
            body, code = b"", 0
            try:
                body = self._handlers[opcode](node, request[_IN_HEADER.size :])
            except OSError as error:
                code = error.errno or errno.EIO
            except KeyError:
                code = errno.ENOSYS
            if opcode not in (_INIT, _RELEASE, _RELEASEDIR):
                self._wait(started, len(body) if opcode == _READ else 0)
            with contextlib.suppress(OSError):  # ENOENT: who asked was interrupted
                header = _OUT_HEADER.pack(_OUT_HEADER.size + len(body), -code, unique)
                os.writev(device, (header, body))

    def _wait(self, started: float, size_bytes: int) -> None:
        """One pipe for all: bytes queue behind each other, latencies overlap."""
        with self._mutex:
            self._free_at = max(started, self._free_at) + size_bytes / self._bytes_per_s
            until = self._free_at if size_bytes else started
        time.sleep(max(0.0, until + self._latency_s - time.perf_counter()))

    def _init(self, node: int, body: bytes) -> bytes:
        readahead, offered = struct.unpack_from("<8xII", body)
        flags = offered & (_ASYNC_READ | _AUTO_INVAL_DATA | _MAX_PAGES)
        return struct.pack(
            "<4IHHIIHH8I", 7, 31, readahead, flags, 64, 48, 4096, 1, _PAGES_A_READ, 0, *[0] * 8
        )

    def _lookup(self, node: int, body: bytes) -> bytes:
        path = self._paths[node] + b"/" + body.split(b"\0", 1)[0]
        os.lstat(path)
        with self._mutex:
            child = self._nodes.setdefault(path, len(self._nodes) + 2)
            self._paths[child] = path
        return struct.pack("<QQQQII", child, 0, _CACHED_S, _CACHED_S, 0, 0) + self._attr(child)

    def _attr(self, node: int) -> bytes:
        found = os.lstat(self._paths[node])
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        seconds, nanoseconds = zip(*(divmod(time_ns, 10**9) for time_ns in times), strict=True)
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
        return _ATTR.pack(
            found.st_ino, found.st_size, found.st_blocks, *seconds, *nanoseconds, *owner, 0, 4096, 0
        )

    @staticmethod
    def _opened(handle: int) -> bytes:
        return struct.pack("<QII", handle, _KEEP_CACHE, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        with os.scandir(self._paths[node]) as found:
            entries = sorted((entry.name, entry.inode(), entry) for entry in found)
        for number, (name, inode, entry) in enumerate(entries[offset:], offset + 1):
            kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
            packed = struct.pack("<QQII", inode, number, len(name), kind) + name
            packed += b"\0" * (-len(packed) % 8)
            if len(answer) + len(packed) > size:
                break
            answer += packed
        return answer


def main() -> None:
    """Mount, serve until SIGTERM or until it is unmounted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("mount_point", type=Path)
    parser.add_argument("--mbps", type=float, default=100)
    parser.add_argument("--latency-ms", type=float, default=2)
    options = parser.parse_args()
    device = os.open("/dev/fuse", os.O_RDWR)
    at = os.fsencode(options.mount_point)
    data = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if _LIBC.mount(b"slow", at, b"fuse.slow", _MS_RDONLY_NOSUID_NODEV, data.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount on {options.mount_point}")
    signal.signal(SIGTERM, lambda *_: _LIBC.umount2(at, _MNT_DETACH))
    volume = Passthrough(options.source.resolve(), options.mbps, options.latency_ms / 1000)
    threads = [threading.Thread(target=volume.serve, args=(device,)) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    number = os.stat(options.mount_point).st_dev  # by now requests are answered
    queue = Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb")
    with contextlib.suppress(OSError):
        queue.write_text(str(_READAHEAD_KB))
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
