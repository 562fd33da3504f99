"""Registering for a replica: repeated, taken back, and on a volume that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from lora_fs.sidecar.errors import (
    Conflict,
    InputError,
    NotFound,
    RegistryLost,
    VolumeUnavailable,
    WaitTimeout,
)
from lora_fs.sidecar.model import Policy, Record, Scope
from lora_fs.sidecar.reconcile.admin import service
from lora_fs.sidecar.reconcile.admin.administration import Administration
from lora_fs.sidecar.reconcile.admin.fetch_jobs import AT_ONCE, SHARE
from lora_fs.sidecar.reconcile.admin.fetching import Fetching
from lora_fs.sidecar.reconcile.admin.service import LoadRequest, Registrations
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.lifecycle.register_as import RegisterAs
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.sources.allowed import Allowed, AllowedRemotes
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import SCOPE
from tests.registry.conftest import write_adapter
from tests.sources.conftest import WebServer, serving, tar_of

pytestmark = pytest.mark.anyio

BOUND_S = 60.0


@pytest.fixture
def web() -> Iterator[WebServer]:
    yield from serving(WebServer())


class Site:
    """Registrations of a registry whose volume is looked at after each; another client writes to it, too."""

    def __init__(self, folder: Path, timeout_s: float = BOUND_S) -> None:
        self.folder, self.registry = folder, Registry(folder / "root", create=True)
        view = RegistryView(self.registry, (SCOPE,))
        view.refresh()
        self.volume: Any = SimpleNamespace(desired=view.desired, look_now=lambda: self.look(view))
        self.http = Registrations(
            self.registry,
            (SCOPE,),
            cast("Volume", self.volume),
            Expectation(),
            allowed=Allowed(self.registry.layout.root, (folder,)),
            timeout_s=timeout_s,
            fetching=Fetching(Options(AllowedRemotes(("http://",)).check), 1 << 20, BOUND_S),
            wait_s=BOUND_S,
        )

    def look(self, view: RegistryView) -> None:
        view.refresh(force=True)
        self.volume.desired = view.desired

    def source(self, seed: int) -> Path:
        """An adapter's folder."""
        return write_adapter(self.folder / f"source-{seed}", seed)

    def put(self, seed: int, *, activate: bool = True) -> None:
        """Register by another client."""
        wanted = Registration("a", self.source(seed), "file:///x", activate=activate)
        ingest.register(self.registry, SCOPE, wanted, Expectation(), writer="ci")
        self.volume.look_now()

    def request(self, seed: int, *, inplace: bool = True) -> LoadRequest:
        """What a client asks for."""
        return LoadRequest("a", str(self.source(seed)), inplace)

    def serves(self) -> str | None:
        """The revision that the name serves."""
        pointer = release.active(self.registry, SCOPE, "a")
        return pointer.revision if pointer is not None else None

    def revisions(self) -> set[str]:
        """Those that are registered."""
        return set(release.present_revisions(self.registry, SCOPE, "a"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("remote", [False, True])
async def test_a_load_whose_pointer_was_not_written_is_repeated(
    site: Site, web: WebServer, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """The repeat completes it, as it is promised; one that is complete is refused."""

    def full(*_: object, **__: object) -> None:
        raise VolumeUnavailable("no space left on device")

    url = web.put("/a.tar", tar_of(site.source(1)))
    request = LoadRequest("a", url) if remote else site.request(1, inplace=False)
    with monkeypatch.context() as patch:
        patch.setattr(ingest, "point", full)
        with pytest.raises(VolumeUnavailable):
            await site.http.register(request, "test")
    assert (site.serves(), site.revisions()) == (None, {"v1"})
    record = (await site.http.register(request, "test")).record
    assert (record.revision, site.serves()) == ("v1", "v1")
    with pytest.raises(Conflict, match="already been loaded"):
        await site.http.register(request, "test")


async def test_taking_back_leaves_what_was_promoted_since(site: Site) -> None:
    """Another client's revision stays the one that is served; ours is withdrawn."""
    site.put(1)
    loaded = await site.http.register(site.request(2), "test")
    site.put(3)
    await site.http.undo(loaded, "test")
    assert (site.serves(), site.revisions()) == ("v3", {"v1", "v3"})


async def test_taking_back_restores_what_was_served(site: Site) -> None:
    """Also what this replica had not seen yet; done twice it changes nothing more."""
    site.put(1)
    seen = site.volume.desired
    site.put(2)
    site.volume.desired = seen
    loaded = await site.http.register(site.request(3), "test")
    for _ in range(2):
        await site.http.undo(loaded, "test")
        assert (site.serves(), site.revisions()) == ("v2", {"v1", "v2"})


@pytest.mark.parametrize(("active", "serves"), [(True, "v1"), (False, None)])
async def test_taking_back_what_was_registered_before(site: Site, active: bool, serves: str | None) -> None:
    """It stays registered, and served only if it was."""
    site.put(1, activate=active)
    loaded = await site.http.register(site.request(1), "test")
    assert site.serves() == "v1"
    await site.http.undo(loaded, "test")
    assert (site.serves(), site.revisions()) == (serves, {"v1"})


@pytest.mark.parametrize("remote", [False, True])
async def test_taking_back_leaves_what_is_tried_and_the_way_back(
    site: Site, web: WebServer, remote: bool
) -> None:
    """The canary goes on, and the rollback leads where it did; what was withdrawn meanwhile is left out."""
    for seed in (1, 2):
        site.put(seed)
    site.put(3, activate=False)
    release.set_canary(site.registry, SCOPE, "a", "v3", 20, writer="ci")
    url = web.put("/a.tar", tar_of(site.source(4)))
    for withdrawn, leaves in (
        (None, ("v2", "v1", "v3")),
        ("v3", ("v2", "v1", None)),
        ("v1", ("v2", None, None)),
    ):
        request = LoadRequest("a", url, True) if remote else site.request(4)
        loaded = await site.http.register(request, "test")
        if withdrawn is not None:
            release.unregister(site.registry, SCOPE, "a", revision=withdrawn, writer="ci")
        await site.http.undo(loaded, "test")
        pointer = release.active(site.registry, SCOPE, "a")
        assert pointer is not None
        canary = pointer.canary.revision if pointer.canary is not None else None
        assert (pointer.revision, pointer.previous_revision, canary) == leaves
    assert "v4" not in site.revisions()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("late", [True, False])
async def test_taking_back_leaves_what_another_replica_acknowledged(
    site: Site, monkeypatch: pytest.MonkeyPatch, known: bool, late: bool
) -> None:
    """The same bytes are loaded on A, whose engine refuses, and on B, which answered its client: they stay.

    ``known``: they were registered before, inactive. ``late``: B comes when A takes its own back.
    """
    site.put(1)
    if known:
        site.put(2, activate=False)
    loaded = await site.http.register(site.request(2), "a")
    if late:
        real = release.present_revisions

        def overtaken(*args: Any) -> Any:
            monkeypatch.undo()
            wanted = Registration("a", site.source(2), "file:///x", origin="api")
            assert not ingest.register(site.registry, SCOPE, wanted, Expectation(), writer="b").changed
            return real(*args)

        monkeypatch.setattr(release, "present_revisions", overtaken)
    else:
        again = (await site.http.register(site.request(2), "b")).record
        assert again.key == loaded.record.key
    await site.http.undo(loaded, "a")
    assert (site.serves(), site.revisions()) == ("v2", {"v1", "v2"})


async def test_taking_back_leaves_what_a_person_promoted(site: Site) -> None:
    """Also where the name served that revision already: the promote was acknowledged."""
    site.put(1)
    loaded = await site.http.register(site.request(2), "a")
    release.promote(site.registry, SCOPE, "a", "v2", writer="ci")
    await site.http.undo(loaded, "a")
    assert (site.serves(), site.revisions()) == ("v2", {"v1", "v2"})


async def test_what_comes_before_the_withdrawal_is_registered_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B is acknowledged between A's last look and A's tombstone: the revision is present again."""
    loaded = await site.http.register(site.request(2), "a")
    append = Registry.append

    def overtaken(self: Registry, series: Any, change: Any, **more: Any) -> Any:
        if series.kind is not Record:
            return append(self, series, change, **more)
        monkeypatch.undo()

        def late(newest: Any) -> Any:
            said = change(newest)
            release.promote(site.registry, SCOPE, "a", "v1", writer="b")
            return said

        return append(self, series, late, **more)

    monkeypatch.setattr(Registry, "append", overtaken)
    await site.http.undo(loaded, "a")
    assert (site.serves(), site.revisions()) == ("v1", {"v1"})


async def test_an_undo_that_fails_hides_no_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who takes a load back tells why the engine refused it; that it could not be taken back is logged."""
    loaded = await site.http.register(site.request(2), "a")

    def full(*_: object, **__: object) -> None:
        raise VolumeUnavailable("no space left on device")

    monkeypatch.setattr(Registry, "append", full)
    await site.http.undo(loaded, "a")
    assert "a was refused by the engine and stays registered: no space left" in caplog.text


async def test_what_was_registered_while_nobody_waited_is_taken_back(site: Site, web: WebServer) -> None:
    """The name serves again what it did before the download began."""
    site.put(1)
    site.http.downloads.wait_s = 0.0
    request = LoadRequest("a", web.put("/a.tar", tar_of(site.source(2))), True)
    with pytest.raises(WaitTimeout):
        await site.http.register(request, "test")
    ended = asyncio.Event()
    site.http.downloads.wake = ended.set
    await asyncio.wait_for(ended.wait(), BOUND_S)
    assert site.serves() == "v2"
    loaded = await site.http.register(request, "test")
    await site.http.undo(loaded, "test")
    assert (site.serves(), site.revisions()) == ("v1", {"v1"})


@pytest.mark.parametrize("said", [RegisterAs(dry_run=True), RegisterAs(activate=False)])
async def test_what_serves_nothing_is_answered_later_all_the_same(
    site: Site, web: WebServer, said: RegisterAs
) -> None:
    """It is fetched once, for a caller who did not wait: no name has to serve it."""
    site.http.downloads.wait_s = 0.0
    url = web.put("/a.tar", tar_of(site.source(1)))
    ask = partial(Administration(site.http, Policy()).register, SCOPE, "a", url, said)
    with pytest.raises(WaitTimeout):
        await ask(None, writer="test")
    ended = asyncio.Event()
    site.http.downloads.wake = ended.set
    await asyncio.wait_for(ended.wait(), BOUND_S)
    assert (await ask(None, writer="test")).dry_run == said.dry_run
    assert (site.serves(), site.revisions()) == (None, set() if said.dry_run else {"v1"})


@pytest.mark.parametrize("allow", [(), ("base-model",)])
async def test_a_record_allows_what_its_registration_does(site: Site, allow: tuple[str, ...]) -> None:
    """And nothing of what the replica was set to allow, which holds for this one alone."""
    site.http.expectation = Expectation(allow=frozenset({"base-model", "dora"}))
    admin, source = Administration(site.http, Policy()), str(site.source(1))
    done = await admin.register(SCOPE, "a", source, RegisterAs(allow=allow), None, writer="test")
    assert done.record.spec.allowed == allow


@pytest.mark.parametrize(("others", "share"), [((), AT_ONCE), ((Scope("other", SCOPE.model),), SHARE)])
def test_a_namespace_among_others_has_a_share_of_the_downloads(
    site: Site, others: tuple[Scope, ...], share: int
) -> None:
    """Alone it has all of them."""
    scopes = (SCOPE, *others)
    http = Registrations(
        site.registry,
        scopes,
        site.volume,
        Expectation(),
        allowed=Allowed(site.registry.layout.root),
        timeout_s=BOUND_S,
        fetching=site.http.fetching,
        wait_s=BOUND_S,
    )
    assert http.downloads.share == share


async def test_a_volume_that_hangs_takes_so_many_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes when all are taken is told that nothing was begun, and in time."""
    monkeypatch.setattr(service, "AT_ONCE", 2)
    site, hang, begun = Site(tmp_path, timeout_s=0.1), threading.Event(), threading.Semaphore(0)

    def stuck(*_: object) -> Path:
        begun.release()
        hang.wait(BOUND_S)
        return tmp_path

    monkeypatch.setattr(site.http, "source", stuck)
    told = []
    try:
        for _ in range(4):
            with pytest.raises(VolumeUnavailable) as raised:
                await site.http.register(site.request(1), "test")
            told.append("may have been written" in str(raised.value))
            assert told[-1] or "nothing was begun" in str(raised.value)
    finally:
        hang.set()
    assert told == [True, True, False, False]
    assert [begun.acquire(blocking=False) for _ in range(3)] == [True, True, False]


async def test_an_upload_that_finds_no_thread_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told that nothing was begun, and repeats it, does not fill the volume."""
    monkeypatch.setattr(service, "AT_ONCE", 1)
    site, hang, begun = Site(tmp_path, timeout_s=0.2), threading.Event(), threading.Event()
    site.http.uploads.volume_s = BOUND_S  # a busy machine may take longer than that for a part of it

    def stuck() -> None:
        begun.set()
        hang.wait(BOUND_S)

    async def files() -> AsyncIterator[tuple[str, bytes]]:
        yield "adapter_config.json", b"{}"

    try:
        with pytest.raises(VolumeUnavailable, match="may have been written"):
            await site.http.run(stuck, "wait")
        assert begun.is_set()
        with pytest.raises(VolumeUnavailable, match="nothing was begun"):
            await site.http.upload(Upload("a", files()), "test")
        incoming = site.registry.layout.incoming(SCOPE)
        for _ in range(1000):
            if not list(incoming.iterdir()):
                break
            await anyio.sleep(0.01)
        assert not list(incoming.iterdir())
    finally:
        hang.set()


@pytest.mark.parametrize("kept", [True, False])
async def test_a_registry_that_is_lost_is_not_empty(site: Site, kept: bool) -> None:
    """Whether a name is registered there is not known: it is not said to be gone."""
    site.put(1)
    served = Served("a", next(iter(site.volume.desired.records.values()))) if kept else None
    site.registry.layout.root.rename(site.folder / "elsewhere")
    with pytest.raises(RegistryLost):
        await site.http.unregister("a", served, "test")


async def test_a_folder_that_is_not_there(site: Site) -> None:
    """It is not found, in vLLM's words; on a volume that is lost nothing is known not to be there."""
    told = "No adapter found for '.*/none': no such folder on this machine"
    with pytest.raises(NotFound, match=told):
        await site.http.register(LoadRequest("a", str(site.folder / "none"), False), "http")
    (site.folder / "file").touch()
    with pytest.raises(InputError, match="is a file: give the folder"):
        await site.http.register(LoadRequest("a", str(site.folder / "file"), False), "http")
    site.registry.layout.marker.unlink()
    with pytest.raises(RegistryLost):
        await site.http.register(LoadRequest("a", str(site.folder / "none"), False), "http")
