"""The thread that looks at the volume: what it is told as, and that nothing ends it."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.reconcile.watch.watcher import FOLDER_SCAN_S, STALLED_AFTER_S, Volume
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.faults import fail
from tests.registry.test_operations import put

SCOPE = Scope("default", "tiny")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "root", create=True)


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    return lambda name="source", seed=0, rank=4: write_adapter(tmp_path / name, seed, rank)


def make_volume(registry: Registry, *, notify: bool = False) -> Volume:
    """A volume that is polled all the time."""
    adopter = Adopter(registry, Expectation(), settle_s=2.0, writer="test")
    return Volume(registry.layout, RegistryView(registry, (SCOPE,)), adopter, poll_s=0.02, notify=notify)


def test_a_look_that_does_not_end(tmp_path: Path) -> None:
    """Before the first one ended no good state is in force, and none is claimed."""
    registry = Registry(tmp_path, create=True)
    view = RegistryView(registry, (Scope("default", "tiny"),))
    adopter = Adopter(registry, Expectation(), settle_s=2.0, writer="test")
    volume = Volume(registry.layout, view, adopter, poll_s=1.0, notify=False)
    assert volume.conditions() == ()
    volume._looked_at -= STALLED_AFTER_S + 1
    (told,) = volume.conditions()
    assert told == "VolumeStalled: the first look at it has not ended; nothing is listed until then"
    volume.read_once = True
    assert volume.conditions() == ("VolumeStalled: it does not answer; the last good state is in force",)


def test_what_recent_does_not_have_was_not_seen(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, make_adapter: MakeAdapter
) -> None:
    """The first look is in it, and what may not be read is not: ``--wait`` goes by that."""
    for name in ("a", "b"):
        put(registry, SCOPE, make_adapter(name), name=name, revision="v1")
    volume = make_volume(registry)
    record = registry.layout.revision(SCOPE, "v1") / "b.@00000001.json"
    fail(
        monkeypatch, "open", errno.EACCES, times=1 << 30, when=lambda path, *_, **__: str(path) == str(record)
    )
    volume._pass()
    assert volume.recent == {f"{SCOPE}/v1/a": 1, f"{SCOPE}/.active/a": 1, f"{SCOPE}/.active/b": 1}
    assert volume.conditions()[0].startswith(f"Unreadable: cannot open {record}: Permission denied")


def test_conditions_of_what_else_is_watched(registry: Registry) -> None:
    """Each beside the others, as they are when they are asked for."""
    volume, told = make_volume(registry), ["AdminToken: gone"]
    volume.beside.append(lambda: ("FlatStore: empty",))
    volume.beside.append(lambda: told)
    assert volume.conditions() == ("FlatStore: empty", "AdminToken: gone")
    told.clear()
    assert volume.conditions() == ("FlatStore: empty",)


@pytest.mark.anyio
@pytest.mark.parametrize("short_of", ["instances", "a thread of its own", "threads for folders"])
async def test_the_watcher_outlives_a_shortage(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, make_adapter: MakeAdapter, short_of: str
) -> None:
    """Without notifications the polls go on, and what is registered is listed."""
    observer = Mock()
    fails, error = {
        "instances": (Mock(side_effect=OSError(errno.EMFILE, "inotify instance limit reached")), None),
        "a thread of its own": (Mock(return_value=observer), observer.start),
        "threads for folders": (Mock(return_value=observer), observer.schedule),
    }[short_of]
    if error is not None:
        error.side_effect = RuntimeError("can't start new thread")
    monkeypatch.setattr("lora_fs.sidecar.reconcile.watch.watcher.Observer", fails)
    volume, changed = make_volume(registry, notify=True), asyncio.Event()
    volume.start(changed.set)
    async with asyncio.timeout(10):
        await changed.wait()
        assert volume.desired.records == {}
        changed.clear()
        put(Registry(registry.layout.root), SCOPE, make_adapter("a"))
        await changed.wait()
    assert len(volume.desired.records) == 1
    volume.stop()


def test_whatever_fails_in_a_pass_the_next_one_comes(registry: Registry) -> None:
    """To tell of what was seen is a part of it."""
    volume, told = make_volume(registry), Mock(side_effect=[RuntimeError("closed"), None])
    volume._on_change = told
    volume._pass()
    assert volume.conditions() == ("VolumeUnavailable: internal error: closed",)
    volume._pass()
    assert (volume.conditions(), told.call_count) == ((), 2)


def test_a_look_that_fails_loses_no_notification(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of a folder once: the next look that succeeds goes to it."""
    volume = make_volume(registry)
    volume._pass()
    drop, gone = (registry.layout.revision(SCOPE, "v1") / name for name in ("dropped", "gone"))
    volume._notified(came=drop, gone=gone)
    refresh = Mock(side_effect=[VolumeUnavailable("it went away"), False])
    step = Mock(return_value=False)
    monkeypatch.setattr(volume._view, "refresh", refresh)
    monkeypatch.setattr(volume._adopter, "step", step)
    volume._pass()
    assert volume.conditions() == ("VolumeUnavailable: it went away",)
    step.assert_not_called()
    volume._pass()
    assert refresh.call_args.kwargs["folders"] == {gone.parent}
    assert step.call_args.kwargs["dropped"] == {AdapterKey(*SCOPE, "v1", "dropped")}
    volume._pass()
    assert refresh.call_args.kwargs["folders"] == set()


