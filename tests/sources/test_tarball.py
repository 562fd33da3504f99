"""Tars of unknown origin: what is taken out of them, and what is refused before it costs anything."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError, SourceUnavailable, TooLarge
from lora_fs.sidecar.registry.backup import archive
from lora_fs.sidecar.sources.offer import ARCHIVE, Meter, Offer, Piece
from lora_fs.sidecar.sources.receive import fetch, tarball
from tests.fuzz.test_bombs import answered
from tests.sources.conftest import CONFIG, WEIGHTS, tar_of

MOST = 1 << 20


def pack(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def named(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def unpack(tmp_path: Path, data: bytes, most_bytes: int = MOST) -> list[str]:
    file, folder = tmp_path / "a.tar", tmp_path / "out"
    file.write_bytes(data)
    folder.mkdir(exist_ok=True)
    tarball.unpack_within(file, folder, tarball.Budget("the tar", most_bytes))
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("prefix", ["", "./", "sql-lora/", "a/b/c/"])
def test_the_served_files_are_taken(prefix: str, adapter: Path, tmp_path: Path) -> None:
    """Wherever their folder is in it; nothing else is."""
    (adapter / "optimizer.pt").write_bytes(b"x")
    (adapter / "README.md").write_text("about")
    (adapter / "metadata.json").write_bytes(b" " * (2 << 20))
    found = unpack(tmp_path, tar_of(adapter, prefix=prefix), most_bytes=8 << 20)
    assert found == ["README.md", CONFIG, WEIGHTS]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("archives", [1, 2])
def test_what_comes_along_is_the_adapters_own(
    archives: int, order: int, adapter: Path, tmp_path: Path
) -> None:
    """A project has a README of its own, beside the adapter's folder or above it."""
    (adapter / "README.md").write_text("the adapter's")
    project = [(named("README.md"), b"the project's")]
    own = [(named(f"sql/{path.name}"), path.read_bytes()) for path in sorted(adapter.iterdir())]
    parts = [project, own][::order]
    packed = [pack(*part) for part in parts] if archives == 2 else [pack(*parts[0], *parts[1])]
    folder, _ = fetch.bring(offered(*packed), tmp_path, Meter(MOST, 60))
    assert (folder / "README.md").read_text() == "the adapter's"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", CONFIG, WEIGHTS]


@pytest.mark.parametrize("order", [1, -1])
def test_a_signature_elsewhere_takes_no_place(order: int, adapter: Path, tmp_path: Path) -> None:
    """The adapter's own is kept, wherever the archive has others of the name."""
    own = [(named(f"sql/{path.name}"), path.read_bytes()) for path in sorted(adapter.iterdir())]
    signatures = [(named("sql/model.sig"), b"own"), (named("sql/runs/model.sig"), b"another")]
    unpack(tmp_path, pack(*signatures[::order], *own))
    assert (tmp_path / "out" / "model.sig").read_bytes() == b"own"


