"""Folders that somebody with write access made to hurt: refused in time, and nothing else is disturbed."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import CorruptRecord, InvalidAdapter, InvalidName, LoraFsError
from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.reconcile.assembly import locator
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.registry.drops import adopt
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.lifecycle import artifacts, copying, ingest
from lora_fs.sidecar.registry.lifecycle.artifacts import MAX_CARRIED_BYTES, MAX_ENTRIES
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.sources.allowed import Allowed
from lora_fs.sidecar.validate import Expectation, looks_preallocated
from tests.registry.conftest import Clock, write_adapter

SCOPE = Scope("default", "tiny")
SETTLE_S = 2.0
WEIGHTS = "adapter_model.safetensors"
IN_ACCESS, IN_OPEN = 0x1, 0x20
EVENT = struct.Struct("iIII")  # of inotify: the watch, what happened, a cookie, how long the name after it is


class Site:
    """A registry, a view and an adopter, with a good folder beside whatever is dropped."""

    def __init__(self, root: Path) -> None:
        self.registry, self.clock = Registry(root / "volume", create=True), Clock()
        self.view = RegistryView(self.registry, (SCOPE,))
        self.adopter = Adopter(self.registry, Expectation(), settle_s=SETTLE_S, writer="t", clock=self.clock)
        self.good = write_adapter(self.at("good"), seed=7)
        self.locate: Callable[[Record], Path] = lambda record: self.registry.layout.resolve(record.spec.path)

    def at(self, name: str) -> Path:
        return self.registry.layout.revision(SCOPE, "v1") / name

    def settle(self) -> set[str]:
        """Look, let everything settle and look again; the names that are served."""
        for seconds in (0.0, SETTLE_S + adopt.FULL_LOOK_S):
            self.clock.now += seconds
            self.view.refresh(force=True)
            self.adopter.step(self.view.desired)
        self.view.refresh(force=True)
        return {name for _, name, _ in self.view.desired.active()}

    def settled(self) -> Record:
        """Let everything settle; the good folder's record."""
        self.settle()
        return self.view.desired.records[AdapterKey(*SCOPE, "v1", "good")]

    def refusal(self, name: str) -> str:
        return self.adopter.refusals().get(AdapterKey(*SCOPE, "v1", name), "")

    def register(self, name: str, source: Path) -> Record:
        wanted = Registration(name, source, source.as_uri())
        return ingest.register(self.registry, SCOPE, wanted, Expectation(), writer="t").record

    def stager(self, folder: Path) -> Stager:
        stager = Stager(
            folder,
            self.locate,
            Expectation(),
            max_bytes=1 << 30,
            timeout_s=60,
        )
        stager.prepare()
        return stager


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_hundred_thousand_files_are_not_looked_at(site: Site) -> None:
    """A folder that holds them is refused after the first thousand; its neighbour is adopted."""
    crowd = write_adapter(site.at("crowd"))
    for number in range(100_000):
        os.close(os.open(crowd / f"{number}", os.O_CREAT | os.O_WRONLY))
    began = time.process_time()
    assert site.settle() == {"good"}
    assert time.process_time() - began < 2
    assert site.refusal("crowd").startswith("TooManyFiles")


def test_as_many_files_as_any_adapter_has(site: Site) -> None:
    """Up to the bound a folder is adopted; emptied, one that was refused is."""
    crowd = write_adapter(site.at("crowd"))
    for number in range(MAX_ENTRIES - 1):
        (crowd / f"log-{number}").touch()
    assert site.settle() == {"good"}
    (crowd / "log-0").unlink()
    assert site.settle() == {"good", "crowd"}


def test_a_folder_that_grows_while_it_is_read(site: Site) -> None:
    """Files that come and go during each look delay its adoption and are no trouble for others."""
    busy = write_adapter(site.at("busy"))
    with churn(lambda number: _come_and_go(busy / f"part-{number % 50}")):
        for _ in range(20):
            assert "good" in site.settle()
            assert artifacts.look(busy) is not None


