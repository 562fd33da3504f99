"""The seam between a compiled model and the kernels: one operation a layer, ready before the first step.

Run by ``test_interpreted``, in a process where Triton interprets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu import launch
from lora_fs.kernels.gpu.configs import Expand, Shrink
from lora_fs.kernels.gpu.plan import SMALL_ROWS, DevicePlan
from lora_fs.kernels.segments import plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape
from lora_fs.worker_patch.worker.ops import opaque
from tests.ops.conftest import make_layer, make_rows
from tests.plugin.block import Make, adapter, serve

ROWS = 6
SLOTS = np.array([0, 1, 0, -1, 1, 1])


class Named:
    """Whether the step names an adapter."""

    value = True

    def __call__(self) -> bool:
        return self.value


@pytest.fixture
def named() -> Named:
    return Named()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, named: Named) -> tuple[Layer, DevicePlan]:
    """Two layers that are alike, with the plan of a step."""
    monkeypatch.setattr(opaque, "_bound", {})
    layer = make_layer(Shape(32, (16, 8)), [[4, 1], [20, 3]], torch.float32)
    plan = DevicePlan(ROWS, 2, "cpu")
    for name in ("layers.0.qkv", "layers.1.qkv"):
        opaque.bind(name, layer, plan, named)
    return layer, plan


def linear(y: torch.Tensor, x: torch.Tensor, name: str) -> None:
    torch.ops.lora_fs.linear(y, x, opaque.encode(name), True)


def test_a_compiled_model_follows_the_plan(bound: tuple[Layer, DevicePlan]) -> None:
    """Traced once, with no graph break; every step computes what was uploaded for it."""
    layer, plan = bound
    base = make_rows(24, 32, torch.float32, seed=5)
    traces = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        traces.append(module)
        return module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x @ base.T
        linear(y, x, "layers.0.qkv")
        return y * 2

    model = torch.compile(forward, fullgraph=True, backend=backend)
    for seed, slots in enumerate((SLOTS, SLOTS[::-1].copy())):
        x = make_rows(ROWS, 32, torch.float32, seed)
        plan.upload(plan_rows(slots))
        wanted = x @ base.T
        gpu.linear(wanted, x, layer, plan)
        assert torch.equal(model(x), wanted * 2)
    assert len(traces) == 1


def test_the_operation_declares_what_it_changes(bound: tuple[Layer, DevicePlan]) -> None:
    """torch's own check of custom operations: schema, fake tensors."""
    bound[1].upload(plan_rows(SLOTS))
    x, y = make_rows(ROWS, 32, torch.float32), make_rows(ROWS, 24, torch.float32)
    torch.library.opcheck(
        torch.ops.lora_fs.linear.default,
        (y, x, opaque.encode("layers.0.qkv"), True),
        test_utils=("test_schema", "test_faketensor"),
    )


class Launches:
    """The tiles and kernels of all launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        for name in ("shrink_planes", "expand"):
            monkeypatch.setattr(launch, name, self._counted(name, getattr(launch, name)))

    def _counted(self, name: str, run: Any) -> Any:
        def counted(*args: Any, **more: Any) -> Any:
            config = next(one for one in args if isinstance(one, Shrink | Expand))
            shape = next(one for one in args if isinstance(one, Shape))
            self.made.append((name, shape, config))
            return run(*args, **more)

        return counted


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


class Idle:
    """A kernel that computes nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: None


def test_a_step_that_names_no_adapter_launches_nothing(
    bound: tuple[Layer, DevicePlan], named: Named, launches: Launches
) -> None:
    """And leaves its rows as they are."""
    bound[1].upload(plan_rows(SLOTS))
    x, y = make_rows(ROWS, 32, torch.float32), torch.zeros(ROWS, 24)
    named.value = False
    linear(y, x, "layers.0.qkv")
    assert (launches.made, y.any()) == ([], False)
    named.value = True
    linear(y, x, "layers.0.qkv")
    assert [name for name, *_ in launches.made] == ["shrink_planes", "expand"]


def test_what_steps_launch_was_launched_before(
    make: Make, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind of layer every tile that a batch may get: nothing is compiled in a step."""
    for kernel in ("shrink_kernel", "expand_kernel"):
        monkeypatch.setattr(launch, kernel, Idle())
    manager = make("triton")
    assert not launches.made
    manager.warm()
    wrapper: Any = manager.punica_wrapper_mapping["language_model"]
    before = set(launches.made)
    assert before
    launches.made.clear()
    serve(manager, adapter(1))
    wrapper.tokens_there.upload(plan_rows(np.zeros(wrapper.tokens_there.capacity, dtype=np.int64)))
    wrapper.named = True
    for rows in (1, 40, SMALL_ROWS + 1, wrapper.tokens_there.capacity):
        wrapper.tokens_there.upload(plan_rows(np.zeros(rows, dtype=np.int64)))
        for name, target in manager.layers.targets.items():
            y = torch.zeros(rows, target.shape.width)
            if target.shape.lookup:
                target.module.punica_wrapper.add_embedding(y, torch.zeros(rows, dtype=torch.int64))
            else:
                target.module.punica_wrapper.add_lora_linear(y, torch.zeros(rows, target.shape.inputs))
            assert y.shape[0] == rows, name
    assert launches.made
    assert set(launches.made) <= before
