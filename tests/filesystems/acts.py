"""What the tests let processes do inside a rig: writers and readers of one registry on two mounts."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import Conflict, LoraFsError
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.format.layout import Generation
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration, register
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import Desired, RegistryView
from lora_fs.sidecar.registry.volume.mounts import kind_of, timing_for
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter

SCOPE = Scope("default", "tiny")
FORK = multiprocessing.get_context("fork")
LOOK_S = 0.02
GIVE_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds from a command's end on one mount until a reader on the other has it."""

    registered_s: float
    promoted_s: float
    unregistered_s: float


def follower(path: Path) -> RegistryView:
    """A reader as a sidecar has one."""
    timing = timing_for(kind_of(path))
    view = RegistryView(Registry(path), (SCOPE,), lag_s=timing.lag_s)
    view.refresh()
    return view


def wait(view: RegistryView, true: Callable[[Desired], bool]) -> float:
    """Seconds until the view says so."""
    started = time.monotonic()
    while not true(view.desired):
        if time.monotonic() - started > GIVE_UP_S:
            raise AssertionError(f"not seen within {GIVE_UP_S:.0f} s: {served(view.desired)}")
        time.sleep(LOOK_S)
        view.refresh()
    return time.monotonic() - started


def served(desired: Desired) -> dict[str, str]:
    """What each plain name serves."""
    return {name: record.revision for _, name, record in desired.active()}


def put(registry: Registry, source: Path, name: str, revision: str | None = None) -> int:
    """Register an adapter; its integer id."""
    wanted = Registration(name=name, source=source, uri=source.as_uri(), revision=revision)
    return register(registry, SCOPE, wanted, Expectation(), writer="test").record.spec.int_id


def one_registers_the_other_sees(here: Path, there: Path, local: Path) -> Seen:
    """Register, register another revision and unregister on one mount; follow on the other."""
    registry = Registry(here, create=True)
    view = follower(there)
    put(registry, write_adapter(local / "first", 1), "a", "v1")
    registered_s = wait(view, lambda desired: served(desired) == {"a": "v1"})
    put(registry, write_adapter(local / "second", 2), "a", "v2")
    promoted_s = wait(view, lambda desired: served(desired) == {"a": "v2"})
    release.unregister(registry, SCOPE, "a", writer="test", all_revisions=True)
    unregistered_s = wait(view, lambda desired: served(desired) == {} and not present(desired))
    registry.close()
    return Seen(registered_s, promoted_s, unregistered_s)


def one_changes_its_mind(here: Path, there: Path, local: Path) -> tuple[Pointer, Pointer]:
    """One mount lists what is served, the other promotes, and the first promotes what it had listed."""
    registry = Registry(here, create=True)
    for seed, revision in enumerate(("v1", "v2")):
        put(registry, write_adapter(local / revision, seed), "a", revision)
    other = Registry(there)
    before = release.active(other, SCOPE, "a")
    assert before is not None
    assert before.revision == "v2"
    away = release.promote(registry, SCOPE, "a", "v1", writer="here")
    back = release.promote(other, SCOPE, "a", "v2", writer="there")
    registry.close()
    other.close()
    return away, back


