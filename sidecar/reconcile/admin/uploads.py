"""An adapter that a client sends: onto the volume as it comes, then checked and registered like any other.

Memory holds only bytes that wait for the disk. A refused, broken, too large or too slow upload goes at once.
gc removes what a killed replica leaves.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import anyio

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InputError, InvalidAdapter, SourceUnavailable, TooLarge, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Finding
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.release import present_revisions
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.sources.offer import ARCHIVE
from lora_fs.sidecar.sources.receive import tarball

WRITE_BYTES = 256 << 10
DISCARD_S = 2.0  # a refusal waits this long for the removal of the received files
URI = "upload:"


@dataclass(frozen=True, slots=True)
class Upload:
    """The files that a client sends.

    Attributes:
        files: chunks, each with the name of its file; ARCHIVE is a tar. One file after the other.
        size_bytes: as announced; None if it was not.
    """

    name: str
    files: AsyncIterator[tuple[str, bytes]]
    revision: str | None = None
    activate: bool = True
    size_bytes: int | None = None


@dataclass(slots=True)
class Uploads:
    """The uploads of one replica.

    Attributes:
        most_bytes, most_s: bounds on each, and on unpacking it.
        volume_s: how long the volume may take for one part of it.
    """

    registry: Registry
    most_bytes: int
    most_s: float
    volume_s: float
    _threads: Daemons = field(default_factory=lambda: Daemons(4, "lora-fs-upload"))

    async def receive(self, key: AdapterKey, upload: Upload) -> Path:
        """Write all of it into a folder on the volume; ``unpacked`` or ``discard`` is to follow.

        Raises:
            TooLarge, OverQuota, InputError: the upload is refused.
            SourceUnavailable: it did not come in time. VolumeUnavailable: the volume does not take it.
        """
        self._check_size(upload.size_bytes or 0)
        folder = artifacts.new_draft(self.registry.layout, key.scope)
        arriving = _Arriving(self.registry.layout.root, folder)
        kept = False
        try:
            with anyio.fail_after(self.most_s):
                await self._on_volume(partial(self._begin, key, arriving, upload.size_bytes or 0))
                await self._write(arriving, upload.files)
            kept = True
        except TimeoutError as error:
            raise SourceUnavailable(f"the upload of {key.name} took more than {self.most_s:.0f} s") from error
        finally:
            if not kept:
                discarded = asyncio.wrap_future(self._threads.submit(arriving.discard))
                with anyio.move_on_after(DISCARD_S, shield=True):
                    await asyncio.shield(discarded)  # it is done after that, too
        return folder

    def _begin(self, key: AdapterKey, arriving: _Arriving, size_bytes: int) -> None:
        self.registry.check_writable()
        if not present_revisions(self.registry, key.scope, key.name):  # else these bytes may be there
            self.registry.accounts.check(key, size_bytes)
        arriving.begin()

    async def _write(self, arriving: _Arriving, files: AsyncIterator[tuple[str, bytes]]) -> None:
        seen: set[str] = set()
        waiting, size = bytearray(), 0
        current: str | None = None

        async def write() -> None:
            if current is not None:
                await self._on_volume(partial(arriving.append, current, bytes(waiting)))
                waiting.clear()

        async for name, chunk in files:
            size += len(chunk)
            self._check_size(size)
            if name != current:
                await write()
                if name in seen or name not in (*tarball.TAKEN, ARCHIVE):
                    raise InputError(
                        f"{name[:80]!a} is sent twice, or is no file that is served: send "
                        f"{', '.join(tarball.TAKEN[:2])}, or one tar"
                    )
                if seen and ARCHIVE in (name, *seen):
                    raise InputError("a tar is sent with another file: send one tar, or the files alone")
                seen.add(name)
                current = name
            waiting += chunk
            if len(waiting) >= WRITE_BYTES:
                await write()
        if current is None:
            raise InputError("nothing was sent: send a tar, or the adapter's files")
        await write()
        await self._on_volume(arriving.close)

    async def _on_volume(self, call: Callable[[], None]) -> None:
        try:
            with anyio.fail_after(self.volume_s):
                await self._threads.run(call)
        except TimeoutError as error:
            raise VolumeUnavailable(
                f"the volume took no part of the upload in {self.volume_s:.0f} s: send it again"
            ) from error

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.most_bytes:
            raise TooLarge(
                f"the upload is more than {self.most_bytes} bytes, which LORA_FS_FETCH_MAX_BYTES allows"
            )

    def _budget(self) -> tarball.Budget:
        by = time.monotonic() + self.most_s

        def check() -> None:
            if time.monotonic() >= by:
                raise SourceUnavailable(
                    f"the upload was not unpacked in {self.most_s:.0f} s: pack the adapter alone, or raise "
                    "LORA_FS_FETCH_TIMEOUT_S"
                )

        return tarball.Budget("the upload", self.most_bytes, check)

    def discard(self, folder: Path) -> None:
        """Have it removed by a thread: nobody begins to register it."""
        self._threads.submit(artifacts.discard, folder)

    @contextmanager
    def unpacked(self, folder: Path) -> Iterator[Path]:
        """The adapter in a received folder, which is gone afterwards. Blocking.

        Findings of the block name no place that the sender does not know.
        """
        source = folder
        try:
            archive = folder / ARCHIVE
            if archive.exists():
                source = folder / "adapter"
                make_folder(source, root=self.registry.layout.root)
                tarball.unpack_within(archive, source, self._budget())
            yield source
        except InvalidAdapter as error:
            raise InvalidAdapter("the upload", [_as_sent(one, source) for one in error.findings]) from error
        finally:
            artifacts.discard(folder)


class _Arriving:
    """The files of one upload on the volume. Blocking; one call at a time, also where nobody waits for it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._files: dict[str, BinaryIO] = {}
        self._lock, self._discarded = threading.Lock(), False

    def begin(self) -> None:
        """Make their folder."""
        with self._lock:
            if not self._discarded:
                make_folder(self._folder, root=self._root)

    def append(self, name: str, data: bytes) -> None:
        """Begin one of them, or write on."""
        with self._writing(name):
            if name not in self._files:
                self._files[name] = (self._folder / name).open("xb", buffering=0)
            view = memoryview(data)
            while view:
                view = view[self._files[name].write(view) :]

    def close(self) -> None:
        """See that all of them are on the volume."""
        for name, file in self._files.items():
            with self._writing(name):
                os.fsync(file.fileno())
                file.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                raise atomic.unavailable(error, f"cannot write {self._folder / name}") from error

    def discard(self) -> None:
        """Remove them; what stays behind is gc's business."""
        with self._lock:
            self._discarded = True
            for file in self._files.values():
                with suppress(OSError):
                    file.close()
            artifacts.discard(self._folder)


def _as_sent(finding: Finding, folder: Path) -> Finding:
    said = {"message": finding.message, "hint": finding.hint}
    told = {field: text.replace(str(folder), "what was sent") for field, text in said.items()}
    return finding.model_copy(update=told)
