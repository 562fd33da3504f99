"""Memory that a virtual machine's host has behind it, as a machine of one's own has.

What no process touched for some seconds may be the host's again. Then its first touch
costs many times what it costs otherwise, whoever serves the request: what is left out here is told beside.
"""

from __future__ import annotations

import mmap

SHARE_BYTES = 96 << 20
PAGE_BYTES = mmap.PAGESIZE


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
