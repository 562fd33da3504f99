"""Packed files read as streams, in memory of a bounded size: gzip, bzip2 and xz, told by how they begin.

What is cut, damaged, or followed by what is no such stream is an error once it is read to its end.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import IO, Final

CHUNK_BYTES = 64 << 10
XZ_BYTES = 64 << 20  # what unpacking one may take: xz -8 needs half of it
KINDS = ".tar, .tar.gz, .tar.bz2 or .tar.xz"

BROKEN = (EOFError, ValueError, zlib.error, lzma.LZMAError)  # and an OSError without a number

Decoder = bz2.BZ2Decompressor | lzma.LZMADecompressor


class NeedsMemory(ValueError):
    """Unpacking would take more memory than XZ_BYTES."""


class _Streams(io.BufferedIOBase):
    """Streams one after the other. Goes forward alone."""

    def __init__(self, file: IO[bytes], make: Callable[[], Decoder]) -> None:
        self._file, self._make = file, make
        self._decoder, self._at = make(), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or position < self._at:
            raise io.UnsupportedOperation("a packed stream goes forward alone")
        while self._at < position and self._some(min(CHUNK_BYTES, position - self._at)):
            pass
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        parts, left = [], sys.maxsize if size is None or size < 0 else size
        while left > 0 and (part := self._some(min(left, CHUNK_BYTES))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        """Up to so many bytes; none at the end."""
        while True:
            data = b""
            if self._decoder.eof:
                data = self._decoder.unused_data or self._file.read(CHUNK_BYTES)
                while data and not (data := data.lstrip(b"\0")):  # padding
                    data = self._file.read(CHUNK_BYTES)
                if not data:
                    return b""
                self._decoder = self._make()
            elif self._decoder.needs_input and not (data := self._file.read(CHUNK_BYTES)):
                raise EOFError("it ends in the middle")
            try:
                part = self._decoder.decompress(data, most)
            except lzma.LZMAError as error:
                if "emory" not in str(error):
                    raise
                raise NeedsMemory(
                    f"to unpack it takes more than {XZ_BYTES >> 20} MiB of memory: pack it with xz -8 or "
                    "less, or as .tar.gz"
                ) from error
            if part:
                self._at += len(part)
                return part


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_BYTES)


_PACKED: Final[dict[bytes, Callable[[IO[bytes]], io.BufferedIOBase]]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": lambda file: _Streams(file, bz2.BZ2Decompressor),
    b"\xfd7zXZ\0": lambda file: _Streams(file, _xz),
}


def unpacked(file: IO[bytes]) -> io.BufferedIOBase | None:
    """What is packed in a file that is at its beginning; None if it is not packed, or otherwise.

    Reading it raises what BROKEN names, NeedsMemory among it, or an OSError without a number.
    """
    start = file.read(8)
    file.seek(0)
    return next((unpack(file) for sign, unpack in _PACKED.items() if start.startswith(sign)), None)
