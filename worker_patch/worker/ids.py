"""Room for a record's integer id, of 63 bits, where vLLM's Model Runner V2 has 32 for it.

There an id that does not fit is an OverflowError within the step, which ends the engine; vLLM's own
ids begin at 1. Model Runner V1 keeps 64 bits, but for the connectors of towers.
Source: vllm/v1/worker/gpu/lora_utils.py and mm/lora.py, 0.32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_fs.worker_patch.worker.put import put


class _Wide:
    """numpy for that module, whose one narrow type is that of ids and of counts."""

    int32 = np.int64

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def widen() -> None:
    """Have every ``LoraState`` made from now on, and what is read from it, in 64 bits."""
    from vllm.v1.worker.gpu import lora_utils
    from vllm.v1.worker.gpu.mm import lora as mm_lora

    if getattr(lora_utils.LoraState, "lora_fs", False):
        return
    make = lora_utils.LoraState.__init__

    def __init__(self: Any, max_num_reqs: int) -> None:
        make(self, max_num_reqs)
        self.lora_ids = self.lora_ids.astype(np.int64)

    lora_utils.LoraState.__init__ = __init__
    lora_utils.LoraState.lora_fs = True
    put(mm_lora, "np", _Wide())


def check_room(vllm_config: Any) -> None:
    """Raise ValueError for the one setting in which ids must have 32 bits."""
    if vllm_config.lora_config.enable_tower_connector_lora and not vllm_config.use_v2_model_runner:
        raise ValueError(
            "--enable-tower-connector-lora with Model Runner V1 has no room for a record's integer id: "
            "let vLLM choose V2 (unset VLLM_USE_V2_MODEL_RUNNER), or leave the option out"
        )
