"""Memory that a virtual machine's host has behind it, as a machine of one's own has.

What no process touched for some seconds may be the host's again. Then its first touch
costs many times what it costs otherwise, whoever serves the request: what is left out here is told beside.
"""

from __future__ import annotations

import mmap
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARE_BYTES = 96 << 20
PAGE_BYTES = mmap.PAGESIZE
BLOCK_BYTES = 2 << 20  # a huge page, and the least free memory that the kernel tells the host of
LEFT_BYTES = 160 << 20  # a little more than the kernel has free before it takes from anybody
UNUSED_S, LOOKS, LOOK_S = 25, 4, 0.5  # what nothing reads for a minute the kernel may give up (DAMON)
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

    A process of its own touches it, and lets the kernel take it from it as it is wanted (``MADV_FREE``), in
    huge pages where those are: it is never free, so the host never has it, and to have it costs next to
    nothing. Pages of files, which would be free only later, are dropped before.
    """
    os.sync()
    CACHES.write_text("1")
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"kept\n", "memory could not be kept"
        yield


def _keep() -> None:
    """Hold what is free until stdin ends."""
    free = re.search(r"MemFree: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert free is not None
    blocks = max(1, (1024 * int(free[1]) - LEFT_BYTES) // BLOCK_BYTES)
    memory = mmap.mmap(-1, blocks * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, len(memory), BLOCK_BYTES):
        memory[start] = 1
    memory.madvise(mmap.MADV_FREE)
    print("kept", flush=True)
    while not select.select([sys.stdin], [], [], UNUSED_S)[0]:
        for _ in range(LOOKS):
            memory[::BLOCK_BYTES]
            select.select([sys.stdin], [], [], LOOK_S)


if __name__ == "__main__":
    _keep()
