"""vLLM's kinds of LoRA layers, by exact type: those that lora-fs takes over, and those left to vLLM.

A subclass computes something else than its base, or vLLM would not have it. lora-fs leaves an unlisted one
to vLLM, and logs it. Source: vllm/lora/layers, 0.30 to 0.33.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.lora import layers
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import QKVParallelLinear

logger = logging.getLogger(__name__)

_LINEAR = (
    "ColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
)
_WORDS = ("LogitsProcessorWithLoRA", "VocabParallelEmbeddingWithLoRA")
_VLLMS_LINEAR = (  # a way of their own to set weights, or a share along the ranks
    "ColumnParallelLinearWithShardedLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "RowParallelLinearWithShardedLoRA",
)
_VLLMS = (
    "BaseClassificationHeadWithLoRA",  # 0.33
    "ClassificationHeadWithLoRA",  # 0.31
    "FusedMoE3DWithLoRA",
    "FusedMoEWithLoRA",
    "Step5FusedQKVIndexerWithLoRA",  # 0.33, as the next
    "Step5SparseIndexerWWithLoRA",
    "TokenClassificationHeadWithLoRA",  # 0.33
)
NAMES = (*_LINEAR, *_WORDS, *_VLLMS_LINEAR, *_VLLMS)


def _there(names: Iterable[str]) -> frozenset[type]:
    return frozenset(kind for name in names if (kind := getattr(layers, name, None)) is not None)


LINEAR = _there(_LINEAR)
TAKEN_OVER = LINEAR | _there(_WORDS)
COMPARED = TAKEN_OVER | _there(_VLLMS_LINEAR) | _there(_VLLMS)  # an adapter is held against them by ``fits``
_KNOWN = COMPARED | {BaseLayerWithLoRA, BaseLinearLayerWithLoRA}
_told: set[type] = set()


def strangers() -> set[str]:
    """The names of vLLM's own kinds of LoRA layers that are in no list."""
    own = (kind for kind in _below(BaseLayerWithLoRA) if kind.__module__.startswith("vllm."))
    return {kind.__qualname__ for kind in own if kind not in _KNOWN}


def _below(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for one in subclasses:
        yield one
        yield from _below(one)


def whole_outputs(module: Any) -> tuple[int, ...]:
    """N of each output in the whole model, of a linear layer; a layer of one slice may have several."""
    base: Any = module.base_layer
    if isinstance(base, QKVParallelLinear):
        # ``output_sizes`` counts a head once a rank that has it; V is cut as K is, whatever its heads' size.
        heads = base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads
        return tuple(count * base.head_size for count in heads)
    return tuple(getattr(base, "output_sizes", (base.output_size,)))


def tell_stranger(name: str, module: Any) -> None:
    """Log it, once a kind, if a layer of the model is of an unknown kind."""
    kind = type(module)
    if kind not in _KNOWN and kind not in _told:
        _told.add(kind)
        text = "%s.%s is a kind of LoRA layer that lora-fs does not know: vLLM computes %s and all like it"
        logger.warning(text, kind.__module__, kind.__qualname__, name)
