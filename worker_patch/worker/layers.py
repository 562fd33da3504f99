"""The model's LoRA layers as ``kernels`` sees them, in the place of vLLM's padded stacks.

A slot then refers to an adapter's weights where they are, in host memory: filling it copies
nothing, and no memory is set aside for the largest rank. Layers of other kinds (experts,
classification heads, fully sharded ones) stay vLLM's own.
Source: vllm/lora/layers, 0.32.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers import (
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights

from lora_fs.kernels.layout import Layer, Packed, Shape, ShapeError, check_packed

Slices = list[torch.Tensor | None]

# Whose way of setting weights is the one written down here; a subclass with its own stays vLLM's.
_LINEAR = {BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora}
_CACHED = ("qkv_proj", "k_proj", "v_proj", "query_key_value", "Wqkv", "c_attn")


@dataclass(frozen=True, slots=True)
class Target:
    """One layer of the model.

    Attributes:
        writes_cache: what it computes is kept in the KV cache.
    """

    module: Any
    layer: Layer
    writes_cache: bool


class Stack(tuple[torch.Tensor, ...]):
    """Stands where vLLM keeps a linear layer's stacked weights: their shapes, and the ``target``."""

    target: Target


class ModelLayers:
    """The layers that were taken over, by name."""

    def __init__(self, slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self._slots, self._max_rank, self._dtype = slots, max_rank, dtype
        self.targets: dict[str, Target] = {}

    def take_over(self, name: str, module: Any) -> bool:
        """Put a layer of ours in the place of a module's stacks; False if it is of another kind."""
        if isinstance(module, BaseLinearLayerWithLoRA):
            if type(module).set_lora not in _LINEAR or module.lora_config.fully_sharded_loras:
                return False
            shape = Shape(module.input_size, tuple(module.output_slices))
        elif isinstance(module, LogitsProcessorWithLoRA):
            shape = Shape(module.hidden_size, (module.base_layer.vocab_size,))
        elif isinstance(module, VocabParallelEmbeddingWithLoRA):
            base = module.base_layer
            shape = Shape(base.org_vocab_size, (base.embedding_dim,), lookup=True)
        else:
            return False
        cached = any(part in name.rsplit(".", 1)[-1] for part in _CACHED)
        target = Target(module, Layer.empty(shape, self._slots), cached)
        a = tuple(self._stand_in(self._max_rank, shape.inputs) for _ in shape.outputs)
        b = tuple(self._stand_in(width, self._max_rank) for width in shape.outputs)
        if isinstance(module, BaseLinearLayerWithLoRA):
            module.lora_a_stacked, module.lora_b_stacked = Stack(a), Stack(b)
            module.lora_a_stacked.target = target
        else:
            module.lora_a_stacked, module.lora_b_stacked = a[0], b[0]
            module.lora_a_stacked.target = target
        if isinstance(module, VocabParallelEmbeddingWithLoRA):
            module.lora_a_stacked_2d = None
            module.forward = types.MethodType(_embed, module)
        self.targets[name] = target
        return True

    def _stand_in(self, rows: int, columns: int) -> torch.Tensor:
        """A tensor of a stack's shape, for those who ask for it, without its memory."""
        return torch.zeros(1, dtype=self._dtype).expand(self._slots, 1, rows, columns)

    def fill(self, slot: int, packed: Mapping[str, Packed]) -> None:
        """Let a slot mean an adapter; layers it leaves alone are emptied."""
        for name, target in self.targets.items():
            target.layer.put(slot, packed.get(name))

    def empty(self, slot: int) -> None:
        """Let a slot mean nothing, and let go of the weights."""
        self.fill(slot, {})

    def pack(self, weights: Mapping[str, LoRALayerWeights], scales: Mapping[str, float]) -> dict[str, Packed]:
        """Copy an adapter's weights into one block of memory, rank-exact.

        Args:
            weights: by layer, as vLLM read them: this rank's share is taken here.
            scales: by layer, alpha / r where it is not in B.
        Raises:
            ShapeError: names the layer and the axis.
        """
        pieces = {name: _pieces(self.targets[name], one) for name, one in weights.items()}
        shapes = {name: self.targets[name].layer.shape for name in pieces}
        sizes = [_elements(shapes[name], a, b) for name, (a, b) in pieces.items()]
        blocks = torch.empty(sum(sizes), dtype=self._dtype).split(sizes)
        packed = {}
        for (name, (a, b)), block in zip(pieces.items(), blocks, strict=True):
            try:
                packed[name] = _write(shapes[name], a, b, block, scales.get(name, 1.0))
            except ShapeError as error:
                raise ShapeError(f"{name}: {error}") from error
        return packed


def _elements(shape: Shape, a: Slices, b: Slices) -> int:
    ranks: list[int] = [0 if x is None else x.shape[0] for x in a]
    return sum(rank * (shape.inputs + width) for rank, width in zip(ranks, shape.outputs, strict=True))


def _pieces(target: Target, weights: LoRALayerWeights) -> tuple[Slices, Slices]:
    """A ``[r, K]`` and B ``[N, r]`` for each slice, of this tensor-parallel rank."""
    module, a, b = target.module, weights.lora_a, weights.lora_b
    if not isinstance(module, BaseLinearLayerWithLoRA):
        return [a], [b]
    if isinstance(b, list) and len(b) != module.n_slices:
        a, b = module.expand_packed_lora(a, b)
    if module.tp_size > 1:
        a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    return (a, b) if isinstance(a, list) else ([a], [b])


def _write(shape: Shape, a: Slices, b: Slices, block: torch.Tensor, scale: float) -> Packed:
    ranks = tuple(0 if x is None else x.shape[0] for x in a)
    stacked, rest = block.split([sum(ranks) * shape.inputs, block.numel() - sum(ranks) * shape.inputs])
    stacked = stacked.view(-1, sum(ranks)) if shape.lookup else stacked.view(-1, shape.inputs)
    into = (stacked.T if shape.lookup else stacked).split(ranks)
    transposed: list[torch.Tensor | None] = []
    for x, y, rows, width in zip(a, b, into, shape.outputs, strict=True):
        if x is None or y is None:
            transposed.append(None)
            continue
        taken, rest = rest.split([y.shape[1] * width, rest.numel() - y.shape[1] * width])
        transposed.append(taken.view(y.shape[1], width))
        _copy("A", rows, x)
        _copy("B", taken.view(y.shape[1], width), y.to(block.dtype).T)
    packed = Packed(stacked, tuple(transposed), ranks, scale)
    check_packed(shape, packed)
    return packed


def _copy(which: str, into: torch.Tensor, source: torch.Tensor) -> None:
    """What ``into`` has more, as a vocabulary that is padded, is zero."""
    rows, columns = source.shape
    if rows > into.shape[0] or columns > into.shape[1]:
        raise ShapeError(f"{which} is {tuple(source.shape)}, and the layer takes {tuple(into.shape)}")
    if (rows, columns) != tuple(into.shape):
        into.zero_()
    into[:rows, :columns] = source


def _embed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``VocabParallelEmbeddingWithLoRA.forward``, with A looked up where the adapter is."""
    output = self.base_layer.forward(tokens)
    self.punica_wrapper.add_embedding(output, tokens, self.lora_a_stacked.target.layer)
    return output
