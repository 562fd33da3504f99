"""Downloaded once per volume, whoever asks: kill -9 in the middle, two at once, plugins, and claims."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.registry import lock
from lora_fs.sidecar.sources import known, transfer
from lora_fs.sidecar.sources.offer import Offer, Options, Piece
from lora_fs.sidecar.sources.uri import Uri
from tests.sources.conftest import CONFIG, WEIGHTS, Command, LoraFs, WebServer, left_in, tar_of
from tests.sources.test_web import record


def test_a_killed_download_is_gone_on_from(lora_fs: LoraFs, web: WebServer, large: Path, root: Path) -> None:
    """kill -9 in the middle: the next command asks for the rest alone, and the bytes are the server's."""
    data = tar_of(large)
    url = web.put("/large.tar", data, pace=0.02)
    first = Command("register", "large", url)
    notes = "default/tiny/.incoming/fetch-*/.archive.part.json"
    deadline = time.monotonic() + 60
    while not list(root.glob(notes)) and time.monotonic() < deadline:
        assert first.process.poll() is None, first.end()
        time.sleep(0.02)
    (noted,) = root.glob(notes)
    arrived = json.loads(noted.read_text())["arrived"][0][1]
    first.kill()
    assert 0 < arrived < len(data)
    assert lora_fs("list", "-o", "json").json == []
    web.odd["/large.tar"].pace, web.asked = 0.0, []
    ran = lora_fs("register", "large", url)
    assert ran.code == 0, ran.err
    (asked,) = web.bodies("/large.tar")
    assert asked is not None
    assert int(asked.removeprefix("bytes=").partition("-")[0]) >= arrived
    placed = root / "default/tiny/v1/large"
    assert (placed / WEIGHTS).read_bytes() == (large / WEIGHTS).read_bytes()
    assert left_in(root) == []


def test_two_at_once_download_once(lora_fs: LoraFs, web: WebServer, large: Path, root: Path) -> None:
    """The one that waited says so, and takes the files from the volume."""
    data = tar_of(large)
    url = web.put("/large.tar", data, stall=1_000_000)
    first = Command("register", "one", url)
    assert web.began.wait(60)
    second = Command("register", "two", url)
    assert second.process.stderr is not None
    assert "another process fetches it" in second.process.stderr.readline()
    web.odd["/large.tar"].stall = None
    web.go.set()
    for ended in (first.end(), second.end()):
        assert ended[0] == 0, ended[2]
    assert web.bodies("/large.tar") == [None, f"bytes=1000000-{len(data) - 1}"]
    assert record(lora_fs, "one")["digest"] == record(lora_fs, "two")["digest"]
    assert left_in(root) == []