class Asleep(Registry):
    """A writer that listed a series long ago, and found ``dreamt`` there."""

    dreamt: Record | None = None

    def latest(self, series: Series[Body]) -> Any:
        body, self.dreamt = self.dreamt, None
        if body is None:
            return super().latest(series)
        return Generation(body.generation, body.token if self.marker.tier == "lww" else ""), body


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was left of a history that gc removed on one mount, and what those on the other made of it."""

    files: int
    slept: dict[str, str]  # served to a reader that missed the withdrawal
    back: tuple[dict[str, str], dict[str, str]]  # to it, and to another, once the name is there again
    refused: bool  # the writer that slept
    generations: list[int]


def one_compacts_the_other_slept(here: Path, there: Path, local: Path) -> Compacted:
    """Withdraw and compact on one mount, where a reader and a writer of the other know nothing of it."""
    registry = Registry(here, create=True)
    put(registry, write_adapter(local / "kept", 1), "kept", "v1")
    put(registry, write_adapter(local / "gone", 2), "gone", "v1")
    slept, awake, writer = follower(there), follower(there), Asleep(there)
    series = writer.records(series_key("kept"))
    writer.dreamt = writer.latest(series)[1]
    for label in ("b", "c"):
        amend.amend(registry, SCOPE, "kept", [amend.with_labels({"a": label})], writer="test")
    release.unregister(registry, SCOPE, "gone", writer="test")
    wait(awake, lambda desired: served(desired) == {"kept": "v1"})
    registry.close()
    while found := gc.find(registry, SCOPE, frozenset(), 0.0, history_s=0.0):
        refused = collect(found)
        assert not refused, refused
    files = sum(1 for _ in here.glob("*/*/*/*.@*.json"))
    wait(slept, lambda desired: served(desired) == {"kept": "v1"})
    seen = served(slept.desired)
    try:
        writer.append(series, lambda _: {}, writer="stale", expect=1)
        refused_it = False
    except Conflict:
        refused_it = True
    put(registry, write_adapter(local / "again", 3), "gone", "v1")
    for view in (slept, awake):
        wait(view, lambda desired: served(desired) == {"kept": "v1", "gone": "v1"})
    registry.close()
    generations = [one.generation for one in registry.generations(registry.records(series_key("kept")))]
    return Compacted(files, seen, (served(slept.desired), served(awake.desired)), refused_it, generations)


def series_key(name: str) -> AdapterKey:
    return AdapterKey(*SCOPE, "v1", name)


def present(desired: Desired) -> dict[str, int]:
    """The integer id of each registered revision."""
    return {str(key): record.spec.int_id for key, record in desired.records.items() if record.present}


@dataclass(frozen=True, slots=True)
class Crowd:
    """What writers on both mounts were told, and what readers on both saw in the end."""

    acknowledged: dict[str, int]
    refused: dict[str, str]
    seen: tuple[dict[str, int], dict[str, int]]
    shared: tuple[str, str]  # what the name that all wrote serves, on each mount


def many_register(here: Path, there: Path, local: Path, writers: int, each: int) -> Crowd:
    """Processes on both mounts register names of their own and one name that all of them write."""
    Registry(here, create=True).close()
    views = follower(here), follower(there)
    results = FORK.SimpleQueue()
    processes = [
        FORK.Process(target=register_some, args=(path, local / f"{side}-{number}", each, results.put))
        for side, path in (("here", here), ("there", there))
        for number in range(writers)
    ]
    for process in processes:
        process.start()
    told = [results.get() for _ in processes]
    for process in processes:
        process.join()
    acknowledged = {key: int_id for part, _ in told for key, int_id in part.items()}
    refused = {key: why for _, part in told for key, why in part.items()}
    for view in views:
        wait(view, lambda desired: present(desired).keys() >= acknowledged.keys())
    seen = present(views[0].desired), present(views[1].desired)
    shared = served(views[0].desired).get("shared", ""), served(views[1].desired).get("shared", "")
    return Crowd(acknowledged, refused, seen, shared)


def register_some(
    path: Path, local: Path, each: int, tell: Callable[[tuple[dict[str, int], dict[str, str]]], None]
) -> None:
    """Register names of one's own and one common name; tell the ids, and why others were refused."""
    registry, acknowledged, refused = Registry(path), dict[str, int](), dict[str, str]()
    for name, revision in _names(local.name, each):
        source = write_adapter(local / name / revision, hash((local.name, revision)) % 2**32)
        try:
            int_id = put(registry, source, name, revision)
        except LoraFsError as error:
            refused[f"{SCOPE}/{revision}/{name}"] = str(error)
        else:
            acknowledged[f"{SCOPE}/{revision}/{name}"] = int_id
    registry.close()
    tell((acknowledged, refused))


def _names(writer: str, each: int) -> Iterable[tuple[str, str]]:
    for number in range(each):
        yield f"{writer}-{number}", "v1"
        yield "shared", f"{writer}-{number}"