@pytest.mark.parametrize("asked", ["by who wrote it", "by nobody"])
def test_what_is_written_waits_for_no_adoption(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, make_adapter: MakeAdapter, asked: str
) -> None:
    """To hash a large folder takes a minute; what is registered meanwhile is listed, and nothing stalls."""
    volume, adopting, go, told = (
        make_volume(registry),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    volume.read_once = True

    def step(*_: object, **__: object) -> bool:
        adopting.set()
        return not go.wait(20)

    monkeypatch.setattr(volume._adopter, "step", step)
    volume._on_change = told.set
    watcher = threading.Thread(target=volume._pass)
    watcher.start()
    assert adopting.wait(20)
    volume._looked_at -= STALLED_AFTER_S + 1
    put(Registry(registry.layout.root), SCOPE, make_adapter("a"))
    if asked == "by who wrote it":
        looking = threading.Thread(target=volume.look_now)
        looking.start()
        looking.join(5)
    assert told.wait(20)
    assert len(volume.desired.records) == 1
    wait_until("it does not count as stalled", lambda: volume.conditions() == (), timeout_s=60)
    go.set()
    watcher.join()
    wait_until(
        "nothing follows any more",
        lambda: not any(thread.name == "lora-fs-volume-head" for thread in threading.enumerate()),
        timeout_s=60,
    )


def test_an_adoption_is_not_charged_to_the_listing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, make_adapter: MakeAdapter
) -> None:
    """On a mount without notifications a folder that took a minute to adopt hides no later one for hours."""
    now = [1000.0]
    adopter = Adopter(registry, Expectation(), settle_s=1.0, writer="test", clock=lambda: now[0])
    view = RegistryView(registry, (SCOPE,))
    volume = Volume(registry.layout, view, adopter, poll_s=1, notify=False, clock=lambda: now[0])
    register = ingest.register

    def slowly(*args: Any, **kwargs: Any) -> object:
        now[0] += 60
        return register(*args, **kwargs)

    monkeypatch.setattr(ingest, "register", slowly)
    volume._pass()
    for name in ("first", "second"):
        write_adapter(registry.layout.artifact(AdapterKey(*SCOPE, "v1", name)))
        for _ in range(4):
            now[0] += 2 * FOLDER_SCAN_S
            volume._pass()
        assert AdapterKey(*SCOPE, "v1", name) in volume.desired.records


def test_an_adoption_needs_no_thread(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is left the pass goes on without a follower."""
    volume, step = make_volume(registry), Mock(return_value=False)
    monkeypatch.setattr(volume._adopter, "step", step)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    volume._pass()
    assert (volume.conditions(), step.call_count) == ((), 1)
