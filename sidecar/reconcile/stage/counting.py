"""The bytes in use in a stage folder, known without a look as long as no process adds any.

Each addition begins another generation of the folder, so that the other processes look again. A removal
begins none: a process that misses it knows too many bytes, and looks again before it acts on a lack of room.
The sweep looks in any case. It finds what a person added.
"""

from __future__ import annotations

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.reconcile.stage.lock import FolderLock


class StageFull(VolumeUnavailable):
    """No room, and nothing that may make some. ``lacks``: so many bytes."""

    def __init__(self, message: str, lacks: int = 0) -> None:
        super().__init__(message, lacks)
        self.lacks = lacks

    def __str__(self) -> str:
        return str(self.args[0])


class Counted:
    """One process's count. Call inside ``lock.room``, except ``forget``."""

    def __init__(self, lock: FolderLock) -> None:
        self._lock = lock
        self._at: tuple[bytes, int] | None = None  # a generation, and the bytes in use

    def get(self) -> int | None:
        """Return the bytes in use, or more where something was removed; None if unknown."""
        at = self._at
        return at[1] if at is not None and at[0] == self._lock.generation() else None

    def note(self, used_bytes: int) -> None:
        """Know the bytes in use, as of this generation."""
        generation = self._lock.generation()
        self._at = (generation, used_bytes) if generation is not None else None

    def less(self, size_bytes: int) -> None:
        """Count so many bytes less: this process removed them."""
        if self._at is not None:
            self._at = self._at[0], self._at[1] - size_bytes

    def forget(self) -> None:
        """Look again next time. If another thread counts at the moment, it may know too many bytes."""
        self._at = None
