"""Memory that a virtual machine's host has behind it, as a machine of one's own has.

What no process touched for some seconds may be the host's again. Then its first touch
costs many times what it costs otherwise, whoever serves the request: what is left out here is told beside.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARE_BYTES = 96 << 20
PAGE_BYTES = mmap.PAGESIZE
BLOCK_BYTES = 2 << 20  # what the kernel tells the host of: no smaller piece of free memory is taken back
LEFT_BYTES = 512 << 20  # for what else runs while memory is touched
JOINING = Path("/proc/sys/vm/compaction_proactiveness")
CACHES = Path("/proc/sys/vm/drop_caches")


class Backed:
    """``count`` shares, touched now. What is given back is what the kernel hands out next."""

    def __init__(self, count: int) -> None:
        self._shares = [mmap.mmap(-1, SHARE_BYTES) for _ in range(count)]
        for share in self._shares:
            for page in range(0, SHARE_BYTES, PAGE_BYTES):
                share[page] = 1

    def give(self) -> None:
        """Let the next who asks have a share."""
        self._shares.pop().close()


@contextmanager
def kept() -> Iterator[None]:
    """Have all free memory stay with this machine meanwhile; needs root.

    A process of its own touches it, and frees all but one page of each block that the host could take back.
    The kernel, which would clear blocks of such pages in idle time, is told not to. Pages of files, which
    would be free only later, are dropped before. No block is left for a huge page: all is slower.
    """
    before = JOINING.read_text()
    os.sync()
    CACHES.write_text("1")
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        try:
            JOINING.write_text("0")
            assert keeper.stdout.readline() == b"kept\n", "memory could not be kept"
            yield
        finally:
            JOINING.write_text(before)


def _keep() -> None:
    """Hold a page of each block until stdin ends."""
    free = re.search(r"MemFree: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert free is not None
    blocks = max(0, 1024 * int(free[1]) - LEFT_BYTES) // BLOCK_BYTES
    memory = mmap.mmap(-1, blocks * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    starts = range(0, len(memory), BLOCK_BYTES)
    for start in starts:
        memory[start : start + BLOCK_BYTES : PAGE_BYTES] = bytes([1] * (BLOCK_BYTES // PAGE_BYTES))
    for start in starts:
        memory.madvise(mmap.MADV_DONTNEED, start + PAGE_BYTES, BLOCK_BYTES - PAGE_BYTES)
    print("kept", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _keep()
