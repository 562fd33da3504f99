"""What one vLLM does one way and another another: asked of the code, never of the version's number.

Each names the last minor that does it the old way. Once ``compat.TESTED`` begins later, a test fails: nobody
needs the branch any more, and it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper


@cache
def reads_patterns() -> bool:
    """Whether the rank and the scale of a layer are those that the patterns give it: tried, not looked up.

    An older one ignores both patterns without a word.
    """
    config = {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q"],
        "rank_pattern": {"q": 2},
        "alpha_pattern": {"q": 8},
    }
    weights = LoRALayerWeights.from_config("model.q", PEFTHelper.from_dict(config))
    return (weights.rank, weights.scaling) == (2, 4.0)


def keeps_modules() -> bool:
    """Whether an adapter may bring a classification head of its own."""
    return hasattr(LoRAModel(1, 1, {}), "modules_to_save")


def modules_to_save(adapter: LoRAModel) -> dict[str, Any]:
    """An adapter's whole heads, by name; none where vLLM has no place for them."""
    found: dict[str, Any] = getattr(adapter, "modules_to_save", {})
    return found


# What it is → the last minor that does it the old way, and whether this vLLM does it the new one.
DIFFERENCES: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "modules_to_save": ("0.30", keeps_modules),
    "rank_pattern and alpha_pattern": ("0.31", reads_patterns),
}
