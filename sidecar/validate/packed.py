"""Reads gzip files as streams, in bounded memory.

A file that is cut, damaged, or followed by other bytes raises an error once it is read to its end.
"""

from __future__ import annotations

import gzip
import zlib
from typing import IO, Final

KINDS: Final = ".tar or .tar.gz"
BROKEN: Final = (EOFError, ValueError, zlib.error)  # and an OSError without a number

_OTHER: Final = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"(\xb5/\xfd": "zstd"}


class OtherPacking(ValueError):
    """The file is packed by something else than gzip."""


def unpacked(file: IO[bytes]) -> gzip.GzipFile | None:
    """Return the unpacked stream of a file that is at its beginning, or None if it is not packed.

    Reading the stream raises what BROKEN names, or an OSError without a number.

    Raises:
        OtherPacking: bzip2, xz or zstd packed it.
    """
    start = file.read(8)
    file.seek(0)
    for sign, kind in _OTHER.items():
        if start.startswith(sign):
            raise OtherPacking(f"it is packed with {kind}, which is not read: pack it as .tar.gz")
    return gzip.GzipFile(fileobj=file) if start.startswith(b"\x1f\x8b") else None
