"""A volume that fails, fills up or hangs in each step of a registration; set clocks; ids at their limits."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import LoraFsError, RegistryLost, VolumeUnavailable
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.format.ids import new_ids
from lora_fs.sidecar.registry.lifecycle import artifacts, ingest, mending, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.maintenance import fsck, gc, survey
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.faults import fail
from tests.registry.test_operations import put, served

HOUR_S, YEAR_S = 3600.0, 365 * 24 * 3600.0
BOUND_S = 60.0
NAMES = ["adapter_config.json", "adapter_model.safetensors"]


def at(target: Any) -> str:
    """The path that a call is about."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


def steps(root: Path) -> dict[str, tuple[str, Callable[..., bool]]]:
    """By step of a registration, a call that it makes, and which of those."""

    def below(*parts: str) -> Callable[..., bool]:
        return lambda target, *_, **__: all(part in at(target) for part in (str(root), *parts))

    incoming = below(".incoming/")
    return {
        "copy: its folder": ("mkdir", below(".incoming/")),
        "copy: its bytes": ("fsync", below(".incoming/", "adapter_model")),
        "copy: its names": ("fsync", lambda target: incoming(target) and Path(at(target)).is_dir()),
        "place": ("rename", below(".incoming/")),
        "record: its draft": ("open", below("/v2/", ".tmp-")),
        "record: its name": ("link", below("/v2/.tmp-")),
        "point: its draft": ("open", below(".active/", ".tmp-")),
        "point: its name": ("link", below(".active/.tmp-")),
        "announce": ("replace", below(".leases/.tmp-")),
    }


def check(registry: Registry, scope: Scope, expected: set[str], beside: tuple[str, ...] = ()) -> None:
    """What is served is whole, and nothing is broken that a person would have to mend."""
    fresh = Registry(registry.layout.root)
    assert served(fresh, scope).get("a1") in expected
    for record in release.present_revisions(fresh, scope, "a1").values():
        held = artifacts.hash_files(fresh.layout.artifact(record.key), NAMES)
        assert artifacts.digest_of(held) == record.spec.digest
    found = list(fsck.find(fresh, survey.look(fresh), older_than_s=HOUR_S, hash_files=True))
    assert [one for one in found if one.kind.name not in ("HALF", "HEAD", *beside)] == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", steps(Path()))
def test_a_step_that_fails(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    code: int,
) -> None:
    """Read-only, full or broken: the error has the reason, serving continues, and a repeat completes it."""
    put(registry, scope, make_adapter())
    source = write_adapter(make_adapter().parent / "second", 1)
    call, chosen = steps(registry.layout.root)[step]
    reached = []

    def when(*args: Any, **more: Any) -> bool:
        reached.extend([call] if chosen(*args, **more) else [])
        return chosen(*args, **more)

    with monkeypatch.context() as patch:
        fail(patch, call, code, times=1 << 30, when=when)
        if step == "announce":
            put(registry, scope, source)  # HEAD is a hint: readers find it by their next scan
        else:
            with pytest.raises(LoraFsError) as told:
                put(registry, scope, source)
            assert any(word in str(told.value) for word in (os.strerror(code), "may have been written"))
        assert reached, "the step was not reached"
    check(registry, scope, {"v1", "v2"} if step == "announce" else {"v1"})
    put(registry, scope, source)
    check(registry, scope, {"v2"})


@pytest.mark.parametrize("step", [step for step in steps(Path()) if step != "announce"])
def test_a_step_that_hangs(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """While a registration hangs others see what was there and write; it goes on later, and completes."""
    put(registry, scope, make_adapter())
    source = write_adapter(make_adapter().parent / "second", 1)
    call, when = steps(registry.layout.root)[step]
    real, hung, go = getattr(os, call), threading.Event(), threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "hanging" and when(*args[:1]) and not hung.is_set():
            hung.set()
            assert go.wait(BOUND_S)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, hang)
    one = threading.Thread(target=put, args=(registry, scope, source), name="hanging")
    one.start()
    assert hung.wait(BOUND_S), "the step was not reached"
    check(registry, scope, {"v1"})
    other = Registry(registry.layout.root)
    put(other, scope, make_adapter("third", 2), name="b1")
    assert served(other, scope)["b1"] == "v1"
    go.set()
    one.join(BOUND_S)
    check(registry, scope, {"v2"})


