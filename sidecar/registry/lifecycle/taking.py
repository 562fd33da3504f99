"""Takes an adapter's bytes: hashes every part that it reads, and writes it into a new folder or not.

The one writer of copies: for validation, for staging, and to replace damaged files.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import FileEntry
from lora_fs.sidecar.registry.format.layout import REGISTERING
from lora_fs.sidecar.registry.volume import atomic, permissions
from lora_fs.sidecar.registry.volume.folders import make_folder

LEAST_BYTES = 64 << 10  # read at once, whatever a file's size is said to be
BESIDE_BYTES = 512 << 10  # a smaller part is hashed here: a thread takes longer to begin


class TargetUnavailable(VolumeUnavailable):
    """``target`` failed a write; where the bytes came from is another matter."""

    def __init__(self, target: Path, error: OSError) -> None:
        super().__init__(str(atomic.unavailable(error, f"cannot write {target}")))
        self.target, self.error = target, error


@contextmanager
def writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TargetUnavailable(target, error) from error


class Taker:
    """Takes the bytes of files, one file after the other: hashes them beside, and writes them.

    After the call following the next one, the giver may overwrite a part's buffer.

    Args:
        folder: a new one, made when the first file comes; None: write nothing.
        root: of the registry that the folder belongs to; None: the folder's parent exists.
        sync: make it survive a power loss.
        marked: see ``place``.
    Attributes:
        files: those taken whole.
    Raises:
        TargetUnavailable: the folder did not take them.
    """

    def __init__(
        self, folder: Path | None, *, root: Path | None = None, sync: bool = True, marked: bool = False
    ) -> None:
        self.folder, self.files = folder, list[FileEntry]()
        self._root = root
        self._sync, self._marked = sync, marked
        self._name, self._size, self._digest = "", 0, hashlib.sha256()
        self._beside: ThreadPoolExecutor | None = None
        self._doing: Future[None] | None = None
        self._target = Path()
        self._writer: io.BufferedWriter | None = None

    def __enter__(self) -> Taker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.shutdown()
        if self._writer is not None:  # ``end`` closed the complete ones
            with suppress(OSError):
                self._writer.close()

    def __call__(self, name: str, part: memoryview) -> None:
        """Take the next bytes of ``name``; with another name, the file before is whole."""
        self._await_hash()
        if name != self._name:
            self.end()
            self._begin(name)
        self._size += len(part)
        if len(part) >= BESIDE_BYTES:
            self._beside = self._beside or ThreadPoolExecutor(1, "lora-fs-hash")
            self._doing = self._beside.submit(self._digest.update, part)
        else:
            self._digest.update(part)
        if self._writer is not None:
            # Here: what hangs is the caller's thread, and none that an exit waits for.
            with writing(self._target):
                self._writer.write(part)

    def _begin(self, name: str) -> None:
        self._name, self._size, self._digest = name, 0, hashlib.sha256()
        if self.folder is None:
            return
        if not self.files:
            if self._root is not None:
                make_folder(self.folder.parent, root=self._root)
            _make_draft(self.folder, marked=self._marked)
        self._target = self.folder / name
        with writing(self._target):
            self._writer = self._target.open("xb")
            permissions.share_file(self._writer.fileno(), self.folder)

    def end(self) -> None:
        """See that the file under way is whole and on the volume."""
        self._await_hash()
        if not self._name:
            return
        if self._writer is not None:
            with writing(self._target), self._writer as writer:
                writer.flush()
                if self._sync:
                    os.fsync(writer.fileno())
            self._writer = None
        entry = FileEntry(path=self._name, size_bytes=self._size, sha256=self._digest.hexdigest())
        self.files.append(entry)
        self._name = ""

    def _await_hash(self) -> None:
        if self._doing is not None:
            self._doing.result()

    def sync_names(self) -> None:
        """Make the names of the files survive a power loss, too."""
        if self._sync and self.folder is not None:
            with writing(self.folder):
                atomic.sync_folder(self.folder)


def _make_draft(folder: Path, *, marked: bool) -> None:
    with writing(folder):
        folder.mkdir()
        permissions.share_folder(folder, folder.parent)
        if marked:
            (folder / REGISTERING).open("xb").close()
