"""gzip files are read as streams; other packings are refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import zlib

import pytest

from lora_fs.sidecar.validate.packed import OtherPacking, unpacked


def test_any_reads_give_the_bytes() -> None:
    """Reads of any sizes, and seeks forward, over several streams one after the other."""
    chance = random.Random(4711)
    data = chance.randbytes(300_000) + bytes(300_000)
    stream = unpacked(io.BytesIO(gzip.compress(data[:1234]) + gzip.compress(data[1234:])))
    assert stream is not None
    at = 0
    while at < len(data):
        assert stream.tell() == at
        if chance.random() < 0.3:
            at = min(len(data), at + chance.randrange(100_000))
            assert stream.seek(at) == at
            continue
        part = stream.read(chance.randrange(1, 100_000))
        assert part == data[at : at + len(part)]
        at += len(part)
    assert stream.read(10) == stream.read() == b""


def test_a_file_that_is_not_packed_is_left_as_it_is() -> None:
    """None is returned, and the file is at its beginning."""
    for data in (b"", b"adapter", lzma.compress(b"x", lzma.FORMAT_ALONE)):
        file = io.BytesIO(data)
        assert unpacked(file) is None
        assert file.read() == data


@pytest.mark.parametrize(
    ("kind", "data"),
    [("bzip2", bz2.compress(b"x")), ("xz", lzma.compress(b"x")), ("zstd", b"(\xb5/\xfd" + bytes(8))],
)
def test_another_packing_is_refused_by_name(kind: str, data: bytes) -> None:
    """The error says what to do instead."""
    with pytest.raises(OtherPacking, match=f"packed with {kind}, which is not read: pack it as .tar.gz"):
        unpacked(io.BytesIO(data))


def test_damage_is_found() -> None:
    """A stream that was cut or changed raises before its end."""
    data = bytearray(gzip.compress(bytes(100_000)))
    for broken in (bytes(data[:-3]), bytes(data[:-6]) + b"\1" * 6):
        stream = unpacked(io.BytesIO(broken))
        assert stream is not None
        with pytest.raises((EOFError, OSError, zlib.error)):
            stream.read()
