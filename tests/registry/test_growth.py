"""What one more adapter takes of a view and of maintenance does not grow with those that there are.

Counted in Python's function calls, which are the same on any machine.
"""

from __future__ import annotations

import gc as gc_module
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.backup import archive, export, restore
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.maintenance import fsck, gc, survey
from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from tests.registry.conftest import MakeAdapter
from tests.registry.test_operations import put

SCOPE = Scope("default", "tiny")


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called, and generators resumed; none of what the collector finds meanwhile."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc_module.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc_module.enable()
    return count


def collect(registry: Registry, _: Path) -> None:
    """Look for all that gc would remove."""
    assert gc.find(registry, SCOPE, frozenset(), -10.0, history_s=-10.0)


def check(registry: Registry, _: Path) -> None:
    """Look for all that is wrong."""
    list(fsck.find(registry, survey.look(registry), older_than_s=0, hash_files=False))


def back_up(registry: Registry, folder: Path) -> None:
    """Export all but the files."""
    export.to_file(registry, [SCOPE], folder / "export.tar", artifacts=False)


def bring_back(_: Registry, folder: Path) -> None:
    """Restore what was exported last."""
    file = folder / "export.tar"
    restore.restore(folder / f"restored-{file.stat().st_size}", file, archive.read(file))


@pytest.mark.parametrize("work", [collect, check, back_up, bring_back])
def test_work_grows_with_what_there_is(
    registry: Registry,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    work: Callable[[Registry, Path], None],
) -> None:
    """Twice as many more cost twice as much more; half of the adapters are withdrawn."""
    source, counts = make_adapter(), []
    for number in range(24):
        put(registry, SCOPE, source, name=f"a{number}")
        if number % 2:
            release.unregister(registry, SCOPE, f"a{number}", writer="test")
        if number + 1 in (6, 12, 24):
            back_up(registry, tmp_path)
            registry.close()  # its own temporary names are due in 50 ms
            counts.append(calls_of(lambda: work(registry, tmp_path)))
    few, twice, all_of_them = counts
    assert (all_of_them - twice) / (twice - few) == pytest.approx(2, rel=0.1), counts


def test_seeing_a_change_costs_the_same_however_many_came_before(
    registry: Registry, make_adapter: MakeAdapter
) -> None:
    """All of them since the tree was listed last."""
    view, source, counts = RegistryView(Registry(registry.layout.root), (SCOPE,)), make_adapter(), []
    view.refresh()
    for number in range(32):
        put(registry, SCOPE, source, name=f"a{number:02d}")
        counts.append(calls_of(view.refresh))
    assert counts[31] <= 1.1 * counts[3], counts


def test_a_writer_remembers_so_many_folders(
    tmp_path: Path, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's next revision has a folder of its own, each time."""
    monkeypatch.setattr(writer, "SYNCED", 3)
    registry = Registry(tmp_path / "root", create=True)
    for number in range(4):
        put(registry, SCOPE, make_adapter(seed=number))
    assert registry._sync_once.cache_info().currsize == 3


def test_a_count_of_a_namespace_lists_each_folder_once(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many adapters were registered in the last minute."""
    for number in range(3):
        put(registry, scope, make_adapter(str(number), number), name=f"a{number}")
    listed, real = Counter[str](), os.listdir

    def count(folder: Path) -> list[str]:
        listed[str(folder)] += 1
        return real(folder)

    monkeypatch.setattr(os, "listdir", count)
    assert len(registry.accounts.usage("default").recent) == 3
    assert listed[str(registry.layout.revision(scope, "v1"))] == 1
