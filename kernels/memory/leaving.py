"""Slabs that nobody wants any more, while the device may still copy from them.

A slab's memory is another adapter's as soon as its last tensor is gone. The device copies in its own time.
So who lets go of a slab hands it in here, with the event that comes after its copy.
"""

from __future__ import annotations

from typing import Protocol

from lora_fs.kernels.weights.slabs import Slab


class Event(Protocol):
    """``torch.cuda.Event``, as far as it matters here."""

    def query(self) -> bool: ...


class Leaving:
    """For one thread, whoever starts the copies."""

    def __init__(self) -> None:
        self._kept: list[tuple[Slab, Event]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, slab: Slab, copied: Event | None) -> None:
        """Keep a slab until its copy has ended; ``None``: it ended at once, as on a CPU."""
        self.clear()
        if copied is not None and not copied.query():
            self._kept.append((slab, copied))

    def clear(self) -> None:
        """Let go of the slabs whose copies have ended; waits for none."""
        self._kept = [(slab, copied) for slab, copied in self._kept if not copied.query()]