def test_a_file_that_is_removed_during_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was there all the time, and is not taken for gone, which would withdraw it."""
    folder = write_adapter(tmp_path / "adapter")
    (folder / "log").touch()
    listed = os.scandir

    @contextmanager
    def then_remove(handle: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with listed(handle) as entries:
            found = list(entries)
        (folder / "log").unlink()
        yield iter(found)

    monkeypatch.setattr(os, "scandir", then_remove)
    sight = artifacts.look(folder)
    assert sight is not None
    assert sight.names >= {"adapter_config.json", WEIGHTS}


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "loop"])
def test_what_lies_beside_the_files(site: Site, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never served may be anything: nothing is opened, and the adapter is."""
    odd = write_adapter(site.at("odd"))
    for name in ("metadata.json", "README.md", "x"):
        make_odd(odd, name, kind, monkeypatch)
    assert site.settle() == {"good", "odd"}
    record = site.view.desired.records[AdapterKey(*SCOPE, "v1", "odd")]
    copied = artifacts.copy_files(odd, site.good.parents[3] / "copy", [f.path for f in record.spec.files])
    assert copied == record.spec.files


def make_odd(folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "socket":
        monkeypatch.chdir(folder)  # a socket's path may have 107 characters
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).symlink_to(name)


def test_a_huge_readme_stays_where_it_is(site: Site, tmp_path: Path) -> None:
    """What is carried along with a copy has a bound: 1 TB that was never written filled the disk."""
    source = write_adapter(tmp_path / "source")
    for name, size in (("README.md", 1 << 40), ("metadata.json", MAX_CARRIED_BYTES)):
        (source / name).touch()
        os.truncate(source / name, size)
    site.register("a1", source)
    there = {path.name for path in site.at("a1").iterdir()}
    assert there == {"adapter_config.json", WEIGHTS, "metadata.json"}


# -- names ---------------------------------------------------------------------------------------

