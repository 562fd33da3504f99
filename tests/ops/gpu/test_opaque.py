"""torch.compile takes the operations as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu import opaque
from lora_fs.kernels.layout import Layer, Shape
from lora_fs.kernels.segments import plan_rows
from tests.ops.conftest import make_layer, make_rows
from tests.ops.gpu.conftest import DEVICE, on_device

ROWS = 6


@pytest.fixture
def bound() -> Iterator[tuple[Layer, gpu.DevicePlan]]:
    layer = on_device(make_layer(Shape(32, (16, 8)), [[4, 1], [20, 3]], torch.float32))
    plan = gpu.DevicePlan(ROWS, 2, DEVICE)
    opaque.bind("layers.0.qkv", layer, plan)
    yield layer, plan
    opaque.unbind("layers.0.qkv")


def test_a_compiled_model_follows_the_plan(bound: tuple[Layer, gpu.DevicePlan]) -> None:
    """Traced once, with no graph break; every step computes what was uploaded for it."""
    layer, plan = bound
    base = make_rows(24, 32, torch.float32, seed=5).to(DEVICE)
    traces = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        traces.append([node for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x @ base.T
        torch.ops.lora_fs.linear(y, x, "layers.0.qkv", True)
        return y * 2

    model = torch.compile(forward, fullgraph=True, backend=backend)
    for seed, slots in enumerate(([0, 1, 0, -1, 1, 1], [-1, -1, 1, 1, 0, 0])):
        x = make_rows(ROWS, 32, torch.float32, seed).to(DEVICE)
        plan.upload(plan_rows(np.array(slots)))
        wanted = x @ base.T
        gpu.linear(wanted, x, layer, plan)
        assert torch.equal(model(x), wanted * 2)
    assert len(traces) == 1


def test_the_operation_declares_what_it_changes(bound: tuple[Layer, gpu.DevicePlan]) -> None:
    """torch's own check of custom operations: schema, fake tensors, tracing."""
    bound[1].upload(plan_rows(np.array([0, 1, 0, -1, 1, 1])))
    x, y = make_rows(ROWS, 32, torch.float32).to(DEVICE), make_rows(ROWS, 24, torch.float32).to(DEVICE)
    torch.library.opcheck(
        torch.ops.lora_fs.linear.default,
        (y, x, "layers.0.qkv", True),
        test_utils=("test_schema", "test_faketensor"),
    )
