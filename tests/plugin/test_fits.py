"""An adapter fits by the whole model's sizes, whatever share of them a tensor-parallel rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.utils import from_layer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from lora_fs.worker_patch.worker.load.fits import DoesNotFit, check_fits
from lora_fs.worker_patch.worker.models import TieredModelManager
from tests.plugin.tensor_parallel import be_rank

MOST_RANK = 16
INPUTS = 64
HEAD = 16
HEADS, KV_HEADS = 16, 4
Q, KV = HEADS * HEAD, KV_HEADS * HEAD


class Kind(NamedTuple):
    """A layer, and what an adapter has for it: outputs of each A and B."""

    build: Callable[[], torch.nn.Module]
    packed: int
    wrapper: str
    outputs: tuple[int, ...]


KINDS = {
    "column": Kind(lambda: ColumnParallelLinear(INPUTS, 96, bias=False), 0, "ColumnParallelLinear", (96,)),
    "merged": Kind(
        lambda: MergedColumnParallelLinear(INPUTS, [96, 96], bias=False),
        2,
        "MergedColumnParallelLinear",
        (96, 96),
    ),
    "fused": Kind(
        lambda: MergedColumnParallelLinear(INPUTS, [96, 96], bias=False), 1, "ColumnParallelLinear", (192,)
    ),
    "qkv": Kind(
        lambda: QKVParallelLinear(INPUTS, HEAD, HEADS, KV_HEADS, bias=False),
        3,
        "MergedQKVParallelLinear",
        (Q, KV, KV),
    ),
    "fused qkv": Kind(
        lambda: QKVParallelLinear(INPUTS, HEAD, HEADS, KV_HEADS, bias=False),
        1,
        "QKVParallelLinear",
        (Q + 2 * KV,),
    ),
    "row": Kind(lambda: RowParallelLinear(INPUTS, 96, bias=False), 0, "RowParallelLinear", (96,)),
    "replicated": Kind(lambda: ReplicatedLinear(INPUTS, 96, bias=False), 0, "ReplicatedLinear", (96,)),
    "slices": Kind(
        lambda: MergedColumnParallelLinear(INPUTS, [64, 32, 16], bias=False),
        3,
        "MergedColumnParallelLinearVariableSlice",
        (64, 32, 16),
    ),
    "fused slices": Kind(
        lambda: MergedColumnParallelLinear(INPUTS, [64, 32, 16], bias=False),
        1,
        "MergedColumnParallelLinearVariableSlice",
        (112,),
    ),
}
# With --fully-sharded-loras; the others have no such variant.
SHARDED = ("column", "merged", "fused", "qkv", "fused qkv", "row")

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


@pytest.fixture(params=[(0, 1), (1, 2), (0, 8), (5, 8)], ids="{0[0]} of {0[1]}".format)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A rank among one, two, or more than there are kv heads."""
    rank, size = request.param
    be_rank(monkeypatch, rank, size)
    return int(size)


def layer(kind: Kind, *, fully_sharded: bool = False) -> BaseLinearLayerWithLoRA:
    config = LoRAConfig(
        max_lora_rank=MOST_RANK,
        max_loras=2,
        lora_dtype=torch.float32,
        fully_sharded_loras=fully_sharded,
    )
    return from_layer(kind.build(), 2, config, [f"part{n}" for n in range(kind.packed)])


def check(
    module: BaseLinearLayerWithLoRA, outputs: Sequence[int | None], *, inputs: int = INPUTS, rank: int = 8
) -> None:
    """Look at an adapter of these sizes as the manager does; None where it has nothing."""
    manager: Any = TieredModelManager.__new__(TieredModelManager)
    manager.modules, manager.is_pooling_model = {"m.layer": module}, False
    a = [None if width is None else torch.zeros(rank, inputs) for width in outputs]
    b = [None if width is None else torch.zeros(width, rank) for width in outputs]
    alphas: list[int | None] = [rank] * len(outputs)
    weights = (
        PackedLoRALayerWeights("m.layer", rank, alphas, a, b)
        if len(outputs) > 1
        else LoRALayerWeights("m.layer", rank, rank, a[0], b[0])
    )
    check_fits(manager, LoRAModel(1, rank, {"m.layer": weights}), whole_model=True)


@kinds
def test_the_whole_models_sizes_fit(world: int, kind: Kind) -> None:
    """And vLLM's layer takes them: its slot is filled from edge to edge."""
    module = layer(kind)
    assert type(module).__name__ == f"{kind.wrapper}WithLoRA"
    check(module, kind.outputs)
    check(module, kind.outputs, rank=MOST_RANK)
    ones = [torch.ones(MOST_RANK, INPUTS) for _ in kind.outputs]
    others = [torch.ones(width, MOST_RANK) for width in kind.outputs]
    module.set_lora(1, *((ones, others) if len(ones) > 1 else (ones[0], others[0])))
    assert all(stack[1].bool().all() for stack in (*module.lora_a_stacked, *module.lora_b_stacked))


@kinds
def test_other_sizes_do_not_fit(world: int, kind: Kind) -> None:
    """Neither a rank's share, nor twice or half of the whole; the layer is named, and both sizes."""
    module = layer(kind)
    for factor in (0.125, 0.5, 2, 8):
        for at, width in enumerate(kind.outputs):
            wrong = [*kind.outputs[:at], int(factor * width), *kind.outputs[at + 1 :]]
            with pytest.raises(DoesNotFit, match=rf"^m\.layer: .* {wrong[at]}, the model's is .* {width}$"):
                check(module, wrong)
        with pytest.raises(DoesNotFit, match=f"the model's is {INPUTS} →"):
            check(module, kind.outputs, inputs=int(factor * INPUTS))


@kinds
def test_a_rank_over_the_engines(world: int, kind: Kind) -> None:
    """However many ranks share the model."""
    with pytest.raises(DoesNotFit, match=f"LoRA rank {MOST_RANK + 1} is greater than max_lora_rank"):
        check(layer(kind), kind.outputs, rank=MOST_RANK + 1)


@pytest.mark.parametrize("kind", [KINDS[name] for name in SHARDED], ids=SHARDED)
def test_fully_sharded(world: int, kind: Kind) -> None:
    """A slot has a share of the other matrix too; the adapter's sizes are the same."""
    module = layer(kind, fully_sharded=True)
    check(module, kind.outputs, rank=MOST_RANK)
    with pytest.raises(DoesNotFit, match="the model's is"):
        check(module, [width // 2 for width in kind.outputs])
    with pytest.raises(DoesNotFit, match="--max-lora-rank"):
        check(module, kind.outputs, rank=2 * MOST_RANK)


def test_a_part_that_the_adapter_leaves_alone(world: int) -> None:
    module = layer(KINDS["qkv"])
    check(module, (Q, None, KV))
    with pytest.raises(DoesNotFit, match="the model's is"):
        check(module, (None, None, Q))


def test_parts_of_several_slices(world: int) -> None:
    """Left to the layer, which finds the slices that a part covers by their sizes."""
    check(layer(KINDS["slices"]), (96, 16))
