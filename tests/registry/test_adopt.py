"""Folder drops: adopted when whole and still, withdrawn when taken away."""

from __future__ import annotations

import shutil

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.adopt import Adopter, natural_order
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import MakeAdapter, write_adapter


class Clock:
    """A clock the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_dropped_folder_is_adopted_once_it_is_whole_and_still(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Half a copy is not adopted however long it lies there; the whole one is, after settling."""
    clock = Clock()
    view = RegistryView(registry, (scope,))
    adopter = Adopter(registry, Expectation(), settle_s=2.0, writer="test", clock=clock)

    def step(seconds: float) -> list[str]:
        clock.now += seconds
        view.refresh(force=True)
        adopter.step(view.desired)
        view.refresh(force=True)
        return [name for _, name, _ in view.desired.active()]

    folder = registry.layout.revision(scope, "v1") / "dropped"
    weights = folder / "adapter_model.safetensors"
    write_adapter(folder)
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert step(0) == []
    assert step(100) == []
    assert len(adopter.refusals()) == 1
    weights.write_bytes(whole)
    assert step(0.1) == []
    assert step(1) == []
    assert step(2) == ["dropped"]
    shutil.rmtree(folder)
    assert step(1) == ["dropped"]
    assert step(1) == []


def test_natural_order() -> None:
    """v10 comes after v9."""
    assert natural_order("v10") > natural_order("v9")
