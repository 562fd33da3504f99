"""Killed at every filesystem call: readers find the state before or after, and a repeat completes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import leases
from tests.crash.acts import Found, check, look, look_at_folders, stage
from tests.registry.conftest import MakeAdapter
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


@pytest.mark.parametrize(
    "calls", [CHANGES, pytest.param(CALLS, marks=pytest.mark.long)], ids=["changes", "all"]
)
@pytest.mark.parametrize(
    "what", ["register", "register again", "promote", "unregister", "adopt", "take away"]
)
def test_killed_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, calls: list[str]
) -> None:
    """No point of a command leaves anything but its beginning, its end, or a revision not yet active."""
    monkeypatch.setattr(leases, "ABANDONED_S", 0.0)
    staged = stage(tmp_path, what)
    seen, number, killed = set[Found](), 0, True
    while killed:
        number += 1
        root = staged.copy(tmp_path / f"killed-{number}")
        killed = killed_before_call(number, calls, root, staged.act)
        seen.add(look(root))
        check(staged, root, (), ended=not killed)
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
        assert look(root).served == (("a1", "v1"),)
        record = act(Registry(root)).record
        assert (record.revision, record.origin, record.spec.labels) == ("v2", "register", {"team": "care"})
        assert look(root).served == (("a1", "v1"),)
        shutil.rmtree(root)
    assert orphans > 0