def test_what_was_noted_and_is_not_there_is_not_relied_on(tmp_path: Path) -> None:
    """Notes that lie about the file, or that a crash tore, begin it anew; the bytes are right each time."""
    data = bytes(range(256)) * 4096

    def read(start: int, end: int | None) -> Any:
        from contextlib import nullcontext

        return nullcontext(iter([data[start:end]]))

    for number, notes in enumerate(
        (
            '{"size_bytes": 1048576, "arrived": [[0, 1048577]]}',
            '{"size_bytes": 1048576, "arrived": [[0, 10], [5, 20]]}',
            '{"size_bytes": 99, "arrived": [[0, 10]]}',
            '{"size_bytes": 1048576, "arr',
            "[]",
            "",
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "x.part").write_bytes(b"wrong" * 100)
        (folder / "x.part.json").write_text(notes)
        piece = Piece("x", len(data), read)
        transfer.fetch(piece, folder / "x", folder, "test://", _meter())
        assert (folder / "x").read_bytes() == data


def _meter() -> Any:
    from lora_fs.sidecar.sources.offer import Meter

    return Meter(1 << 30, 30.0)


def test_a_hint_is_a_hint(lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path) -> None:
    """One that is damaged, or names what was withdrawn, is passed over: it is fetched again."""
    url = web.put("/sql.tar", tar_of(adapter))
    assert lora_fs("register", "sql", url).code == 0
    (hint,) = (root / ".leases").glob("fetch-*.json")
    hint.write_text("{")
    assert lora_fs("register", "two", url).code == 0
    assert len(web.bodies("/sql.tar")) == 2
    assert lora_fs("unregister", "two").code == 0
    assert lora_fs("register", "three", url).code == 0
    assert len(web.bodies("/sql.tar")) == 3


def test_waiting_is_bounded(
    lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for another one that never ends is told what to look at."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "0.6")
    url = web.put("/sql.tar", tar_of(adapter), etag='"x"')
    lora_fs("register", "other", str(adapter))
    import hashlib

    key = hashlib.sha256(f'{url}\n"x"'.encode()).hexdigest()[:32]
    with lock.lease(root / f".leases/fetch-{key}.lock", wait_s=5) as had:
        assert had
        ended = Command("register", "sql", url).end()
    assert ended[0] in (1, 6), ended[2]
    assert "another process" in ended[2]


class Slow:
    """A source that a package adds."""

    def __init__(self, uri: Uri, options: Options) -> None:
        options.check(uri)
        self.uri, self.closed = uri, False

    def look(self) -> Offer:
        from contextlib import nullcontext

        folder = Path("/" + "/".join(self.uri.path))
        pieces = []
        for name in (CONFIG, WEIGHTS):
            data = (folder / name).read_bytes()
            pieces.append(
                Piece(name, len(data), lambda a, b, data=data: nullcontext(iter([data[a:b]])))  # type: ignore[misc]
            )
        return Offer(str(self.uri), "v1", tuple(pieces))

    def close(self) -> None:
        self.closed = True


def test_a_package_adds_a_scheme(lora_fs: LoraFs, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entry-point group ``lora_fs.sources``; what is not known is told with what is."""
    from importlib import metadata
    from importlib.metadata import EntryPoint, EntryPoints

    point = EntryPoint("vault", f"{__name__}:Slow", known.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: Slow)
    monkeypatch.setattr(metadata, "entry_points", lambda group: EntryPoints([point]))
    ran = lora_fs("register", "sql", f"vault://here{adapter}")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"] == {"uri": f"vault://here{adapter}", "pin": "v1"}
    ran = lora_fs("register", "sql", "ftp://host/a")
    assert (ran.code, "vault://" in ran.err) == (2, True), ran.err


class Model:
    def __init__(self, path: Path) -> None:
        self.local_path = str(path)


class Downloader:
    """In Dynamo's shape."""

    deleted: list[str]

    def download_lora_to_disk(self, name: str) -> Model:
        return Model(Path(name.removeprefix("mine:")))

    def delete_lora_from_disk(self, name: str) -> None:
        type(self).deleted = [name]


def test_a_downloader_of_ones_own(
    lora_fs: LoraFs, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for the name, the adapter is copied, and it is asked to delete what it downloaded."""
    import sys
    from types import ModuleType

    module = ModuleType("my_org_lora")
    module.Downloader = Downloader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_org_lora", module)
    plugin = ("--lora-downloader-plugin", "my_org_lora.Downloader")
    ran = lora_fs("register", "sql", f"mine:{adapter}", *plugin)
    assert ran.code == 0, ran.err
    assert Downloader.deleted == [f"mine:{adapter}"]
    ran = lora_fs("register", "no", f"mine:{tmp_path / 'none'}", *plugin)
    assert (ran.code, "Downloader did not download" in ran.err) == (1, True), ran.err
    ran = lora_fs("register", "no", "x", "--lora-downloader-plugin", "my_org_lora.Nothing")
    assert (ran.code, "cannot be made" in ran.err) == (2, True), ran.err


def test_a_claim_is_registered_from(lora_fs: LoraFs, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pvc://`` is the folder where the claim is mounted."""
    monkeypatch.setenv("LORA_FS_PVC_MOUNTS", f"team={adapter.parent}")
    ran = lora_fs("register", "sql", "pvc://team/sql-lora")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"] == {"uri": adapter.as_uri(), "pin": None}
