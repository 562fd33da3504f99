"""Reads gzip files and tars as streams, in bounded memory.

A file that is cut, damaged, or followed by other bytes raises an error once it is read to its end.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

from lora_fs.sidecar.escaping import shown

KINDS: Final = ".tar or .tar.gz"
BROKEN: Final = (EOFError, ValueError, zlib.error)  # and an OSError without a number

_OTHER: Final = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"(\xb5/\xfd": "zstd"}
_SPARSE: Final = "it holds a sparse file, which is not read: pack it without --sparse"
_MOST_HEADER_BYTES: Final = 64 << 10
_HEADERS: Final = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)


class NotTar(Exception):
    """The file is no tar, or was cut. The text says why."""


class OtherPacking(ValueError):
    """The file has another packing than gzip, or sparse files."""


def unpacked(file: IO[bytes]) -> gzip.GzipFile | None:
    """Return the unpacked stream of a file at its beginning, or None for an unpacked file.

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


class _Member(tarfile.TarInfo):
    """A member with bounded headers: tarfile reads each, and a sparse file's map, into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _HEADERS and member.size > _MOST_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise OtherPacking(_SPARSE)
        return member

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise OtherPacking(_SPARSE)


class _Stream(tarfile.TarFile):
    """A tar that keeps no member once the next one is read, nor what a global header said."""

    def next(self) -> tarfile.TarInfo | None:
        self.members.clear()  # type: ignore[attr-defined]
        self.pax_headers.clear()  # type: ignore[attr-defined]
        return super().next()


@contextmanager
def tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a .tar or .tar.gz, to read its members in their order.

    Raises:
        NotTar, OtherPacking: it cannot be read as one; also while its members are read.
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            stream = cast(IO[bytes], unpacked(file) or file)
            with _Stream.open(fileobj=stream, mode="r:", tarinfo=_Member) as archive:
                yield archive
    except OtherPacking:
        raise
    except (tarfile.TarError, OverflowError, RecursionError, OSError, *BROKEN) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise NotTar(shown(str(error).partition("\n")[0].rstrip(":"))) from error
