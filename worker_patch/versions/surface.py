"""Every name of vLLM's that the plugin hooks, or uses beyond its documented use: one table, data alone.

The plugin walks it before it hooks anything. It lists a function with its parameters, a class with the
attributes in use.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

_LORA, _V1 = "vllm.lora", "vllm.v1"
_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
_MANAGER = f"{_LORA}.model_manager:LoRAModelManager"
_LRU_MANAGER = f"{_LORA}.model_manager:LRUCacheLoRAModelManager"
_WORKER = f"{_LORA}.worker_manager:LRUCacheWorkerLoRAManager"
_LINEAR = f"{_LORA}.layers.base_linear:BaseLinearLayerWithLoRA"
_STATE = f"{_V1}.worker.gpu.lora_utils:LoraState"
_CLIENT = f"{_V1}.engine.core_client:AsyncMPClient"

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    f"{_MODELS}.resolve_lora": ("self", "lora_name"),
    f"{_MODELS}.model_name": ("self", "lora_request"),
    f"{_MANAGER}.activate_adapter": ("self", "lora_id"),
    f"{_MANAGER}.register_module": ("self", "module_name", "module"),
    f"{_MANAGER}._init_punica_wrapper": ("self", "max_num_batched_tokens", "vllm_config"),
    f"{_MANAGER}.deactivate_adapter": ("self", "adapter_id"),
    f"{_MANAGER}._deactivate_adapter": ("self", "lora_id"),
    f"{_MANAGER}._set_adapter_mapping": ("self", "mapping"),
    f"{_MANAGER}.remove_adapter": ("self", "adapter_id"),
    f"{_LRU_MANAGER}.remove_all_adapters": ("self",),
    f"{_MANAGER}._match_target_modules": ("self", "module_name"),
    f"{_MANAGER}._get_punica_wrapper": ("self", "module_name"),
    f"{_MANAGER}._get_lora_layer_weights": ("self", "lora_model", "module_name"),
    f"{_MANAGER}._create_merged_loras_inplace": ("self", "lora_model"),
    f"{_LRU_MANAGER}.add_adapter": ("self", "lora"),
    f"{_LRU_MANAGER}.pin_adapter": ("self", "lora_id"),
    f"{_WORKER}.set_active_adapters": ("self", "requests", "mapping"),
    f"{_WORKER}.add_adapter": ("self", "lora_request"),
    f"{_WORKER}._load_adapter": ("self", "lora_request"),
    f"{_WORKER}.create_lora_manager": ("self", "model", "vllm_config"),
    f"{_LORA}.lora_model:LoRAModel.from_lora_tensors": (
        *("lora_model_id", "tensors", "peft_helper", "device", "dtype"),
        *("model_vocab_size", "weights_mapper", "skip_prefixes"),
    ),
    f"{_STATE}.__init__": ("self", "max_num_reqs"),
    f"{_V1}.worker.gpu.mm.lora:set_active_mm_loras": (
        *("model", "lora_manager", "encoder_cache"),
        *("req_id_to_index", "lora_state", "scheduled_encoder_inputs"),
    ),
    f"{_LORA}.layers:BaseLayerWithLoRA.set_mapping": ("self", "punica_wrapper"),
    f"{_LINEAR}.set_lora": ("self", "index", "lora_a", "lora_b"),
    f"{_LINEAR}._apply_lora_to_output": ("self", "x", "output"),
    f"{_LORA}.layers:VocabParallelEmbeddingWithLoRA.forward": ("self", "x"),
    f"{_LORA}.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_shrink": (
        *("self", "y", "x", "lora_a_stacked", "scale", "kwargs"),
    ),
    f"{_LORA}.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata": (
        *("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs"),
    ),
    f"{_CLIENT}._call_utility_async": ("self", "method", "args", "engine"),
    f"{_V1}.core.kv_cache_utils:generate_block_hash_extra_keys": (
        *("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
}

# Of a class what it has, or its methods name; of a module what it holds.
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    _MODELS: ("lora_requests", "base_model_paths", "registry"),
    "vllm.entrypoints.openai.models.serving:OpenAIModelRegistry": ("show_available_models",),
    _CLIENT: ("core_engines", "_finalizer", "client_index"),
    "vllm.config.parallel:ParallelConfig": (
        *("_api_process_count", "local_engines_only", "data_parallel_index"),
        *("pipeline_parallel_size", "world_size", "enable_expert_parallel", "use_ubatching", "worker_cls"),
    ),
    "vllm.config.vllm:VllmConfig": (
        *("use_v2_model_runner", "lora_config", "parallel_config", "model_config"),
        *("compilation_config", "additional_config", "speculative_config"),
    ),
    "vllm.config.lora:LoRAConfig": (
        *("max_lora_rank", "max_loras", "lora_dtype", "fully_sharded_loras"),
        *("target_modules", "enable_tower_connector_lora"),
    ),
    f"{_LORA}.request:LoRARequest": (
        *("lora_name", "lora_int_id", "lora_path", "load_inplace", "is_3d_lora_weight"),
    ),
    f"{_LORA}.lora_model:LoRAModel": ("id", "rank", "loras", "is_3d_lora_weight"),
    f"{_LORA}.lora_weights:LoRALayerWeights": ("lora_a", "lora_b", "scaling"),
    _LRU_MANAGER: (
        *("modules", "packed_modules", "is_pooling_model", "lora_config", "lora_slots", "lora_index_to_id"),
        *("punica_wrapper_mapping", "model", "device", "_active_adapters", "_registered_adapters"),
        *("_last_mapping", "_last_slot_layout"),
    ),
    _WORKER: ("_manager_cls", "_adapter_manager", "_lora_model_cls", "lora_config"),
    _LINEAR: (
        *("lora_a_stacked", "lora_b_stacked", "output_slices", "input_size", "n_slices", "tp_size"),
        *("lora_config", "base_layer", "reset_lora"),
    ),
    f"{_LORA}.layers:MergedColumnParallelLinearWithLoRA": (
        *("expand_packed_lora", "slice_lora_a", "slice_lora_b"),
    ),
    f"{_LORA}.layers:LogitsProcessorWithLoRA": ("lora_a_stacked", "lora_b_stacked", "hidden_size"),
    f"{_LORA}.layers:VocabParallelEmbeddingWithLoRA": ("lora_a_stacked", "lora_b_stacked", "base_layer"),
    f"{_LORA}.layers:FusedMoE3DWithLoRA": (),
    f"{_LORA}.punica_wrapper.punica_base:PunicaWrapperBase": ("token_lora_indices", "is_prefill"),
    f"{_LORA}.punica_wrapper.punica_gpu:PunicaWrapperGPU": (),
    f"{_V1}.worker.worker_base:WorkerBase": (),
    "vllm.model_executor.layers.linear:QKVParallelLinear": (
        *("total_num_heads", "total_num_kv_heads", "head_size"),
    ),
    "vllm.engine.protocol:EngineClient": ("collective_rpc", "errored"),
    "vllm.entrypoints.serve": ("create_error_response",),
    "vllm.entrypoints.serve.engine.protocol": ("ErrorResponse",),
    f"{_V1}.metrics.prometheus": ("get_prometheus_registry",),
    "vllm.utils.torch_utils": (
        *("LayerNameType", "_encode_layer_name", "_resolve_layer_name", "direct_register_custom_op"),
    ),
    # What ``hooks`` puts something else in the place of.
    f"{_V1}.worker.lora_model_runner_mixin": ("LRUCacheWorkerLoRAManager",),
    f"{_LORA}.lora_model": ("PIN_MEMORY",),
    f"{_LORA}.model_manager": ("PIN_MEMORY",),
    _STATE: ("lora_ids",),
    f"{_V1}.worker.gpu.mm.lora": ("np",),
    "vllm.platforms:current_platform": ("get_punica_wrapper",),
}


def missing() -> Iterator[str]:
    """What this vLLM lacks of the table, or has another way, a sentence each."""
    for where, wanted in SIGNATURES.items():
        try:
            has = tuple(inspect.signature(pkgutil.resolve_name(where)).parameters)
        except Exception as error:  # of a module's import, too
            yield f"{_short(where)} is not there: {error!r}"
            continue
        if has != wanted:
            yield f"{_short(where)} takes {has}, and {wanted} was expected"
    for where, names in ATTRIBUTES.items():
        try:
            owner = pkgutil.resolve_name(where)
        except Exception as error:  # of a module's import, too
            yield f"{_short(where)} is not there: {error!r}"
            continue
        yield from (f"{_short(where)} has no {name}" for name in names if not _has(owner, name))


def _short(where: str) -> str:
    return where.partition(":")[2] or where


def _has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute, or a method of it or of a base names one that instances get."""
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    if dataclasses.is_dataclass(owner) and name in {field.name for field in dataclasses.fields(owner)}:
        return True
    return any(
        isinstance(method, FunctionType) and name in method.__code__.co_names
        for kind in owner.__mro__
        for method in vars(kind).values()
    )
