"""The operations as torch's own, for models that torch.compile traces.

The compiler sees one call that changes ``y``. The call looks up its layer and its plan by name when it runs:
nothing of them becomes a constant, or a guard, of a compiled graph. Where vLLM has its ``LayerName`` the name
itself is an input of the graph: layers that are alike share one compiled piece. A step that names no adapter
launches nothing, and vLLM captures its graphs apart.
Source: vllm/utils/torch_utils.py and lora/ops/triton_ops, 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils import torch_utils
from vllm.utils.torch_utils import direct_register_custom_op

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu.plan import DevicePlan
from lora_fs.kernels.weights.layout import Layer

NAME: Any = torch_utils.LayerNameType
encode: Callable[[str], Any] = torch_utils._encode_layer_name
decode: Callable[[Any], str] = torch_utils._resolve_layer_name

LIBRARY = torch.library.Library("lora_fs", "FRAGMENT")  # kept: the operations live as long as it


@dataclass(frozen=True, slots=True)
class Bound:
    """What a name stands for. ``named``: whether the step names any adapter, in a slot or not."""

    layer: Layer
    plan: DevicePlan
    named: Callable[[], bool]


_bound: dict[str, Bound] = {}


def bind(name: str, layer: Layer, plan: DevicePlan, named: Callable[[], bool]) -> None:
    """Let a name stand for a layer and the plan that every step uploads; replaces what it stood for."""
    _bound[name] = Bound(layer, plan, named)


def linear(y: torch.Tensor, x: torch.Tensor, name: Any, add: bool) -> None:
    """See ``reference.linear``; ``name``: as for ``bind``."""
    bound = _bound[decode(name)]
    if bound.named():
        gpu.linear(y, x, bound.layer, bound.plan, add=add)


def embedding(y: torch.Tensor, tokens: torch.Tensor, name: Any, add: bool) -> None:
    """See ``reference.embedding``; ``name``: as for ``bind``.

    A draft model may share the layer, and asks for fewer rows than the plan has: they stay as they are.
    """
    bound = _bound[decode(name)]
    if bound.named() and y.shape[0] >= bound.plan.rows:
        gpu.embedding(y, tokens, bound.layer, bound.plan, add=add)


def _nothing(y: torch.Tensor, given: torch.Tensor, name: Any, add: bool) -> None:
    """The result as a trace sees it: nothing is computed."""


for _operation in (linear, embedding):
    # The schema is made of these, and what they name has to be a type, and not its name.
    kinds = (torch.Tensor, torch.Tensor, NAME, bool)
    _operation.__annotations__ = dict(zip(_operation.__annotations__, (*kinds, None), strict=True))
    direct_register_custom_op(
        _operation.__name__, _operation, mutates_args=["y"], fake_impl=_nothing, target_lib=LIBRARY
    )
