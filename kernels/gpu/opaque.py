"""The operations as torch's own, for models that torch.compile traces.

The compiler sees one call that changes ``y``. It looks up its layer and its plan by name when
it runs. So neither ends up as a constant or a guard of a compiled graph.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu.plan import DevicePlan
from lora_fs.kernels.layout import Layer


@dataclass(frozen=True, slots=True)
class Bound:
    """What a name stands for."""

    layer: Layer
    plan: DevicePlan


_bound: dict[str, Bound] = {}


def bind(name: str, layer: Layer, plan: DevicePlan) -> None:
    """Let a name stand for a layer and the plan that every step uploads; replaces what it stood for."""
    _bound[name] = Bound(layer, plan)


def unbind(name: str) -> None:
    del _bound[name]


@torch.library.custom_op("lora_fs::linear", mutates_args=("y",))
def linear(y: torch.Tensor, x: torch.Tensor, name: str, add: bool) -> None:
    """See ``reference.linear``; ``name`` was given to ``bind``."""
    bound = _bound[name]
    gpu.linear(y, x, bound.layer, bound.plan, add=add)


@torch.library.custom_op("lora_fs::embedding", mutates_args=("y",))
def embedding(y: torch.Tensor, tokens: torch.Tensor, name: str, add: bool) -> None:
    """See ``reference.embedding``; ``name`` was given to ``bind``.

    A draft model may share the layer, and asks for fewer rows than the plan has: they stay as they are.
    """
    bound = _bound[name]
    if y.shape[0] < bound.plan.rows:
        return
    gpu.embedding(y, tokens, bound.layer, bound.plan, add=add)


@linear.register_fake
def _(y: torch.Tensor, x: torch.Tensor, name: str, add: bool) -> None: ...


@embedding.register_fake
def _(y: torch.Tensor, tokens: torch.Tensor, name: str, add: bool) -> None: ...
