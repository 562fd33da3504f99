"""Launches made once compute whatever the static buffers hold when they are made again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lora_fs.kernels import gpu, reference
from lora_fs.kernels.memory.arena import Arena
from lora_fs.kernels.segments import NO_SLOT, plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape, pack
from lora_fs.kernels.weights.slabs import Weights, pack_slab
from tests.ops.conftest import assert_close, make_rows, slots_of_rows
from tests.ops.gpu.conftest import DEVICE, INTERPRETED, capture

SHAPES = {"qkv": Shape(64, (32, 16, 16)), "embedding": Shape(40, (64,), lookup=True)}
ROWS = 40


def weights(shape: Shape, ranks: Sequence[int], dtype: torch.dtype, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    a = [torch.randn(r, shape.inputs, generator=random).to(dtype) if r else None for r in ranks]
    b = [
        torch.randn(n, r, generator=random).to(dtype) if r else None
        for r, n in zip(ranks, shape.outputs, strict=True)
    ]
    return Weights(a, b, scale=0.5)


class Model:
    """Two layers in an arena full of NaN, and the same on the CPU for the reference."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.arena = Arena(SHAPES, slots=4, size_bytes=1 << 20, max_rank=80, dtype=dtype, device=DEVICE)
        self.arena._storage.fill_(torch.nan)
        self.copies = {name: Layer.empty(shape, 4) for name, shape in SHAPES.items()}
        self.plan = gpu.DevicePlan(ROWS, 4, DEVICE)
        self.x = torch.zeros(ROWS, 64, dtype=dtype, device=DEVICE)
        self.tokens = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
        self.y = torch.zeros(ROWS, 64, dtype=dtype, device=DEVICE)
        self.embedded = torch.zeros(ROWS, 64, dtype=dtype, device=DEVICE)

    def step(self) -> None:
        gpu.linear(self.y, self.x, self.arena.layer("qkv"), self.plan)
        gpu.embedding(self.embedded, self.tokens, self.arena.layer("embedding"), self.plan)

    def load(self, slot: int, ranks: Sequence[int], seed: int) -> None:
        adapter = {
            "qkv": weights(SHAPES["qkv"], ranks, self.dtype, seed),
            "embedding": weights(SHAPES["embedding"], [max(ranks)], self.dtype, seed),
        }
        self.arena.load(slot, pack_slab(SHAPES, adapter, self.dtype, pinned=DEVICE.type == "cuda"))
        for name, of_layer in adapter.items():
            self.copies[name].put(slot, pack(SHAPES[name], of_layer.a, of_layer.b, of_layer.scale))

    def free(self, slot: int) -> None:
        """Empty a slot; who reads of it what is left in the tables adds NaN."""
        self.arena.free(slot)
        self.arena._rows.view(torch.float32)[slot] = torch.nan
        for copy in self.copies.values():
            copy.put(slot, None)

    def check(self, replay: object, slots: np.ndarray, seed: int) -> None:
        """Fill the buffers with a batch, replay, compare; padded rows are the poisoned ones, and rows of an
        empty slot are in no plan.
        """
        assert callable(replay)
        plan = plan_rows(np.where(np.isin(slots, list(self.arena._shown)), slots, NO_SLOT))
        x = make_rows(ROWS, 64, self.dtype, seed)
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(40, size=ROWS))
        y, embedded = make_rows(ROWS, 64, self.dtype, seed + 1), make_rows(ROWS, 64, self.dtype, seed + 2)
        for static, filled in (
            (self.x, x),
            (self.tokens, tokens),
            (self.y, y),
            (self.embedded, embedded),
        ):
            static.copy_(filled)
        self.x[len(slots) :] = torch.nan
        self.plan.upload(plan, ROWS)
        replay()
        for name, found, before in (("qkv", self.y, y), ("embedding", self.embedded, embedded)):
            layer, live = self.copies[name], slice(0, len(slots))
            wanted = before[live].double()
            if name == "qkv":
                reference.linear(wanted, x[live], layer, plan)
                z = reference.shrink(x[live], layer, plan)
            else:
                reference.embedding(wanted, tokens[live], layer, plan)
                z = torch.zeros(len(slots), layer.widest, dtype=torch.float64)
                for slot, start, rows in plan.segments:
                    packed = layer.packed[slot]
                    if packed is not None:
                        at = torch.from_numpy(plan.order[start : start + rows]).long()
                        z[at, : packed.rank] = packed.a[tokens[at]].double()
            assert_close(found[live].cpu(), wanted, layer, plan, z)
            assert torch.equal(found[len(slots) :].cpu(), before[len(slots) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16] if INTERPRETED else [torch.float32, torch.bfloat16])
def test_a_replay_follows_plans_adapters_and_compaction(dtype: torch.dtype) -> None:
    """Captured on an empty arena and an empty plan; then batches, adapters and places change."""
    model = Model(dtype)
    model.plan.upload(plan_rows(np.array([], dtype=np.int64)), ROWS)
    replay = capture(model.step)
    model.check(replay, slots_of_rows((NO_SLOT, 4)), seed=1)
    model.load(1, [3, 1, 0], seed=1)
    model.load(3, [80, 16, 8], seed=2)
    model.check(replay, slots_of_rows((1, 1), (3, 20), (NO_SLOT, 2), (2, 1), (1, 2)), seed=10)
    model.check(replay, slots_of_rows((3, ROWS)), seed=20)
    model.free(1)
    model.load(0, [16, 16, 16], seed=3)
    model.check(replay, slots_of_rows((1, 5), (0, 3), (3, 1), (0, 17)), seed=30)
    model.arena.compact()
    model.check(replay, slots_of_rows((0, 1), (3, 1), (1, 1), (2, 1)), seed=40)
    model.free(3)
    model.free(0)
    model.check(replay, slots_of_rows((0, 8), (3, 8)), seed=50)


def test_launches_before_the_first_upload_do_nothing() -> None:
    """A plan that was never uploaded has no tiles."""
    model = Model(torch.float32)
    model.load(0, [4, 4, 4], seed=1)
    plan = gpu.DevicePlan(ROWS, 4, DEVICE)
    plan.rows, plan.tiles = ROWS, 4
    gpu.linear(model.y, model.x, model.arena.layer("qkv"), plan, add=False)
    assert not model.y.any()
