"""Downloaded once per volume, whoever asks: kill -9 in the middle, two at once, plugins, and claims."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import fetch_cache, ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.sources import known
from lora_fs.sidecar.sources.offer import Meter, Offer, Options, Piece
from lora_fs.sidecar.sources.receive import transfer
from lora_fs.sidecar.sources.receive.fetch import bring
from lora_fs.sidecar.sources.uri import Uri, parse
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import Clock, write_adapter
from tests.sources.conftest import CONFIG, WEIGHTS, Command, LoraFs, WebServer, left_in, tar_of
from tests.sources.test_web import record


def test_a_killed_download_is_gone_on_from(lora_fs: LoraFs, web: WebServer, large: Path, root: Path) -> None:
    """kill -9 in the middle: the next command asks for the rest alone, and the bytes are the server's."""
    data = tar_of(large)
    url = web.put("/large.tar", data, stall=4_000_000)
    first = Command("register", "large", url)

    def noted() -> int:
        """How much of it has arrived by the notes; 0 before there are any."""
        notes = root.glob("default/tiny/.incoming/fetch-*/.archive.*.part.json")
        return sum(end for note in notes for _, end in json.loads(note.read_text())["arrived"][:1])

    deadline = time.monotonic() + 60
    while not (arrived := noted()) and time.monotonic() < deadline:
        assert first.process.poll() is None, first.end()
        time.sleep(0.02)
    first.kill()
    assert 0 < arrived < len(data)
    assert lora_fs("list", "-o", "json").json == []
    web.odd["/large.tar"].stall, web.asked = None, []
    web.go.set()
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
        (folder / f"x.{'0' * 16}.part").write_bytes(b"wrong" * 100)
        (folder / f"x.{'0' * 16}.part.json").write_text(notes)
        piece = Piece("x", len(data), read)
        transfer.fetch(piece, folder / "x", folder, "test://", _meter())
        assert (folder / "x").read_bytes() == data
        assert [entry.name for entry in folder.iterdir()] == ["x"]


@pytest.mark.parametrize("ranged", [True, False])
def test_a_fetch_that_wakes_changes_nothing(ranged: bool, tmp_path: Path) -> None:
    """The later fetch takes over what arrived; the earlier one ends, and no byte is another's."""
    data, half = random.Random(1).randbytes(1 << 20), 1 << 19
    stands_still, wakes = threading.Event(), threading.Event()

    def stalling(start: int, _: int | None) -> Any:
        def chunks() -> Iterator[bytes]:
            yield data[start:half]
            stands_still.set()
            assert wakes.wait(60)
            yield data[half:]

        return nullcontext(chunks())

    asked = list[int]()

    def rest(start: int, end: int | None) -> Any:
        asked.append(start)
        return nullcontext(iter([data[start:end]]))

    with ThreadPoolExecutor() as pool:
        first = pool.submit(_fetch, Piece("x", len(data), stalling, ranged=ranged), tmp_path)
        assert stands_still.wait(60)
        if ranged:
            await_path(tmp_path, "x.*.part.json")
        _fetch(Piece("x", len(data), rest, ranged=ranged), tmp_path)
        assert (tmp_path / "x").read_bytes() == data
        wakes.set()
        with pytest.raises(VolumeUnavailable, match="took this fetch over"):
            first.result(60)
    assert asked == [half if ranged else 0]
    assert (tmp_path / "x").read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def await_path(folder: Path, pattern: str) -> None:
    """Until the fetch has written its note, once a second."""
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)


def _fetch(piece: Piece, folder: Path) -> None:
    transfer.fetch(piece, folder / "x", folder, "test://", _meter())


def test_a_folder_that_goes_meanwhile_is_told(tmp_path: Path) -> None:
    """Another process that registers what it fetched moves the folder away."""

    def read(start: int, end: int | None) -> Any:
        shutil.rmtree(tmp_path / "fetch")
        return nullcontext(iter([b"{}"[start:end]]))

    (tmp_path / "fetch").mkdir()
    offer = Offer("test://x", "v1", (Piece(CONFIG, 2, read),))
    with pytest.raises(VolumeUnavailable, match="is gone: another process took this fetch over"):
        bring(offer, tmp_path / "fetch", _meter())