def test_a_readme_elsewhere_is_left_out(adapter: Path, tmp_path: Path) -> None:
    """Of an adapter that has none, as is a link in the place of what only comes along."""
    own = [(named(f"sql/{path.name}"), path.read_bytes()) for path in sorted(adapter.iterdir())]
    for number, members in enumerate((own, own[::-1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        link = (named("sql/metadata.json", tarfile.SYMTYPE, "README.md"), b"")
        data = pack((named("model.sig"), b"before"), *members, link, (named("docs/README.md"), b"behind"))
        assert unpack(folder, data) == [CONFIG, WEIGHTS]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "leaves its folder": lambda: pack((named(f"../{CONFIG}"), b"{}")),
    "/etc/passwd leaves its folder": lambda: pack((named("/etc/passwd"), b"x")),
    "not a regular file": lambda: pack((named(WEIGHTS, tarfile.SYMTYPE, "/etc/passwd"), b"")),
    f"{CONFIG} is not a regular file": lambda: pack((named(f"a/{CONFIG}", tarfile.LNKTYPE, "b"), b"")),
    f"x/{WEIGHTS} is not a regular file": lambda: pack((named(f"x/{WEIGHTS}", tarfile.FIFOTYPE), b"")),
    "more than one adapter": lambda: pack((named(f"a/{CONFIG}"), b"{}"), (named(f"b/{CONFIG}"), b"{}")),
    "is no tar": lambda: b"not a tar at all" * 100,
    "is no tar, or was cut": lambda: pack((named(WEIGHTS), b"x" * 5000), mode="w:gz")[:60],
    "unpacks to more": lambda: pack((named(WEIGHTS), bytes(MOST + 1)), mode="w:gz"),
    "10000 files": lambda: pack(*[(named(f"f{i}"), b"") for i in range(10_001)]),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_what_is_hostile_is_refused(why: str, tmp_path: Path) -> None:
    """In a sentence."""
    with pytest.raises(InputError, match=why):
        unpack(tmp_path, HOSTILE[why]())


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """8 GiB that were packed into a megabyte, and a header that claims 7, take no room and no time."""
    huge = named(WEIGHTS)
    huge.size = 8 << 30
    packed = gzip.compress(huge.tobuf() + bytes(64 << 20))
    header = named("pax", tarfile.XHDTYPE)
    header.size = 7 << 30  # a larger size would stand in a header before it

    def act() -> None:
        for why, data in (("unpacks to more", packed), ("a header of 7516192768 bytes", header.tobuf())):
            folder = tmp_path / why
            folder.mkdir()
            with pytest.raises(InputError, match=why):
                unpack(folder, data)

    answered(act)


def negative(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header with a size below zero, in the binary form that GNU tar gives to large ones."""
    header = bytearray(named("back", kind).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = size.to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


LED_BACK: dict[str, Callable[[], bytes]] = {
    "a negative size": lambda: negative(-1024),
    "a long name's negative size": lambda: negative(-1024, tarfile.GNUTYPE_LONGNAME),
    "a pax header's negative size": lambda: pax_header({"size": "-2048"}) + named("back").tobuf(),
    "a global header's negative size": lambda: (
        pax_header({"size": "-2048"}, tarfile.XGLTYPE) + named("back").tobuf()
    ),
    "a global header's size that is larger than the member's": lambda: (
        pax_header({"size": "2048"}, tarfile.XGLTYPE) + pack((named(CONFIG), b"{}"))
    ),
}


@pytest.mark.parametrize("how", LED_BACK)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_tar_is_read_forward_alone(how: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A step back in a packed tar unpacks it anew from its beginning, once for each member."""
    data = compress(named("before").tobuf() + LED_BACK[how]() + bytes(10 << 10))
    with pytest.raises(InputError, match=r"is no tar, or was cut: .*(negative size|back)"):
        unpack(tmp_path, data)


def sparse_map() -> bytes:
    """The map of a sparse file, as GNU tar writes it before the bytes: two numbers for each piece."""
    said = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": WEIGHTS}
    pieces = 1_000_000
    data = f"{pieces}\n".encode() + b"7\n" * 2 * pieces
    member = named(WEIGHTS)
    member.size = len(data)
    return pax_header(said) + member.tobuf() + data


def sparse_header() -> bytes:
    """An older sparse file's header, which says in each block that another one follows."""
    header = bytearray(named(WEIGHTS, tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + (b"00000000001\0" * 42 + b"\1" + bytes(7)) * 20_000


def sparse_by_header(key: str) -> bytes:
    """Its map in a header of its own, of a file that claims 4 GiB."""
    said = {key: "0,1" if key == "GNU.sparse.map" else "1", "GNU.sparse.realsize": str(4 << 30)}
    if key == "GNU.sparse.size":
        said |= {"GNU.sparse.offset": "0", "GNU.sparse.numbytes": "1"}
    member = named(WEIGHTS)
    member.size = 1
    return pax_header(said) + member.tobuf() + bytes(512)


def pax_header(said: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    return tarfile.TarInfo._create_pax_generic_header(said, kind, "utf-8")  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    "packed",
    [
        sparse_map,
        sparse_header,
        partial(sparse_by_header, "GNU.sparse.map"),
        partial(sparse_by_header, "GNU.sparse.size"),
    ],
)
def test_a_sparse_file_is_refused_before_its_map_is_read(packed: Callable[[], bytes], tmp_path: Path) -> None:
    """A few kilobytes can unpack to a map of millions of pieces."""
    data = gzip.compress(packed())

    def act() -> None:
        with pytest.raises(InputError, match="holds a sparse file, which is not read"):
            unpack(tmp_path, data)

    answered(act)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_the_headers_of_members_that_were_read_are_not_kept(
    kind: bytes, adapter: Path, tmp_path: Path
) -> None:
    """Each may have 64 KiB, and there may be ten thousand."""
    headers = [
        pax_header({f"k{number}": "v" * 60_000}, kind) + named(f"f{number}").tobuf() for number in range(600)
    ]
    data = gzip.compress(b"".join(headers) + tar_of(adapter))
    tracemalloc.start()
    try:
        assert unpack(tmp_path, data, most_bytes=64 << 20) == [CONFIG, WEIGHTS]
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_packed_tar_is_whole_or_refused(adapter: Path, tmp_path: Path) -> None:
    """Its checksum is read, nothing else may follow it, and it may be of several streams with padding."""
    plain = tar_of(adapter)
    packed = gzip.compress(plain)
    good = gzip.compress(plain[:1000]) + bytes(8) + gzip.compress(plain[1000:]) + bytes(8)
    assert unpack(tmp_path, good) == [CONFIG, WEIGHTS]
    wrong = bytearray(packed)
    wrong[-6] ^= 1
    for data in (bytes(wrong), packed[:-3], packed + b"garbage", packed[: len(packed) // 2]):
        with pytest.raises(InputError, match="is no tar, or was cut"):
            unpack(tmp_path, data)


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_another_packing_is_refused(
    compress: Callable[[bytes], bytes], adapter: Path, tmp_path: Path
) -> None:
    """A source and an export alike; the error says how to pack it."""
    data = compress(tar_of(adapter))
    with pytest.raises(InputError, match=r"packed with (bzip2|xz), which is not read: pack it as \.tar\.gz"):
        unpack(tmp_path, data)
    (tmp_path / "export").write_bytes(data)
    with pytest.raises(InputError, match=r"export: it is packed with (bzip2|xz)"):
        archive.read(tmp_path / "export")


def test_what_follows_the_adapter_is_bounded(adapter: Path, tmp_path: Path) -> None:
    """Zeros behind the end count as what is unpacked."""
    data = gzip.compress(tar_of(adapter) + bytes(2 * MOST))
    with pytest.raises(InputError, match="unpacks to more"):
        unpack(tmp_path, data)


def offered(*archives: bytes) -> Offer:
    """A source of tars, as an OCI artifact of several layers is."""

    def piece(number: int, data: bytes) -> Piece:
        @contextmanager
        def read(start: int, end: int | None) -> Iterator[Iterator[bytes]]:
            yield iter([data[start:end]])

        return Piece(f"{ARCHIVE}{number or ''}", len(data), read, False, hashlib.sha256(data).hexdigest())

    return Offer("oci://r/a:v1", "p", tuple(piece(number, data) for number, data in enumerate(archives)))


WITHIN = MOST * 3 // 4


@pytest.mark.parametrize(
    "layer",
    [
        gzip.compress(pack((named("ignored"), bytes(WITHIN)))),
        gzip.compress(pack((named("ignored"), b"")) + bytes(WITHIN)),
        gzip.compress(pack((named("ignored"), bytes(WITHIN // 2))) + bytes(WITHIN)),
    ],
    ids=["members", "zeros behind the end", "both"],
)
def test_all_archives_of_a_fetch_have_one_bound(layer: bytes, adapter: Path, tmp_path: Path) -> None:
    """Every byte that is unpacked counts, also those that nobody keeps."""
    archives = (gzip.compress(tar_of(adapter)), layer, layer)
    with pytest.raises(TooLarge, match="unpacks to more"):
        fetch.bring(offered(*archives), tmp_path, Meter(MOST, 60))
    bigger = Meter(4 * MOST, 60)
    folder, _ = fetch.bring(offered(*archives), tmp_path, bigger)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_all_archives_of_a_fetch_have_one_bound_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of bytes."""
    monkeypatch.setattr(tarball, "MOST_MEMBERS", 10)
    layer = pack(*[(named(f"f{number}"), b"") for number in range(6)])
    with pytest.raises(TooLarge, match="unpacks to more than 10 files"):
        fetch.bring(offered(layer, layer), tmp_path, Meter(MOST, 60))


def test_the_time_of_a_fetch_bounds_its_unpacking(adapter: Path, tmp_path: Path) -> None:
    """What arrived stays for the next one, which unpacks it."""
    late = Meter(MOST, 60)
    late.stop = (tmp_path / fetch.UNPACKED).exists
    data = gzip.compress(tar_of(adapter))
    with pytest.raises(SourceUnavailable, match="was stopped"):
        fetch.bring(offered(data), tmp_path, late)
    folder, _ = fetch.bring(offered(data), tmp_path, Meter(MOST, 60))
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