@pytest.mark.parametrize("shift_s", [-HOUR_S, YEAR_S], ids=["an hour back", "a year ahead"])
def test_a_clock_that_is_set(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    shift_s: float,
) -> None:
    """No order of generations, no revision and no file that is present rests on the host's clock."""
    put(registry, scope, make_adapter())
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    put(registry, scope, write_adapter(make_adapter().parent / "second", 1))
    collect(gc.find(registry, scope, gc.in_use(registry), HOUR_S))
    check(registry, scope, {"v2"})
    assert set(release.present_revisions(registry, scope, "a1")) == {"v1", "v2"}


@pytest.mark.parametrize("identity", [1, 2**63 - 1])
def test_ids_at_their_limits(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    identity: int,
) -> None:
    """The least and the greatest id are recorded and read as they are; a second holder gets another one."""
    monkeypatch.setattr(ingest, "int_id", lambda *_: identity)
    put(registry, scope, make_adapter())
    put(registry, scope, write_adapter(make_adapter().parent / "second", 1), name="b1")
    state = survey.look(Registry(registry.layout.root))
    assert [record.spec.int_id for record in state.records.values()] == [identity, identity]
    fresh = new_ids(state.records, registry.marker.registry_uuid)
    assert all(0 < one < 2**63 and one != identity for one in fresh.values())
    assert len(fresh) == 1
    check(registry, scope, {"v1"}, beside=("SAME_ID",))


def test_another_volume_that_is_mounted_while_a_linked_folder_is_read(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Nothing is written on a volume that came meanwhile, and the caller learns that it is another one."""
    root, source = registry.layout.root, make_adapter()

    def mount(_: int) -> None:
        if not root.with_name("away").exists():
            root.rename(root.with_name("away"))
            Registry(root, create=True)

    wanted = Registration("a1", source, source.as_uri(), link=True)
    with pytest.raises(RegistryLost):
        ingest.register(registry, scope, wanted, Expectation(), writer="test", progress=mount)
    assert Registry(root).scopes() == []


def test_a_symlink_that_changes_while_its_folder_is_read(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """A link registers the folder that was read, wherever its symlink leads by then."""
    first, second, current = make_adapter("first"), make_adapter("second", 1), tmp_path / "current"
    current.symlink_to(first)

    def turn(_: int) -> None:
        current.unlink(missing_ok=True)
        current.symlink_to(second)

    wanted = Registration("a1", current, current.as_uri(), link=True)
    record = ingest.register(registry, scope, wanted, Expectation(), writer="test", progress=turn).record
    assert mending.is_whole(registry.layout, record)
    assert registry.layout.resolve(record.spec.path) == first


def test_gc_beside_a_withdrawn_folder_that_is_registered_again(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration in place does not succeed where gc removed its folder before the record was there."""
    record = put(registry, scope, make_adapter()).record
    release.unregister(registry, scope, "a1", writer="test")
    folder, real = registry.layout.artifact(record.key), registry.append

    def append(*args: Any, **more: Any) -> Any:
        collect(gc.find(registry, scope, frozenset(), 0.0))
        return real(*args, **more)

    monkeypatch.setattr(registry, "append", append)
    with pytest.raises(VolumeUnavailable, match="removed meanwhile"):
        put(registry, scope, folder, revision="v1")


@pytest.mark.parametrize("changed", [False, True])
def test_a_revisions_own_folder_as_the_source_of_the_next(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, changed: bool
) -> None:
    """Of a withdrawn revision, or of one whose files were changed: the next one has a copy of its own."""
    folder = registry.layout.artifact(put(registry, scope, make_adapter()).record.key)
    if changed:
        write_adapter(folder, 1)
    else:
        release.unregister(registry, scope, "a1", writer="test")
    record = put(registry, scope, folder).record
    assert record.revision == "v2"
    assert mending.is_whole(registry.layout, record)


def test_the_same_bytes_in_two_revisions(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Registered again, they are those of the revision that the name serves: nothing is written."""
    source = make_adapter()
    put(registry, scope, source)
    put(registry, scope, source, revision="v2")
    before = release.active(registry, scope, "a1")
    assert put(registry, scope, source).record.revision == "v2"
    assert release.active(registry, scope, "a1") == before
