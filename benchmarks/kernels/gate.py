"""Whether a result may be timed: the tolerance of docs/kernels.md against the reference in fp64."""

from __future__ import annotations

import math

import numpy as np
import torch

from lora_fs.kernels import reference
from lora_fs.kernels.segments import Plan
from lora_fs.kernels.weights.layout import Layer, Packed

EPSILON = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
# Peers that round the product to y's type before they add it. Source: ``do_expand_kernel`` of vLLM 0.32, and
# ``chunked_sgmv_expand`` of SGLang 0.5.23.
ROUND_THE_PRODUCT = frozenset({"vllm", "csgmv", "csgmv tuned"})


def times_tolerance(
    found: torch.Tensor,
    before: torch.Tensor,
    x: torch.Tensor,
    layer: Layer,
    plan: Plan,
    *,
    rounds_product: bool = False,
) -> float:
    """The worst error in units of what is allowed: right if at most 1.

    Allowed is ``ε·|y| + ε·scale·(|z|·|B|) + 1e-5``, where ε is of y's type. A NaN, or a bit changed in
    a row without an adapter, is infinitely wrong.

    Args:
        found: ``[T, N]``, the operation's result.
        before: ``[T, N]``, what it was added to.
        x: ``[T, K]``.
        layer: on the same device.
        rounds_product: of an operation that rounds what it adds to y before it adds, and so once more: its
            own rounding is allowed, ``ε·|product|``.
    """
    wanted, magnitude = before.double(), torch.zeros_like(before, dtype=torch.float64)
    z = reference.shrink(x, layer, plan)
    reference.expand(wanted, z, layer, plan)
    reference.expand(magnitude, z.abs_(), _positive(layer), plan)
    magnitude.add_(wanted.abs())
    if rounds_product:
        magnitude.add_((wanted - before).abs_())
    magnitude.mul_(EPSILON[found.dtype]).add_(1e-5)
    error = wanted.sub_(found).abs_().div_(magnitude)
    worst = float(error.max().nan_to_num(math.inf)) if error.numel() else 0.0
    bare = torch.ones(plan.rows, dtype=torch.bool)
    bare[torch.from_numpy(plan.order.astype(np.int64))] = False
    bare = bare.to(found.device)
    return worst if torch.equal(found[bare], before[bare]) else math.inf


def _positive(layer: Layer) -> Layer:
    """The layer with ``|B|`` and ``|scale|``."""
    positive = Layer.empty(layer.shape, len(layer.packed))
    for slot, packed in enumerate(layer.packed):
        if packed is not None:
            b = tuple(None if one is None else one.abs() for one in packed.b)
            positive.put(slot, Packed(packed.a, b, packed.ranks, abs(packed.scale)))
    return positive
