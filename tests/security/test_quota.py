"""What a namespace may register."""

from __future__ import annotations

import datetime
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import LoraFsError, OperatorError, OverQuota, TooManyRegistrations
from lora_fs.sidecar.model import Quota, Scope
from lora_fs.sidecar.registry.drops.candidates import QUOTA_RETRY_S
from lora_fs.sidecar.registry.lifecycle import copying, release
from lora_fs.sidecar.registry.lifecycle.amend import amend, with_labels
from lora_fs.sidecar.registry.store import quota
from lora_fs.sidecar.registry.store.quota import WINDOW_S, Accounts
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume.leases import Turn
from tests.cli.conftest import LoraFs
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.test_adopt import Site
from tests.registry.test_operations import put, served

FORK = multiprocessing.get_context("fork")
WRITERS = 6


def allow(registry: Registry, namespace: str = "default", **bounds: int) -> None:
    """Let a namespace have so much."""
    set_quota(registry, namespace, bounds)


def set_quota(registry: Registry, namespace: str, bounds: dict[str, int]) -> None:
    """Write a quota as the command does."""
    who = {"namespace": namespace, "writer": "test", "updated_at": "2026-11-21T00:00:00+00:00"}
    registry.accounts.write(Quota.model_validate({**who, **bounds}))


def tree(registry: Registry) -> set[str]:
    """Every file of the volume but the hints."""
    root = registry.layout.root
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {path for path in found if not path.startswith((".leases", "HEAD"))}


@pytest.mark.parametrize("bounds", [{"adapters": 1}, {"size_bytes": 1000}])
def test_over_quota(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, bounds: dict[str, int]
) -> None:
    """A registration over the quota in adapters or bytes fails, and leaves nothing on the volume. The
    refusal says the use, the quota and what to do."""
    other = Scope("default", "another-model")
    put(registry, other, make_adapter())
    set_quota(registry, "default", bounds)
    registry.close()
    before = tree(registry)
    with pytest.raises(OverQuota) as refused:
        put(registry, scope, make_adapter("b", 1), name="b1")
    used = registry.accounts.usage("default")
    (bound,) = bounds.values()
    shown = len(used.names) if "adapters" in bounds else used.size_bytes
    for said in (str(shown), str(bound), "unregister what it does not need", "lora-fs quota"):
        assert said in str(refused.value)
    registry.close()
    assert tree(registry) == before
    put(registry, Scope("free", "tiny"), make_adapter("b", 1))
    put(registry, other, make_adapter(), labels={"same": "bytes"})
    release.unregister(registry, other, "a1", writer="test")
    put(registry, scope, make_adapter("b", 1), name="b1")


def test_rate(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """A quota bounds the registrations in a minute over all hosts together, also those that somebody
    withdrew since. The refusal says when to come back."""
    allow(registry, registrations_per_minute=2)
    put(registry, scope, make_adapter())
    release.unregister(registry, scope, "a1", writer="test")
    elsewhere = Registry(registry.layout.root)
    put(elsewhere, scope, make_adapter("b", 1), name="b1")
    with pytest.raises(TooManyRegistrations) as refused:
        put(registry, scope, make_adapter("c", 2), name="c1")
    assert WINDOW_S - 20 < refused.value.retry_after_s <= WINDOW_S
    assert f"again in {refused.value.retry_after_s:.0f} s" in str(refused.value)
    put(registry, scope, make_adapter("b", 1), name="b1")  # the same bytes: nothing is written
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=WINDOW_S)
    registry.accounts = Accounts(registry, now=lambda: later)
    put(registry, scope, make_adapter("c", 2), name="c1")


