"""gzip files are read as streams; other packings are refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
import zlib
from pathlib import Path

import pytest

from lora_fs.sidecar.validate.packed import NotTar, OtherPacking, finish, tar, unpacked


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


def one_member(size: int) -> bytes:
    member = tarfile.TarInfo("f")
    member.size = size
    return member.tobuf() + bytes(size) + bytes(10 << 10)


@pytest.mark.parametrize("packs", [True, False])
def test_what_is_passed_is_counted(packs: bool, tmp_path: Path) -> None:
    """Read or skipped, and up to the end of a packed one."""
    data, counted = one_member(1 << 20), [0]
    (tmp_path / "a").write_bytes(gzip.compress(data) if packs else data)
    with tar(tmp_path / "a", counted.append) as archive:
        assert [member.name for member in archive] == ["f"]
        assert (1 << 20) + 512 <= sum(counted) <= len(data)
        finish(archive)
    assert (sum(counted) == len(data)) is packs


def test_what_unpacks_to_nothing_is_asked_about(tmp_path: Path) -> None:
    """A gzip file of many empty streams, or zeros between them, is one read that takes long."""

    class Stopped(Exception):
        pass

    def passed(size_bytes: int) -> None:
        asked.append(size_bytes)
        if len(asked) > 3:
            raise Stopped

    for nothing in (gzip.compress(b"") * 100_000, gzip.compress(b"") + bytes(1 << 20)):
        asked: list[int] = []
        (tmp_path / "a").write_bytes(nothing + gzip.compress(one_member(0)))
        with pytest.raises(Stopped), tar(tmp_path / "a", passed):
            pass
        assert sum(asked) == 0


def test_a_step_back_is_refused(tmp_path: Path) -> None:
    """It would unpack all again."""
    (tmp_path / "a").write_bytes(gzip.compress(one_member(0)))

    def go_back() -> None:
        with tar(tmp_path / "a") as archive:
            archive.fileobj.seek(0)

    with pytest.raises(NotTar, match="a step back from byte 512 to 0"):
        go_back()
