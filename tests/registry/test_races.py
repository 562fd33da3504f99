"""Two processes on one name; writers killed at random: nothing acknowledged is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import Conflict, NotFound, OverQuota
from lora_fs.sidecar.model import AdapterKey, Quota, Scope
from lora_fs.sidecar.registry.format.layout import parse_generation
from lora_fs.sidecar.registry.lifecycle import artifacts, ingest, release, retention
from lora_fs.sidecar.registry.store import quota
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume.leases import Turn
from tests.registry.conftest import MakeAdapter, Site
from tests.registry.test_operations import before_append, put, served

FORK = multiprocessing.get_context("fork")
KEY = AdapterKey("default", "tiny", "v1", "a1")
GIVE_UP_S = 30.0


def _write(root: Path, acknowledgements: Path) -> None:
    """Write until killed; no lock is shared with the parent, for a killed holder would keep it."""
    registry = Registry(root)
    handle = os.open(acknowledgements, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def label(newest: Any) -> dict[str, Any]:
        spec = newest.spec.model_dump(mode="json")
        return {"spec": {**spec, "labels": {"by": f"{os.getpid()}-{random.random()}"}}}

    while True:
        try:
            done = registry.append(registry.records(KEY), label, writer="race")
        except Conflict:
            continue
        os.write(handle, f"{done.generation} {done.token}\n".encode())


@pytest.mark.parametrize("kills", [8, pytest.param(600, marks=pytest.mark.long)])
def test_killed_writers_lose_nothing_acknowledged(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path, kills: int
) -> None:
    """Every acknowledged generation is there, once, with its writer's token; every file can be read."""
    put(registry, scope, make_adapter())
    root = registry.layout.root
    log = tmp_path / "acknowledged"
    log.touch()

    def start() -> Any:
        writer = FORK.Process(target=_write, args=(root, log), daemon=True)
        writer.start()
        return writer

    def kill(writer: Any) -> None:
        assert writer.is_alive(), "a writer ended by itself"
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

    writers = [start(), start()]
    for _ in range(kills - len(writers)):
        before, deadline = log.stat().st_size, time.monotonic() + GIVE_UP_S
        while log.stat().st_size == before:
            assert time.monotonic() < deadline, "nobody can write any more"
            time.sleep(random.uniform(0.0005, 0.01))
        victim = random.randrange(2)
        kill(writers[victim])
        writers[victim] = start()
    for writer in writers:
        kill(writer)
    acknowledged = dict(line.split() for line in log.read_text().splitlines())
    assert len(acknowledged) == len(log.read_text().splitlines()) >= kills - 2
    names = os.listdir(registry.layout.revision(scope, "v1"))
    written = [p[1] for name in names if (p := parse_generation(name))]
    bodies = {str(g.generation): registry.read(registry.records(KEY), g) for g in written}
    assert {generation: bodies[generation].token for generation in acknowledged} == acknowledged
    assert sorted(map(int, bodies)) == list(range(1, len(bodies) + 1))
    print(f"{kills} kills, {len(acknowledged)} acknowledged, 0 lost, {len(bodies)} written, 0 unreadable")