def test_what_is_not_what_arrived_is_not_registered(registry: Registry, scope: Scope, tmp_path: Path) -> None:
    """The hash of what the source sent decides, also where the files that lie there are an adapter."""
    source = write_adapter(tmp_path / "sql")
    arrived = {WEIGHTS: hashlib.sha256((source / WEIGHTS).read_bytes()).hexdigest()}
    wanted = Registration("sql", source, "test://sql", hashes=arrived)
    assert ingest.register(registry, scope, wanted, Expectation(), writer="test").changed
    wanted = replace(wanted, name="other", hashes={WEIGHTS: "0" * 64})
    with pytest.raises(VolumeUnavailable, match=f"{WEIGHTS} changed after it arrived"):
        ingest.register(registry, scope, wanted, Expectation(), writer="test")
    assert not list(registry.layout.root.glob("default/*/*/other*"))


def _meter() -> Meter:
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


@pytest.mark.parametrize("other", ["?id=2", "me@"])
def test_what_is_not_shown_of_a_url_tells_it_apart(
    other: str, lora_fs: LoraFs, web: WebServer, adapter: Path
) -> None:
    """Two of one path, size and etag are two sources; the record has a hash of the query and the user."""
    url = web.put("/sql.tar", tar_of(adapter), etag='"x"')
    assert lora_fs("register", "sql", url).code == 0
    data = tar_of(write_adapter(adapter.parent / "another", seed=2))
    web.put("/sql.tar?id=2" if "?" in other else "/sql.tar", data, etag='"x"')
    second = url + other if "?" in other else url.replace("//", f"//{other}")
    for name in ("two", "three"):
        assert lora_fs("register", name, second).code == 0
    digests = [record(lora_fs, name)["digest"] for name in ("sql", "two", "three")]
    assert digests[0] != digests[1] == digests[2]
    assert len([part for _, part, _ in web.asked if part != "bytes=0-0"]) == 2
    told = record(lora_fs, "two")["source"]
    assert isinstance(told, dict)
    assert told == {"uri": url, "pin": f'"x" url:{parse(second).identity}'}


def test_what_pins_the_bytes_pins_them_under_any_query(
    lora_fs: LoraFs, web: WebServer, adapter: Path
) -> None:
    """A hash does, an etag does not; and a query that is signed anew is no other one."""
    data = tar_of(adapter)
    url, sha256 = web.put("/sql.tar", data), hashlib.sha256(data).hexdigest()
    for number in range(2):
        assert lora_fs("register", f"hash-{number}", f"{url}?id={number}#sha256={sha256}").code == 0
        signed = f"{url}?X-Amz-Date={number}&X-Amz-Signature=hush{number}"
        assert lora_fs("register", f"signed-{number}", signed).code == 0
        assert lora_fs("register", f"etag-{number}", f"{url}?id={number}").code == 0
    fetched = [path for path, part, _ in web.asked if part != "bytes=0-0"]
    asked = ["id=0", "X-Amz-Date=0&X-Amz-Signature=hush0", "id=0", "id=1"]
    assert fetched == [f"/sql.tar?{query}" for query in asked]


def _shorten(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-8])


def _rot(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)


@pytest.mark.parametrize("damage", [_shorten, _rot, Path.unlink])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_damaged_copy_is_no_source(
    damage: Callable[[Path], None], hashed: bool, lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path
) -> None:
    """It is fetched again, registered as what was meant, and the copy is mended."""
    data = tar_of(adapter)
    url = web.put("/sql.tar", data) + (f"#sha256={hashlib.sha256(data).hexdigest()}" if hashed else "")
    assert lora_fs("register", "sql", url).code == 0
    placed = root / "default/tiny/v1/sql" / WEIGHTS
    damage(placed)
    ran = lora_fs("register", "two", url)
    assert ran.code == 0, ran.err
    assert record(lora_fs, "two")["digest"] == record(lora_fs)["digest"]
    assert placed.read_bytes() == (adapter / WEIGHTS).read_bytes()
    assert len(web.bodies("/sql.tar")) == 2
    placed = root / "default/tiny/v1/two" / WEIGHTS
    damage(placed)
    ran = lora_fs("register", "two", url)
    assert (ran.code, "restored lost files of two@v1" in ran.out) == (0, True), ran.out + ran.err
    assert placed.read_bytes() == (adapter / WEIGHTS).read_bytes()
    assert (lora_fs("fsck").code, left_in(root)) == (0, [])


