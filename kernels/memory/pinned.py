"""Page-locked memory for adapters: locked once, at the start, and cut into extents.

To lock memory or to unlock it (``cudaHostAlloc``, ``cudaFreeHost``) may hold up a device's launches. So no
load locks any for weights, and no unload unlocks any. An extent is free again when its last tensor is gone.
If no gap is long enough, the caller gets pageable memory: as right, and slower to copy from.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from threading import Lock

import torch

from lora_fs.kernels.memory.extents import Extents, StorageFullError

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096  # extents are multiples of it


def page_locked(size_bytes: int) -> torch.Tensor:
    """Lock so much memory. torch rounds a size up to a power of two."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedMemory:
    """An arena, for any thread.

    Args:
        size_bytes: of the arena, rounded up by an eighth at most.
        lock: ``page_locked``. Called here alone, at most five times, with powers of two that add up to the
            size.
    Raises:
        MemoryError: the system does not lock so much.
    """

    def __init__(self, size_bytes: int, lock: Callable[[int], torch.Tensor]) -> None:
        try:
            self._parts = [_Part(lock(size)) for size in powers_of_two(size_bytes)]
        except RuntimeError as error:
            raise MemoryError(f"{size_bytes} bytes of page-locked memory: {error}") from error
        self._lock = Lock()
        self._owners = count()
        # A finalizer may run in any thread, inside of any call: it only notes who is gone.
        self._gone: deque[tuple[int, _Part]] = deque()

    @property
    def size_bytes(self) -> int:
        return sum(part.extents.size for part in self._parts) * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        """The sum of all gaps."""
        with self._lock:
            self._collect()
            return sum(part.extents.free for part in self._parts) * PAGE_BYTES

    def taken_bytes(self, size_bytes: int) -> int:
        """The bytes of the arena that a piece of so many takes."""
        return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for ``elements``, of any content, in a storage of its own."""
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        with self._lock:
            self._collect()
            found = self._take(-(-size // PAGE_BYTES))
        if found is None:
            logger.warning("no %d bytes in a row are free in %d page-locked ones", size, self.size_bytes)
            return torch.empty(elements, dtype=dtype)
        owner, part, address = found
        # torch keeps it for as long as any tensor is in it.
        piece = (ctypes.c_char * size).from_address(address)
        weakref.finalize(piece, self._gone.append, (owner, part))
        return torch.frombuffer(piece, dtype=dtype)

    def prepare(self, size: int, room: int) -> None:
        """Do nothing: all of it is ready."""

    def drop(self) -> None:
        """Do nothing: it stays locked."""

    def _take(self, pages: int) -> tuple[int, _Part, int] | None:
        owner = next(self._owners)
        for part in self._parts:
            try:
                extent = part.extents.take(owner, pages)
            except StorageFullError:
                continue
            if extent is not None:
                return owner, part, part.memory.data_ptr() + extent.begin * PAGE_BYTES
        return None

    def _collect(self) -> None:
        while self._gone:
            owner, part = self._gone.popleft()
            part.extents.release(owner)


class _Part:
    """One locked piece. Whatever stands in it refers to this object."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.extents = Extents(memory.nbytes // PAGE_BYTES)


def powers_of_two(size_bytes: int) -> list[int]:
    """At most five powers of two, the largest first, that add up to the size and an eighth more at most."""
    unit = max(PAGE_BYTES, 1 << max(0, size_bytes.bit_length() - 4))
    left = max(1, -(-size_bytes // unit)) * unit
    found = []
    while left:
        found.append(1 << (left.bit_length() - 1))
        left -= found[-1]
    return found