def test_over_the_quota_beside_another(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer withdraws its record that is over the quota, unless another writer's registration of the
    same bytes was acknowledged meanwhile."""
    registry.accounts.write(Quota(namespace="default", adapters=1, writer="test", updated_at=""))
    late = Registry(registry.layout.root)
    publish, source = late.append, make_adapter("second", 21)

    @contextmanager
    def broken(path: Path, *, wait_s: float) -> Iterator[Turn]:
        yield Turn(held=True)

    def beside(*arguments: Any, **options: Any) -> Any:
        """Another host registers before the write, and the same bytes after it."""
        monkeypatch.setattr(late, "append", publish)
        put(registry, scope, make_adapter("first", 20), name="first")
        written = publish(*arguments, **options)
        put(registry, scope, source, name="second")
        return written

    monkeypatch.setattr(quota, "lease", broken)
    monkeypatch.setattr(late, "append", beside)
    with pytest.raises(OverQuota):
        put(late, scope, source, name="second")
    assert served(registry, scope) == {"first": "v1", "second": "v1"}
    assert list(release.present_revisions(registry, scope, "second")) == ["v1"]


def test_a_place_that_a_kept_listing_does_not_show(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that keeps listings (sshfs) takes the next revision where another writer took this one."""
    real_list, real_place, kept = os.listdir, artifacts.place, dict[Path, list[str]]()

    def overtaken(draft: Path, target: Path) -> bool:
        monkeypatch.setattr(artifacts, "place", real_place)
        before = real_list(target.parent)
        put(registry, scope, make_adapter("theirs", 1))
        kept[target.parent] = before
        return real_place(draft, target)

    monkeypatch.setattr(artifacts, "place", overtaken)
    monkeypatch.setattr(os, "listdir", lambda one: kept.pop(one) if one in kept else real_list(one))
    put(registry, scope, make_adapter())
    assert served(registry, scope) == {"a1": "v2"}
    assert not kept


@pytest.fixture
def two(site: Site) -> Site:
    """A name that serves v2 and has v1."""
    site.put(2)
    return site


def withdraw(site: Site) -> list[Any]:
    return release.unregister(site.registry, site.scope, "a", revision="v1", writer="other")


def test_a_withdrawal_beside_a_promotion(two: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revision that goes after the promotion found it leaves the name what it served."""
    view = RegistryView(two.registry, (two.scope,))
    view.refresh()
    before_append(monkeypatch, lambda: withdraw(two), to="Pointer")
    with pytest.raises(NotFound, match="no revision 'v1'"):
        release.promote(two.registry, two.scope, "a", "v1", writer="ci")
    assert two.state() == ("v2", {"v2"})
    view.refresh()
    newest = release.active(two.registry, two.scope, "a")
    assert view.desired.pointers[two.scope, "a"] == newest, "a reader that saw the pointer sees the next one"


def test_a_withdrawal_beside_a_registration(two: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new revision that goes before its name serves it leaves the name what it served."""
    gone = partial(release.unregister, two.registry, two.scope, "a", revision="v3", writer="other")
    before_append(monkeypatch, gone, to="Pointer")
    with pytest.raises(NotFound, match="somebody withdrew it meanwhile"):
        two.put(3)
    assert two.state() == ("v2", {"v1", "v2"})


def test_a_load_that_anothers_undo_withdraws_is_registered_again(
    two: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undo of a load of the same bytes withdraws the record before this load's pointer is there."""
    gone = partial(release.unregister, two.registry, two.scope, "a", revision="v3", writer="other")
    before_append(monkeypatch, gone, to="Pointer")
    made = two.load(3)
    assert (made.revision, two.state()) == ("v3", ("v3", {"v1", "v2", "v3"}))
    two.take_back(made)
    assert two.state() == ("v2", {"v1", "v2"})


@pytest.mark.parametrize("both", [False, True], ids=["one goes", "both go"])
def test_a_promotion_beside_a_withdrawal(two: Site, monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    """A name promoted to a revision that goes, just before it goes, serves what it served before, if any."""

    def promote() -> None:
        release.promote(two.registry, two.scope, "a", "v1", writer="ci")
        if both:
            release.unregister(two.registry, two.scope, "a", revision="v2", writer="third")

    before_append(monkeypatch, promote, to="Record")
    withdraw(two)
    assert two.state() == ((None, set()) if both else ("v2", {"v2"}))


def test_a_withdrawal_beside_a_damaged_record(two: Site) -> None:
    """A record that cannot be read is not withdrawn: replicas that read it before serve its revision."""
    series = two.registry.records(AdapterKey(*two.scope, "v2", "a"))
    record = two.registry.latest(series)[1]
    assert record is not None
    two.registry.path(series, record).write_bytes(b"")
    withdraw(two)
    assert two.state() == ("v2", set())


def test_a_withdrawal_beside_a_canary(two: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name does not try a revision that goes after the caller found it."""
    before_append(monkeypatch, lambda: withdraw(two), to="Pointer")
    with pytest.raises(NotFound):
        release.set_canary(two.registry, two.scope, "a", "v1", 10, writer="ci")
    pointer = release.active(two.registry, two.scope, "a")
    assert pointer is not None
    assert (pointer.revision, pointer.canary) == ("v2", None)


def test_gc_beside_a_promotion(two: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name never serves a revision that gc withdrew for being one too many."""
    old = release.chosen_of(two.registry, two.scope, "a", "v1")["v1"]
    two.put(3)
    two.put(4)
    before_append(monkeypatch, lambda: retention.withdraw(two.registry, old, writer="gc"), to="Pointer")
    with pytest.raises(NotFound):
        release.promote(two.registry, two.scope, "a", "v1", writer="ci")
    assert two.state() == ("v4", {"v2", "v3", "v4"})


def test_registered_again_beside_a_withdrawal(two: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name serves bytes that are registered again while somebody unregisters all of it."""

    real = ingest._Task._is_registered

    def late(*arguments: Any) -> bool:
        monkeypatch.undo()
        release.unregister(two.registry, two.scope, "a", all_revisions=True, writer="other")
        return real(*arguments)

    monkeypatch.setattr(ingest._Task, "_is_registered", late)
    two.put(2)
    assert two.state() == ("v2", {"v2"})
