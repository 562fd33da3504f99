"""Reads gzip files and tars as streams, forward alone and in bounded memory.

A step back in a packed tar would unpack it anew from its beginning: a tar that needs one is refused. A file
that is cut, damaged, or followed by other bytes raises an error once it is read to its end.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from lora_fs.sidecar.escaping import shown

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

KINDS: Final = ".tar or .tar.gz"
BROKEN: Final = (EOFError, ValueError, zlib.error)  # and an OSError without a number

_OTHER: Final = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"(\xb5/\xfd": "zstd"}
_SPARSE: Final = "it holds a sparse file, which is not read: pack it without --sparse"
_MOST_HEADER_BYTES: Final = 64 << 10
_BUFFER_BYTES: Final = 64 << 10
_SKIP_BYTES: Final = 256 << 10
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


Passed = Callable[[int], None]
"""Called with the number of bytes that were unpacked, or 0 if packed ones were read. It may raise."""


class _Forward:
    """A stream that is read and skipped, and never stepped back in. It tells ``passed`` how far it came."""

    def __init__(self, file: IO[bytes], passed: Passed) -> None:
        self._file, self._passed, self._at = file, passed, 0
        self.packed = isinstance(file, gzip.GzipFile)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._at += len(data)
        self._passed(len(data))
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, target: int) -> int:
        if target < self._at:
            raise tarfile.ReadError(f"a step back from byte {self._at} to {target}")
        if not self.packed:
            self._passed(target - self._at)
            self._at = self._file.seek(target)
        while self._at < target and self.read(min(_SKIP_BYTES, target - self._at)):
            pass
        return self._at


class _Watched(io.FileIO):
    """A file that calls ``passed`` before each read: one read of a packed file may take many of these."""

    def __init__(self, path: Path, passed: Passed) -> None:
        super().__init__(path)
        self._passed = passed

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._passed(0)
        return super().readinto(buffer)


class _Member(tarfile.TarInfo):
    """A member with bounded headers: tarfile reads each, and a sparse file's map, into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        member._check_size()
        if member.type in _HEADERS and member.size > _MOST_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise OtherPacking(_SPARSE)
        return member

    def _check_size(self) -> None:
        if self.size < 0:
            raise tarfile.HeaderError(f"a negative size ({self.size})")

    def _apply_pax_info(self, *args: Any) -> None:
        super()._apply_pax_info(*args)  # type: ignore[misc]
        self._check_size()

    def _proc_gnusparse_00(self, *_: object) -> None:
        raise OtherPacking(_SPARSE)

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00


class _Stream(tarfile.TarFile):
    """A tar that keeps no member once the next one is read, nor what a global header said."""

    def next(self) -> tarfile.TarInfo | None:
        self.members.clear()  # type: ignore[attr-defined]
        self.pax_headers.clear()  # type: ignore[attr-defined]
        return super().next()


@contextmanager
def tar(path: Path, passed: Passed = lambda _: None) -> Iterator[tarfile.TarFile]:
    """Open a .tar or .tar.gz, to read its members in their order.

    Args:
        passed: see ``Passed``. What it raises ends the reading.
    Raises:
        NotTar, OtherPacking: it cannot be read as one; also while its members are read.
        OSError: the file cannot be read.
    """
    try:
        with io.BufferedReader(_Watched(path, passed), _BUFFER_BYTES) as file:
            stream = _Forward(cast(IO[bytes], unpacked(file) or file), passed)
            with _Stream.open(fileobj=cast(IO[bytes], stream), mode="r:", tarinfo=_Member) as archive:
                yield archive
    except OtherPacking:
        raise
    except (tarfile.TarError, OverflowError, RecursionError, OSError, *BROKEN) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise NotTar(shown(str(error).partition("\n")[0].rstrip(":"))) from error


def finish(archive: tarfile.TarFile) -> None:
    """Read a packed tar to its end, where its checksum is. Call it behind the last member, inside ``tar``."""
    stream = archive.fileobj
    assert isinstance(stream, _Forward)
    while stream.packed and stream.read(_SKIP_BYTES):
        pass
