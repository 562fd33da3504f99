"""Killed at every filesystem call: readers find the state before or after, and a repeat completes."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import NotFound
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.drops.adopt import RETRY_S, Adopter
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import Clock, MakeAdapter, write_adapter
from tests.registry.faults import CALLS, CHANGES
from tests.registry.test_operations import put

Act = Callable[[Registry], object]


def killed_before_call(number: int, calls: list[str], root: Path, act: Act) -> bool:
    """Run ``act`` in a child that is killed before its ``number``-th call; False if it came to its end."""
    child = os.fork()
    if child == 0:
        _be_killed(number, calls, root, act)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return False


def _be_killed(number: int, calls: list[str], root: Path, act: Act) -> None:
    try:
        registry, made = Registry(root), 0

        def counted(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        for call in calls:
            setattr(os, call, partial(counted, getattr(os, call)))
        act(registry)
    except BaseException:
        os._exit(1)
    os._exit(0)


def state(root: Path, scope: Scope) -> tuple[dict[str, str], set[str], dict[str, str]]:
    """What a fresh reader finds: active revisions, registered revisions, problems."""
    view = RegistryView(Registry(root), (scope,))
    view.refresh()
    active = {name: record.revision for _, name, record in view.desired.active()}
    present = {str(record.key) for record in view.desired.records.values() if record.present}
    return active, present, dict(view.desired.problems)


def look_at_folders(registry: Registry, scope: Scope) -> None:
    """What a replica does that comes by, and comes again after the time it leaves to others."""
    clock, view = Clock(), RegistryView(registry, (scope,))
    adopter = Adopter(registry, Expectation(), settle_s=0.0, writer="test", clock=clock)
    for _ in range(4):
        clock.now += RETRY_S
        view.refresh(force=True)
        adopter.step(view.desired)


def lasting(root: Path) -> set[str]:
    """Every file but those that gc removes: temporary names, unfinished copies, leases."""
    found = (path.relative_to(root) for path in root.rglob("*") if not path.is_dir())
    return {str(path) for path in found if not re.search(r"\.tmp-|\.incoming/|\.leases/", str(path))}


@pytest.mark.parametrize(
    "calls", [CHANGES, pytest.param(CALLS, marks=pytest.mark.long)], ids=["changes", "all"]
)
@pytest.mark.parametrize(
    "what", ["register", "register again", "promote", "unregister", "adopt", "take away"]
)
def test_killed_at_every_call(
    scope: Scope,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    calls: list[str],
) -> None:
    """No point of a command leaves anything but its beginning, its end, or a revision not yet active."""
    monkeypatch.setattr(leases, "ABANDONED_S", 0.0)
    first, second = make_adapter("first"), make_adapter("second", seed=1)

    def act(registry: Registry) -> None:
        if what.startswith("register"):
            put(registry, scope, first if what == "register" else second)
        elif what == "promote":
            release.promote(registry, scope, "a1", "v1", writer="test")
        elif what in ("adopt", "take away"):
            look_at_folders(registry, scope)
        else:
            release.unregister(registry, scope, "a1", writer="test", all_revisions=True)

    template = Registry(tmp_path / "template", create=True)
    dropped = template.layout.revision(scope, "v1") / "a1"
    if what in ("adopt", "take away"):
        write_adapter(dropped)
    elif what != "register":
        put(template, scope, first)
    if what in ("promote", "unregister"):
        put(template, scope, second)
    if what == "take away":
        look_at_folders(template, scope)
        shutil.rmtree(dropped)
    template.close()
    before = state(template.layout.root, scope)
    done = tmp_path / "done"
    shutil.copytree(template.layout.root, done)
    act(Registry(done))
    after = state(done, scope)
    assert before != after
    seen = set()
    number = 0
    killed = True
    while killed:
        number += 1
        root = tmp_path / f"killed-{number}"
        shutil.copytree(template.layout.root, root)
        killed = killed_before_call(number, calls, root, act)
        active, present, problems = state(root, scope)
        seen.add((*active.items(), *sorted(present)))
        assert problems == {}
        assert active in (before[0], after[0])
        assert before[1] <= present <= after[1] or after[1] <= present <= before[1]
        assert all(f"{scope}/{revision}/{name}" in present for name, revision in active.items())
        with suppress(NotFound):  # unregistered before it was killed
            act(Registry(root))
        assert state(root, scope) == after
        assert lasting(root) == lasting(done)
        shutil.rmtree(root)
    assert number > 20
    assert len(seen) >= 2


def test_killed_at_every_call_and_not_to_be_active(
    scope: Scope, make_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that comes by activates nothing, and the same command brings what it was to bring."""
    monkeypatch.setattr(leases, "ABANDONED_S", 0.0)
    first, second = make_adapter("first"), make_adapter("second", seed=1)
    template = Registry(tmp_path / "template", create=True)
    put(template, scope, first)
    template.close()

    def act(registry: Registry) -> Registered:
        return put(registry, scope, second, activate=False, labels={"team": "care"})

    orphans, number, killed = 0, 0, True
    while killed:
        number += 1
        root = tmp_path / f"killed-{number}"
        shutil.copytree(template.layout.root, root)
        killed = killed_before_call(number, CHANGES, root, act)
        orphans += (root / f"{scope}/v2/a1").exists() and not list(root.glob(f"{scope}/v2/*.json"))
        look_at_folders(Registry(root), scope)
        assert state(root, scope)[0] == {"a1": "v1"}
        record = act(Registry(root)).record
        assert (record.revision, record.origin, record.spec.labels) == ("v2", "register", {"team": "care"})
        assert state(root, scope)[0] == {"a1": "v1"}
        shutil.rmtree(root)
    assert orphans > 0