@pytest.mark.parametrize("name", ["sql", "two"])
def test_a_link_that_was_planted_is_not_written_through(
    name: str, lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path, tmp_path: Path
) -> None:
    """Neither one beside a lost file, nor one in the adapter's place; another name is registered."""
    url = web.put("/sql.tar", tar_of(adapter))
    assert lora_fs("register", "sql", url).code == 0
    placed, host = root / "default/tiny/v1/sql", tmp_path / "host"
    host.write_text("precious")
    (placed / CONFIG).unlink()
    (placed / f".tmp-{CONFIG}").symlink_to(host)
    assert lora_fs("register", name, url).code == 0
    assert (host.read_text(), (placed / CONFIG).is_symlink()) == ("precious", False)
    other = write_adapter(tmp_path / "other", seed=9, rank=8)
    before = (other / WEIGHTS).read_bytes()
    shutil.rmtree(placed)
    placed.symlink_to(other)
    ran = lora_fs("register", name, url)
    assert (ran.code, "is a symlink" in ran.err) == ((4, True) if name == "sql" else (0, False)), ran.err
    assert (other / WEIGHTS).read_bytes() == before


def test_waiting_is_bounded(
    lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for another one that never ends is told what to look at."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "60")
    clock, asked, real = Clock(), list[float](), leases.lease

    @contextmanager
    def waited(path: Path, *, wait_s: float) -> Iterator[leases.Turn]:
        """The waits alone take time."""
        asked.append(clock())
        clock.sleep(wait_s)
        with real(path, wait_s=0) as had:
            yield had

    url = web.put("/sql.tar", tar_of(adapter), etag='"x"')
    lora_fs("register", "other", str(adapter))
    key = hashlib.sha256(f'{url}\n"x"'.encode()).hexdigest()[:32]
    with leases.lease(root / f".leases/fetch-{key}.lock", wait_s=5) as had:
        assert had
        monkeypatch.setattr(fetch_cache, "lease", waited)
        monkeypatch.setattr(fetch_cache, "time", SimpleNamespace(monotonic=clock))
        ran = lora_fs("register", "sql", url)
    assert ran.code == 6, ran.err
    assert f"another process has been fetching {url} for 60 s" in ran.err
    assert asked[0] == 0
    assert asked[-1] == pytest.approx(60, abs=fetch_cache.ASK_AGAIN_S)


def test_a_volume_that_takes_no_lockfile_is_fetched_to(
    lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else fetches it, so nobody is waited for."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "2")
    assert lora_fs("register", "other", str(adapter)).code == 0
    shutil.rmtree(root / ".leases")
    (root / ".leases").touch()
    ran = lora_fs("register", "sql", web.put("/sql.tar", tar_of(adapter)))
    assert ran.code == 0, ran.err
    assert left_in(root) == []


class Slow:
    """A source that a package adds."""

    def __init__(self, uri: Uri, options: Options) -> None:
        options.check(uri)
        self.uri, self.closed = uri, False

    def look(self) -> Offer:
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
    links = tmp_path / "links"
    links.mkdir()
    for path in adapter.iterdir():
        (links / path.name).symlink_to(path)
    ran = lora_fs("register", "no", f"mine:{links}", *plugin)
    assert (ran.code, f"{CONFIG} is a symlink, which is not followed" in ran.err) == (2, True), ran.err
    ran = lora_fs("register", "no", "x", "--lora-downloader-plugin", "my_org_lora.Nothing")
    assert (ran.code, "cannot be made" in ran.err) == (2, True), ran.err


def test_a_claim_is_registered_from(lora_fs: LoraFs, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pvc://`` is the folder where the claim is mounted."""
    monkeypatch.setenv("LORA_FS_PVC_MOUNTS", f"team={adapter.parent}")
    ran = lora_fs("register", "sql", "pvc://team/sql-lora")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"] == {"uri": adapter.as_uri(), "pin": None}
