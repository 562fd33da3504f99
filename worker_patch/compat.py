"""Which vLLM this plugin is for. On another one it does nothing and says so once.

A version inside the tested range whose hooked functions look different, as in a fork, is refused
as well: each hook states the signature that it was written against.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

NAME = "lora_fs"
TESTED = ("0.32",)


def chosen() -> bool:
    """Whether the operator named this plugin: lora-fs may be installed beside a vLLM for its CLI alone."""
    return NAME in [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]


def expected_signatures() -> dict[Callable[..., Any], tuple[str, ...]]:
    """Every vLLM function that is hooked or called beside its documented use → its parameters."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.layers import BaseLayerWithLoRA, VocabParallelEmbeddingWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.gpu.lora_utils import LoraState
    from vllm.v1.worker.gpu.mm.lora import set_active_mm_loras

    return {
        OpenAIServingModels.resolve_lora: ("self", "lora_name"),
        OpenAIServingModels.model_name: ("self", "lora_request"),
        LoRAModelManager.activate_adapter: ("self", "lora_id"),
        LoRAModelManager.register_module: ("self", "module_name", "module"),
        LoRAModelManager._init_punica_wrapper: ("self", "max_num_batched_tokens", "vllm_config"),
        LoRAModelManager.deactivate_adapter: ("self", "adapter_id"),
        LoRAModelManager._deactivate_adapter: ("self", "lora_id"),
        LoRAModelManager.remove_adapter: ("self", "adapter_id"),
        LRUCacheLoRAModelManager.remove_all_adapters: ("self",),
        LoRAModelManager._match_target_modules: ("self", "module_name"),
        LoRAModelManager._get_punica_wrapper: ("self", "module_name"),
        LoRAModelManager._create_merged_loras_inplace: ("self", "lora_model"),
        LRUCacheLoRAModelManager.add_adapter: ("self", "lora"),
        LRUCacheLoRAModelManager.pin_adapter: ("self", "lora_id"),
        LRUCacheWorkerLoRAManager.set_active_adapters: ("self", "requests", "mapping"),
        LRUCacheWorkerLoRAManager.add_adapter: ("self", "lora_request"),
        LRUCacheWorkerLoRAManager._load_adapter: ("self", "lora_request"),
        LRUCacheWorkerLoRAManager.create_lora_manager: ("self", "model", "vllm_config"),
        LoRAModel.from_lora_tensors: (
            *("lora_model_id", "tensors", "peft_helper", "device", "dtype"),
            *("model_vocab_size", "weights_mapper", "skip_prefixes"),
        ),
        LoraState.__init__: ("self", "max_num_reqs"),
        set_active_mm_loras: (
            *("model", "lora_manager", "encoder_cache"),
            *("req_id_to_index", "lora_state", "scheduled_encoder_inputs"),
        ),
        BaseLayerWithLoRA.set_mapping: ("self", "punica_wrapper"),
        BaseLinearLayerWithLoRA.set_lora: ("self", "index", "lora_a", "lora_b"),
        BaseLinearLayerWithLoRA._apply_lora_to_output: ("self", "x", "output"),
        VocabParallelEmbeddingWithLoRA.forward: ("self", "x"),
        PunicaWrapperCPU.add_shrink: ("self", "y", "x", "lora_a_stacked", "scale", "kwargs"),
        PunicaWrapperBase.update_metadata: (
            *("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs"),
        ),
    }


@cache
def unfit() -> str | None:
    """Why this vLLM is left as it is, or None. Told once a process."""
    reason = _unfit()
    if reason is not None:
        logger.error("lora-fs leaves this vLLM as it is: %s", reason)
    return reason


def _unfit() -> str | None:
    import vllm

    if not vllm.__version__.startswith(tuple(f"{tested}." for tested in TESTED)):
        return f"it is version {vllm.__version__}, and this plugin was tested on {', '.join(TESTED)}"
    try:
        signatures = expected_signatures()
    except (ImportError, AttributeError) as error:
        return f"a function that is hooked is not there: {error}"
    for function, wanted in signatures.items():
        found = tuple(inspect.signature(function).parameters)
        if found != wanted:
            return f"{function.__qualname__} takes {found}, and {wanted} was expected"
    return None
