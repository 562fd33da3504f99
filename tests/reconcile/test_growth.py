"""What each request and each pass costs does not grow with all that is loaded or staged."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import aiohttp
import pytest
from watchdog.observers.api import BaseObserver

from lora_fs.sidecar.engine import activity, vllm_http
from lora_fs.sidecar.engine.protocol import Activity
from lora_fs.sidecar.model import Policy, PolicyKind
from lora_fs.sidecar.reconcile import plan, status
from lora_fs.sidecar.reconcile.reconciler import SWEEP_SHARE
from lora_fs.sidecar.reconcile.watch.watcher import MOST_WATCHED, Volume
from lora_fs.sidecar.registry.format.layout import Layout, Listing
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.view.snapshot import Desired
from tests.reconcile.conftest import SCOPE, Rig
from tests.reconcile.test_plan import RECORD
from tests.registry.test_growth import calls_of

MakeRig = Callable[..., Rig]

pytestmark = pytest.mark.anyio


class Listed(dict[str, str]):
    """Counts how often somebody goes through all of it."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()


async def test_a_request_and_a_status_list_no_loaded_adapters(make_rig: MakeRig) -> None:
    """Of an engine that may read them again, so that each request asks how many there are."""
    rig = make_rig(max_loaded=2)
    rig.engine.rereads = True
    for name in ("a0", "a1", "a2"):
        rig.volume.put(name, policy=Policy(kind=PolicyKind.EAGER))
    await rig.settle()
    residents = rig.replica._residents
    residents.paths = listed = Listed(residents.paths)
    assert residents.why_not_loaded().startswith("all 2 places are taken")
    for _ in range(2):
        async with rig.replica.hold("a0", 5):
            pass
    assert (len(listed), listed.times) == (2, 0)


def test_a_status_that_did_not_change_is_not_made_anew() -> None:
    """However many adapters are loaded: a report compares and dates those alone that are other objects."""
    records = [RECORD.model_copy(update={"name": f"a{number}"}) for number in range(5_000)]
    first, second = ([status._ready(r.key, r.generation, None, None) for r in records] for _ in range(2))
    assert all(map(operator.is_, first, second))


async def test_the_stage_is_swept_for_so_much_of_the_time(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many copies there are: passes may come many a second, and each pass without a change sweeps."""
    rig = make_rig()
    rig.volume.put("a")
    await rig.settle()
    began = list[float]()

    def sweep(_: object) -> None:
        began.append(rig.clock.now)
        rig.clock.now += took_s

    monkeypatch.setattr(rig.stager, "sweep", sweep)
    for took_s in (0.0, 0.0625, 30.0):
        for _ in range(3):
            await rig.replica._loop._sweep()
        rig.clock.now = began[-1] + took_s + min(SWEEP_SHARE * took_s, rig.limits.resync_s)
    await rig.replica._loop._sweep()
    waited = [later - before for before, later in pairwise(began)]
    assert waited == [0.0, 0.0, 0.0, 0.0625 + SWEEP_SHARE * 0.0625, 30.0 + rig.limits.resync_s]


def test_what_is_watched_costs_the_same_however_many_folders_there_are(tmp_path: Path) -> None:
    """It is asked after each listing of the tree, in which every next revision may have a folder."""
    counts, watched = [], list[str]()
    observer = cast("BaseObserver", SimpleNamespace(schedule=lambda _, path, **__: watched.append(path)))
    for revisions in (MOST_WATCHED, MOST_WATCHED, 10 * MOST_WATCHED):  # at first paths learn their text
        listing = ScopeListing({f"v{number}": Listing() for number in range(revisions)})
        view = Mock(desired=Desired(listings={SCOPE: listing}))
        volume = Volume(Layout(tmp_path), view, Mock(), poll_s=1, notify=True)
        counts.append(calls_of(partial(volume._subscribe, observer)))
    assert len(watched) == 3 * MOST_WATCHED
    assert counts[1] == counts[2]


def plan_calls(tenants: int) -> tuple[int, int]:
    """What a pass and a search for room call, where so many share what is loaded."""
    weights = {f"t{number}": 1 + number % 3 for number in range(tenants)}
    owners = [f"t{number % tenants}" for number in range(240)]
    eager, lazy = Policy(kind=PolicyKind.EAGER), Policy()
    absent = [plan.Absent(f"a{at}", eager, True, one) for at, one in enumerate(owners)]
    resident = [plan.Resident(f"r{at}", RECORD, True, 0, at, lazy, one) for at, one in enumerate(owners)]
    lacks = len(resident) * RECORD.spec.size_bytes
    decided = calls_of(lambda: plan.decide([], absent, len(absent), weights))
    return decided, calls_of(lambda: plan.give_way(resident, lacks, weights))


def test_a_plan_costs_the_same_however_many_tenants_share() -> None:
    """The places that are free, and the copies that give way, are theirs in turn."""
    few, many = plan_calls(4), plan_calls(60)
    assert many[0] <= 1.2 * few[0]
    assert many[1] <= 1.2 * few[1]


async def test_what_vllm_counts_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a series of each set of adapters that it ever saw in use: some minutes make megabytes."""
    engine = vllm_http.VllmHttp(cast("aiohttp.ClientSession", None), "http://engine", timeout_s=1)
    readers = []

    async def call(*_: object) -> tuple[int, str]:
        return 200, ""

    def read(_: str) -> Activity:
        readers.append(threading.current_thread())
        return Activity()

    monkeypatch.setattr(engine, "_call", call)
    monkeypatch.setattr(activity, "read_activity", read)
    await engine.activity()
    assert readers
    assert threading.current_thread() not in readers
