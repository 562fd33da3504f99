"""Packed streams: read as they were packed, forward, and in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from collections.abc import Callable

import pytest

from lora_fs.sidecar.validate import packed
from lora_fs.sidecar.validate.packed import NeedsMemory, unpacked

PACKERS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACKERS)
def test_any_reads_give_the_bytes(kind: str) -> None:
    """Of any sizes, skipping forward; going back is refused where it would begin anew."""
    chance = random.Random(4711)
    data = chance.randbytes(300_000) + bytes(300_000)
    stream = unpacked(io.BytesIO(PACKERS[kind](data[:1234]) + PACKERS[kind](data[1234:])))
    assert stream is not None
    assert stream.readable()
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
    if kind != "gz":
        with pytest.raises(io.UnsupportedOperation):
            stream.seek(0)


def test_what_is_not_packed_is_told() -> None:
    """And so is what is packed otherwise; the file is where it was."""
    for data in (b"", b"adapter", b"(\xb5/\xfd zstd", lzma.compress(b"x", lzma.FORMAT_ALONE)):
        file = io.BytesIO(data)
        assert unpacked(file) is None
        assert file.read() == data


def test_memory_is_bounded() -> None:
    """By what the stream itself says that it needs, before any of it is taken."""
    stream = unpacked(io.BytesIO(lzma.compress(b"x", preset=8)))
    assert stream is not None
    assert stream.read() == b"x"
    stream = unpacked(io.BytesIO(lzma.compress(b"x", preset=9)))
    assert stream is not None
    with pytest.raises(NeedsMemory, match=f"{packed.XZ_BYTES >> 20} MiB"):
        stream.read()
