"""What the tests let processes do inside a rig: writers and readers of one registry on two mounts."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import Pointer, Scope
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration, register
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
        FORK.Process(target=_register_some, args=(path, local / f"{side}-{number}", each, results.put))
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


def _register_some(
    path: Path, local: Path, each: int, tell: Callable[[tuple[dict[str, int], dict[str, str]]], None]
) -> None:
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