def test_changes_of_settings_are_no_registrations(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Changes of policies and labels do not count as registrations. Bytes that come back count again."""
    allow(registry, registrations_per_minute=3)
    put(registry, scope, make_adapter())
    for number in range(4):
        amend(registry, scope, "a1", [with_labels({"at": str(number)})], writer="test")
    assert len(registry.accounts.usage("default").recent) == 1
    release.unregister(registry, scope, "a1", writer="test")
    put(registry, scope, make_adapter())
    assert len(registry.accounts.usage("default").recent) == 2
    put(registry, scope, make_adapter("b", 1), name="b1")
    with pytest.raises(TooManyRegistrations, match="registered 3 times in the last minute; its quota is 3"):
        put(registry, scope, make_adapter("c", 2), name="c1")


def _race(root: Path, source: Path, name: str, gate: object, told: object) -> None:
    registry = Registry(root)
    gate.wait()  # type: ignore[attr-defined]
    try:
        put(registry, Scope("default", f"model-{name}"), source, name=name)
    except OverQuota:
        told.put("over")  # type: ignore[attr-defined]
    else:
        told.put("done")  # type: ignore[attr-defined]
    registry.close()


def test_writers_at_once(
    registry: Registry, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many writers register at once, no more succeed than the quota has room for. Where a lease fails
    them, the later writer withdraws its own registration.
    """
    allow(registry, adapters=2)
    gate, told = FORK.Barrier(WRITERS), FORK.Queue()
    writers = [
        FORK.Process(target=_race, args=(registry.layout.root, make_adapter(f"s{n}", n), f"a{n}", gate, told))
        for n in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    outcomes = sorted(told.get(timeout=60) for _ in writers)
    for writer in writers:
        writer.join(30)
    assert outcomes == ["done"] * 2 + ["over"] * (WRITERS - 2)
    assert len(registry.accounts.usage("default").names) == 2

    allow(registry, adapters=3)
    late, scope = Registry(registry.layout.root), Scope("default", "tiny")

    @contextmanager
    def broken(path: Path, *, wait_s: float) -> Iterator[Turn]:
        yield Turn(held=True)

    monkeypatch.setattr(quota, "lease", broken)
    publish = late.append

    def asleep(*arguments: object, **options: object) -> object:
        """Another host registers between this one's count and its write."""
        monkeypatch.setattr(late, "append", publish)
        put(registry, scope, make_adapter("first", 20), name="first")
        return publish(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(late, "append", asleep)
    with pytest.raises(OverQuota):
        put(late, scope, make_adapter("second", 21), name="second")
    assert served(registry, scope) == {"first": "v1"}
    assert len(registry.accounts.usage("default").names) == 3


def test_dropped(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped folder over quota stays where it is. `lora-fs status` reports it as `NotAdopted`. A
    replica adopts it once there is room."""
    put(registry, scope, make_adapter(), name="first")
    allow(registry, adapters=1)
    site = Site(registry, scope)
    write_adapter(site.folder, 1)
    read = []
    monkeypatch.setattr(copying, "validate", lambda *_, **__: read.append(1))
    assert site.settle() == {"first": "v1"}
    assert site.refusal().startswith("OverQuota: dropped would be one adapter more")
    assert site.step(QUOTA_RETRY_S) == {"first": "v1"}
    assert not read, "what does not fit is not read again and again"
    assert (site.folder / "adapter_model.safetensors").exists()
    monkeypatch.undo()
    release.unregister(registry, scope, "first", writer="test")
    assert site.step(1) == {}
    assert site.step(QUOTA_RETRY_S) == {"dropped": "v1"}
    assert site.refusal() == ""
    write_adapter(site.folder, 2, rank=8)
    allow(registry, size_bytes=registry.accounts.usage("default").size_bytes)
    assert site.settle() == {"dropped": "v1"}
    assert site.refusal().startswith("OverQuota: default/tiny/v1/dropped would need")


def test_dropped_under_a_quota_that_is_not_known(registry: Registry, scope: Scope) -> None:
    """Where a namespace's quota is damaged a replica refuses its drops for that reason, and looks again
    in 30 s."""
    allow(registry, adapters=1)
    path = registry.layout.quota("default")
    whole = path.read_bytes()
    path.write_text("garbage")
    site = Site(registry, scope)
    write_adapter(site.folder, 1)
    assert site.settle() == {}
    assert site.refusal().startswith(f"OperatorError: {path}: ")
    path.write_bytes(whole)
    assert site.step(QUOTA_RETRY_S - 1) == {}
    assert site.step(1) == {"dropped": "v1"}
    assert site.refusal() == ""


@pytest.mark.parametrize("damage", ["{", "", '{"sum": "0"}', "other", "folder"])
def test_damaged(registry: Registry, scope: Scope, make_adapter: MakeAdapter, damage: str) -> None:
    """An unreadable quota lets nobody register, and takes nothing away that is registered."""
    put(registry, scope, make_adapter())
    path = registry.layout.quota("default")
    if damage == "folder":
        path.mkdir()
    elif damage == "other":
        allow(registry, "team-b", adapters=9)
        shutil.copy(registry.layout.quota("team-b"), path)
    else:
        path.write_text(damage)
    with pytest.raises(OperatorError, match=r"\.quota\.json.*`lora-fs quota`"):
        put(registry, scope, make_adapter("b", 1), name="b1")
    assert served(registry, scope) == {"a1": "v1"}
    if damage != "folder":
        registry.accounts.remove("default")
        put(registry, scope, make_adapter("b", 1), name="b1")


def test_never_refused(lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """A quota never refuses to unregister, promote or roll back, nor anything else that makes nothing
    grow."""
    for number in (1, 2):
        lora_fs("register", "a", folder(number))
    assert lora_fs("quota", "--adapters", "0", "--bytes", "0", "--per-minute", "0").code == 0
    assert lora_fs("promote", "a", "v1").code == 0
    assert lora_fs("rollback", "a").code == 0
    assert lora_fs("register", "a", folder(1)).code == 0
    assert lora_fs("register", "a", folder(3)).code == 7
    assert lora_fs("unregister", "a", "--revision", "v1", "--force").code == 0
    assert lora_fs("register", "a", folder(1), "--dry-run").code == 7
    assert lora_fs("unregister", "a").code == 0


def test_over_http_it_is_told() -> None:
    """Over HTTP a quota's refusal is 403. That of the rate is 429 with `Retry-After`."""
    from lora_fs.sidecar.server.middleware.errors import respond

    answers: list[LoraFsError] = [OverQuota("full"), TooManyRegistrations("often", retry_after_s=12.2)]
    told = [(one.status_code, one.headers.get("retry-after")) for one in map(respond, answers)]
    assert told == [(403, None), (429, "13")]
