"""Memory for slabs: in pages of 2 MiB where the kernel has some, and one piece touched ahead of need.

The first touch of memory takes longer than all the rest of packing: the kernel clears a page, and a virtual
machine's host may have to find it. So a piece as large as the last lies ready, touched a page at
a time, in a thread that has nothing else to do.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from threading import Lock

import torch

HUGE_PAGE_BYTES = 2 << 20
PAUSE_S = 0.05  # before each page, so that few of the steps that run meanwhile are beside one
PAUSES_S = 1.0  # all of them at most: a process that ends waits for its threads


class HostMemory:
    """Memory for slabs, for any thread. It goes back to the system with its tensor."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spare: mmap.mmap | None = None

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for ``elements``, of any content."""
        size = elements * dtype.itemsize
        if size < HUGE_PAGE_BYTES:
            return torch.empty(elements, dtype=dtype)
        with self._lock:
            memory, self._spare = self._spare, None
            if memory is not None and len(memory) != size:
                try:
                    memory.resize(size)
                except (OSError, SystemError):  # no room behind it; not Linux
                    memory = None
        return torch.frombuffer(memory or _mapped(size), dtype=dtype)

    def taken_bytes(self, size_bytes: int) -> int:
        """The bytes that a piece of so many counts as."""
        return size_bytes

    def prepare(self, size: int, room: int) -> None:
        """Have ``size`` bytes ready for the next caller; returns when they are ready, or taken.

        Args:
            room: bytes that ready memory may take; gives back what exceeds them.
        """
        with self._lock:
            if self._spare is not None and len(self._spare) > room:
                self._spare = None
            if self._spare is not None or not HUGE_PAGE_BYTES <= size <= room:
                return
            self._spare = spare = _mapped(size)
        pages = range(0, size, HUGE_PAGE_BYTES)
        for page in pages:
            time.sleep(min(PAUSE_S, PAUSES_S / len(pages)))  # the request that caused the load comes first
            with self._lock:
                if self._spare is not spare:
                    return
                torch.frombuffer(spare, dtype=torch.uint8, offset=page)[: HUGE_PAGE_BYTES : mmap.PAGESIZE] = 0

    def drop(self) -> None:
        """Give what lies ready back to the system."""
        with self._lock:
            self._spare = None


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on Linux, or of a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