BAD_NAMES = [
    "../x",
    "a/../../x",
    "/etc",
    "a\0b",
    "..",
    ".",
    "",
    "a" * 129,
    "caf\u00e9",
    "cafe\u0301",
    "\uff41",
    "\u202egpj",
    "a b",
    "-a",
    "a\n",
    "\ud800",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_are_refused(site: Site, name: str) -> None:
    """In a name there is nothing but ASCII letters, digits and three signs: no path, no second spelling."""
    with pytest.raises(InvalidName) as told:
        site.register(name, site.good)
    assert str(told.value).isprintable()
    with pytest.raises(InvalidName):
        AdapterKey.checked("default", "tiny", name, "a1")


@pytest.mark.parametrize("name", ["caf\u00e9", "cafe\u0301", "a" * 129, "a b", "e\udce9", "-a", "~a", "a\n"])
def test_folders_whose_names_are_none(site: Site, name: str) -> None:
    """NFC and NFD, too long, no text at all: passed over, as files of other names are."""
    write_adapter(site.at(os.fsdecode(os.fsencode(name))))
    assert site.settle() == {"good"}


def test_names_that_differ_by_case(site: Site) -> None:
    """They are two adapters where the filesystem tells them apart, and each serves its own bytes."""
    write_adapter(site.at("Good"), seed=8)
    if site.good.samefile(site.at("Good")):
        pytest.skip("this filesystem knows no case")
    assert site.settle() == {"good", "Good"}
    digests = {record.spec.digest for record in site.view.desired.records.values()}
    assert len(digests) == 2


def test_another_name_s_record_where_case_is_not_told_apart(site: Site) -> None:
    """There ``Good`` finds the file of ``good`` under its own name: it is not believed, and not replaced."""
    site.settle()
    series = site.registry.records(AdapterKey(*SCOPE, "v1", "Good"))
    taken = site.registry.layout.revision(SCOPE, "v1") / "good.@00000001.json"
    (taken.parent / "Good.@00000001.json").write_bytes(taken.read_bytes())
    with pytest.raises(CorruptRecord, match="good"):
        site.registry.read(series, site.registry.generations(series)[0])
    site.view.refresh(force=True)
    assert {name for _, name, _ in site.view.desired.active()} == {"good"}


@pytest.mark.parametrize("path", ["../../../evil", "/etc/passwd", "a/b", "..", "", "a\0", "x" * 300])
def test_a_record_whose_files_lie_elsewhere(site: Site, path: str) -> None:
    """Whoever can write a record could have had a file written anywhere that a replica may write."""
    record = site.register("a1", site.good)
    body = record.model_dump(mode="json")
    body["spec"]["files"][0]["path"] = path
    with pytest.raises(CorruptRecord, match="path"):
        decode(Record, seal(body))


# -- races ---------------------------------------------------------------------------------------


@contextmanager
def churn(act: Callable[[int], None]) -> Iterator[None]:
    """Do something again and again in another thread while the block runs; its errors are raised."""
    over, failures = threading.Event(), []

    def run() -> None:
        number = 0
        while not over.is_set():
            try:
                act(number)
            except OSError as error:
                failures.append(error)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures, failures[0]


def _come_and_go(path: Path) -> None:
    path.write_bytes(b"x")
    path.unlink()


def swapper(folder: Path, other: Path) -> Callable[[int], None]:
    """Put a link to ``other`` in the place of ``folder``, and the folder back, each in one step."""
    aside, link = folder.with_name(".aside"), folder.with_name(".link")

    def swap(number: int) -> None:
        folder.rename(aside)
        link.symlink_to(other)
        link.rename(folder)
        folder.unlink()
        aside.rename(folder)

    return swap


def test_a_folder_swapped_for_a_link_after_it_was_looked_at(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read through the link is not recorded; put back, the folder is adopted as what it is."""
    secret, mine = write_adapter(tmp_path / "secret", seed=99), write_adapter(site.at("mine"), seed=1)

    def swap_first(folder: Path, folder_fd: int) -> bool:
        if folder == mine and not mine.is_symlink():
            mine.rename(tmp_path / "aside")
            mine.symlink_to(secret)
        return looks_preallocated(folder, folder_fd)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "looks_preallocated", swap_first)
        assert site.settle() == {"good"}
    mine.unlink()
    (tmp_path / "aside").rename(mine)
    site.clock.now += adopt.RETRY_S
    assert site.settle() == {"good", "mine"}
    record = site.view.desired.records[AdapterKey(*SCOPE, "v1", "mine")]
    own = artifacts.hash_files(mine, [entry.path for entry in record.spec.files])
    assert record.spec.digest == artifacts.digest_of(own)


@contextmanager
def swapped_at_open(folder: Path, other: Path, number: int) -> Iterator[list[int]]:
    """Let a link to ``other`` lie in the place of ``folder`` while it is opened for the ``number``th time."""
    aside, real, opened = folder.with_name(".aside"), os.open, list[int]()

    def swapping(path: Any, flags: int, *args: Any, **more: Any) -> int:
        is_folder = os.fspath(path) in (str(folder), folder.name) and flags & os.O_DIRECTORY
        opened.extend([1] if is_folder else [])
        if not is_folder or len(opened) != number:
            return real(path, flags, *args, **more)
        folder.rename(aside)
        folder.symlink_to(other)
        try:
            return real(path, flags, *args, **more)
        finally:
            folder.unlink()
            aside.rename(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", swapping)
        yield opened


@pytest.mark.parametrize("number", range(1, 6))
def test_a_folder_that_is_a_link_at_the_moment_it_is_opened(site: Site, tmp_path: Path, number: int) -> None:
    """Looked at before and after it is the same folder: what lies behind the link is never read for it."""
    secret, mine = write_adapter(tmp_path / "secret", seed=99), write_adapter(site.at("mine"), seed=1)
    own = artifacts.digest_of(artifacts.hash_files(mine, ["adapter_config.json", WEIGHTS]))
    reads = reads_of(secret)
    with swapped_at_open(mine, secret, number) as opened:
        site.settle()
    assert reads() == []
    assert len(opened) >= number
    site.clock.now += adopt.RETRY_S
    assert site.settle() == {"good", "mine"}
    assert site.view.desired.records[AdapterKey(*SCOPE, "v1", "mine")].spec.digest == own


def test_a_folder_swapped_for_a_link_while_it_is_adopted(site: Site, tmp_path: Path) -> None:
    """Another tenant's bytes never come under this one's name: its own, or a refusal."""
    secret = write_adapter(tmp_path / "secret", seed=99)
    names = ["adapter_config.json", WEIGHTS]
    theirs = artifacts.digest_of(artifacts.hash_files(secret, names))
    mine = write_adapter(site.at("mine"), seed=1)
    end = time.monotonic() + 3
    with churn(swapper(mine, secret)):
        while time.monotonic() < end:
            site.settle()
            (mine.parent / ".touched").touch()
    for record in site.view.desired.records.values():
        assert record.spec.digest != theirs
    assert "good" in site.settle()


@pytest.mark.anyio
async def test_a_folder_swapped_for_a_link_is_not_staged(site: Site, tmp_path: Path) -> None:
    """Even with the registered bytes behind the link: a copy is made of the adapter's own folder alone."""
    record = site.register("a1", site.good)
    own = site.at("a1")
    moved = own.rename(tmp_path / "moved")
    own.symlink_to(moved)
    stager = site.stager(tmp_path / "stage")
    with pytest.raises(InvalidAdapter, match="symlink"):
        await stager.stage(record)
    own.unlink()
    moved.rename(own)
    with churn(swapper(own, write_adapter(tmp_path / "secret", seed=99))):
        for _ in range(50):
            try:
                staged = await stager.stage(record)
            except LoraFsError:
                continue
            assert artifacts.digest_of(artifacts.hash_files(Path(staged), [WEIGHTS])) != ""
            break
    staged = await stager.stage(record)
    names = [entry.path for entry in record.spec.files]
    assert artifacts.digest_of(artifacts.hash_files(Path(staged), names)) == record.spec.digest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_file_swapped_for_a_link_while_it_is_registered(site: Site, tmp_path: Path) -> None:
    """A served file that is a link at any moment is refused or was read before: never what it points at."""
    source = write_adapter(tmp_path / "source", seed=1)
    theirs = write_adapter(tmp_path / "secret", seed=99) / WEIGHTS
    before = artifacts.hash_files(source, [WEIGHTS])[0].sha256
    end, done = time.monotonic() + 2, 0
    with churn(swapper(source / WEIGHTS, theirs)):
        while time.monotonic() < end:
            try:
                record = site.register(f"a{done}", source)
            except LoraFsError:
                continue
            done += 1
            assert [f.sha256 for f in record.spec.files if f.path == WEIGHTS] == [before]
    assert json.loads((site.good / "adapter_config.json").read_text())


# -- folders on the way ----------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Site:
    """As a replica has it: it reads under the registry alone."""
    site = Site(tmp_path)
    allowed = Allowed(site.registry.layout.root)
    site.adopter._find = lambda folder: allowed.find(folder, follow=False)
    site.locate = locator(site.registry, allowed)
    return site


def elsewhere(site: Site, tmp_path: Path) -> Path:
    """The revision's folder moved out of the registry, with a link in its place."""
    revision = site.good.parent
    moved = revision.rename(tmp_path / "elsewhere")
    revision.symlink_to(moved)
    return moved


def test_a_revision_that_is_a_link_is_not_adopted(guarded: Site, tmp_path: Path) -> None:
    """What lies behind it is no folder of the registry; put back, it is adopted."""
    moved = elsewhere(guarded, tmp_path)
    assert guarded.settle() == set()
    assert "leads out of the registry" in guarded.refusal("good")
    guarded.good.parent.unlink()
    moved.rename(guarded.good.parent)
    guarded.clock.now += adopt.RETRY_S
    assert guarded.settle() == {"good"}


@pytest.mark.anyio
async def test_a_revision_that_is_a_link_is_not_staged(guarded: Site, tmp_path: Path) -> None:
    """Nor one that became a link between the check and the copy, with the registered bytes behind it."""
    record = guarded.settled()
    stager = guarded.stager(tmp_path / "stage")
    checked = guarded.locate(record)
    elsewhere(guarded, tmp_path)
    with pytest.raises(InvalidAdapter, match="leads out of the registry"):
        await stager.stage(record)
    guarded.locate = lambda _: checked
    with pytest.raises(InvalidAdapter, match="behind"):
        await guarded.stager(tmp_path / "stage").stage(record)


@pytest.mark.anyio
async def test_a_revision_swapped_for_a_link_while_it_is_staged(guarded: Site, tmp_path: Path) -> None:
    """However it falls: the registered bytes out of the registry itself, or a refusal."""
    record = guarded.settled()
    secret = write_adapter(tmp_path / "secret/good", seed=99)
    reads = reads_of(secret)
    with churn(swapper(guarded.good.parent, secret.parent)):
        for number in range(100):
            with suppress(LoraFsError):
                await guarded.stager(tmp_path / f"stage-{number}").stage(record)
    assert reads() == []
    await guarded.stager(tmp_path / "stage").stage(record)


@pytest.mark.anyio
async def test_a_revision_behind_a_link_at_the_moment_it_is_opened(guarded: Site, tmp_path: Path) -> None:
    """The open folder lies elsewhere: nothing of it is listed, and no file in it is opened."""
    record = guarded.settled()
    secret = write_adapter(tmp_path / "secret/good", seed=99)
    reads = reads_of(secret)
    refused = pytest.raises(InvalidAdapter, match="behind")
    with behind_a_link_at_open(guarded.good, secret.parent) as opened, refused:
        await guarded.stager(tmp_path / "stage").stage(record)
    assert opened == [str(guarded.good)]
    assert reads() == []


@contextmanager
def behind_a_link_at_open(folder: Path, other: Path) -> Iterator[list[str]]:
    """Put a link to ``other`` in the place of the folder's parent just before the folder is opened."""
    real = os.open
    opened: list[str] = []

    def swapping(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if str(path) == str(folder) and not opened:
            opened.append(str(path))
            folder.parent.rename(folder.parent.with_name(".aside"))
            folder.parent.symlink_to(other)
        return real(path, flags, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", swapping)
        yield opened


def reads_of(folder: Path) -> Callable[[], list[str]]:
    """What was read in the folder since, as the kernel tells it: files of it opened, and lists of it.

    That the folder itself was opened tells nobody what is in it, so it does not count.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watcher, os.fsencode(folder), IN_OPEN | IN_ACCESS) >= 0

    def told() -> list[str]:
        try:
            events = os.read(watcher, 1 << 16)
        except BlockingIOError:
            return []
        finally:
            os.close(watcher)
        found, at = [], 0
        while at < len(events):
            _, mask, _, length = EVENT.unpack_from(events, at)
            name = events[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0").decode()
            at += EVENT.size + length
            if name or mask & IN_ACCESS:
                found.append(name or "a list of it")
        return found

    return told


@pytest.mark.parametrize("path", ["..", "default/..", "default/tiny/v1/..", "default/../../x"])
def test_a_path_that_leads_up(guarded: Site, path: str) -> None:
    """Where a record leads is looked at after every step up, and upwards out of the registry is refused."""
    record = guarded.settled()
    record = record.model_copy(update={"spec": record.spec.model_copy(update={"path": path})})
    try:
        found = guarded.locate(record)
    except InvalidAdapter:
        return
    assert found.is_relative_to(guarded.registry.layout.root)
    assert ".." not in found.parts
