"""The view learns, and never unlearns for an absence or a damaged file."""

from __future__ import annotations

import shutil

import pytest

from lora_fs.sidecar.errors import RegistryLost
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView
from tests.registry.conftest import MakeAdapter
from tests.registry.test_operations import put


def names(view: RegistryView) -> list[str]:
    return sorted(name for _, name, _ in view.desired.active())


def test_garbage_in_a_record_keeps_the_last_good_state(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A record edited into garbage is reported, and what it said before is in force."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    record = registry.layout.revision(scope, "v1") / "a1.@00000002.json"
    record.write_text("garbage")
    view.refresh(force=True)
    assert names(view) == ["a1"]
    assert len(view.desired.problems) == 1


def test_absence_withdraws_nothing(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Records that vanish are not tombstones: the view keeps them, and says so when many go."""
    for index in range(8):
        put(registry, scope, make_adapter(seed=index), name=f"a{index}")
    view = RegistryView(registry, (scope,))
    view.refresh()
    shutil.rmtree(registry.layout.scope(scope))
    view.refresh(force=True)
    assert len(names(view)) == 8
    assert view.desired.frozen is not None


def test_an_unmounted_volume_is_not_an_empty_registry(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """An empty folder where the registry was is RegistryLost, and the state stays."""
    put(registry, scope, make_adapter())
    view = RegistryView(registry, (scope,))
    view.refresh()
    root = registry.layout.root
    root.rename(root.with_name("away"))
    root.mkdir()
    with pytest.raises(RegistryLost):
        view.refresh(force=True)
    assert names(view) == ["a1"]
    root.rmdir()
    root.with_name("away").rename(root)
    view.refresh(force=True)
    assert names(view) == ["a1"]
