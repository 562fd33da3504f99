"""Which request with ``load_inplace`` has its weights already: each is read once.

vLLM reads an adapter at every step of such a request. Its server has sent none with its requests since 0.33.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lora_fs.worker_patch.worker.load.alike import CONFIG, WEIGHTS

KEPT = 256
Files = tuple[tuple[int, ...], ...]


class InPlace:
    """The last request of each adapter that was loaded in place, the latest ``KEPT``.

    The requests of one ``LLM.generate`` are objects of their own in a worker, and name the same files: the
    worker reads those again only if they changed.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Any, Files | None]] = {}

    def asks(self, request: Any) -> bool:
        """Whether a request is one that wants its adapter read, and was not read for yet."""
        if request is None or not request.load_inplace:
            return False
        last, files = self._last.get(request.lora_int_id, (None, None))
        if last is request:
            return False
        if last is None or files is None or last.lora_path != request.lora_path:
            return True
        if files != files_of(request.lora_path):
            return True
        self._last[request.lora_int_id] = request, files
        return False

    def reading(self, request: Any) -> Files | None:
        """The files as they are before they are read."""
        return files_of(request.lora_path) if request.load_inplace else None

    def read(self, request: Any, files: Files | None) -> None:
        """Note that an adapter was read; ``files``: as ``reading`` returned them."""
        self._last.pop(request.lora_int_id, None)
        if request.load_inplace:
            self._last[request.lora_int_id] = request, files
            self._last = dict(list(self._last.items())[-KEPT:])


def files_of(folder: str) -> Files | None:
    """What identifies the contents of an adapter's files; None if they are not in a local folder."""
    found = []
    with suppress(OSError):
        for name in (CONFIG, WEIGHTS):
            with (Path(folder) / name).open("rb") as file:  # NFS asks its server at an open, not at a stat
                stat = os.fstat(file.fileno())
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        return tuple(found)
    return None
