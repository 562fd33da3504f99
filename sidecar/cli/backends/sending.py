"""An adapter's folder as a tar, made during the upload: no copy on the disk, its length known before."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lora_fs.sidecar.errors import InputError

CHUNK_BYTES = 1 << 20
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)


class Sending:
    """``names``: of files in ``folder``. ``advance`` gets the number of bytes that were sent."""

    def __init__(self, folder: Path, names: Sequence[str], advance: Callable[[int], None]) -> None:
        self._folder, self._advance = folder, advance
        self._sizes = {name: (folder / name).stat().st_size for name in names}

    @property
    def size_bytes(self) -> int:
        """The length of the whole tar."""
        files = (len(_header(name, size)) + _padded(size) for name, size in self._sizes.items())
        return sum(files) + len(END)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the tar; raises InputError for a file that is not as long as it was."""
        for name, size in self._sizes.items():
            yield _header(name, size)
            yield from self._content(self._folder / name, size)
            yield bytes(_padded(size) - size)
        yield END

    def _content(self, file: Path, size: int) -> Iterator[bytes]:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size != size:
                raise InputError(f"{file} was changed while it was sent: send it again")
            left = size
            while left:
                chunk = opened.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise InputError(f"{file} was cut while it was sent: send it again")
                left -= len(chunk)
                self._advance(len(chunk))
                yield chunk


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
