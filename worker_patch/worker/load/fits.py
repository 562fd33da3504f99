"""Whether an adapter's tensors fit the model's layers. Runs before anything is evicted for it.

vLLM copies any tensor into the top left corner of a slot: it serves a smaller hidden size, or a layer
that the model does not have, without a word. An adapter has the whole model's sizes, a slot
those of a tensor-parallel rank. Source: vllm/lora/layers and vllm/model_executor/layers/linear.py, 0.32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.lora.layers import FusedMoE3DWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager

from lora_fs.worker_patch.versions.differences import reads_patterns
from lora_fs.worker_patch.versions.layers import COMPARED, whole_outputs

# What transformers 5 calls the experts of a Mixtral, and what vLLM's models of that kind do (0.32).
_EXPERTS, _MODELS_EXPERTS = ".mlp.experts", ".block_sparse_moe.experts"


class DoesNotFit(ValueError):
    """The adapter is not one for this model."""


def check_patterns(folder: str) -> None:
    """Refuse an adapter whose ranks or scales this vLLM would read wrong, without a word.

    Raises:
        DoesNotFit: names the patterns.
    """
    if reads_patterns():
        return
    config = json.loads((Path(folder) / "adapter_config.json").read_bytes())
    given = [pattern for pattern in ("rank_pattern", "alpha_pattern") if config.get(pattern)]
    if given:
        raise DoesNotFit(
            f"vLLM {vllm.__version__} ignores {' and '.join(given)}, and would answer wrong: "
            "this adapter needs vLLM 0.32 or newer"
        )


def name_as_the_model(manager: LoRAModelManager, adapter: LoRAModel) -> None:
    """Give an adapter's layers the names that vLLM's model has, where another one of its names is known.

    The files of a bare ``AutoModel`` lack a prefix. A pooling vLLM finds their layers without it; what it
    merges then, it leaves beside the result. transformers 5 renamed the experts of a Mixtral: vLLM
    does not know the name, and would leave out their weights without a word.
    """
    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    for name in [name for name in adapter.loras if name not in known]:
        others = [f"model.{name}"] if manager.is_pooling_model else []
        if name.removesuffix(".base_layer").endswith(_EXPERTS):
            others.append(name.replace(_EXPERTS, _MODELS_EXPERTS))
        for other in others:
            if other.removesuffix(".base_layer") in known:
                adapter.loras[other] = adapter.loras.pop(name)
                break


def drop_merged(manager: LoRAModelManager, adapter: LoRAModel) -> None:
    """Let go of what vLLM merged into an expert layer's weights and left where it was."""
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoE3DWithLoRA):
            adapter.loras.pop(f"{name}.base_layer", None)


def check_fits(manager: LoRAModelManager, adapter: LoRAModel, *, whole_model: bool) -> None:
    """Compare every layer's A and B with its slot.

    Args:
        adapter: packed, as ``_create_merged_loras_inplace`` leaves it.
        whole_model: every layer is on this rank, so that a name without a layer is a mistake.
    Raises:
        DoesNotFit: names the layer, what it has and what the model wants.
    """
    matched = set()
    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(adapter, name)
        if weights is None:
            continue
        matched.add(id(weights))
        if type(module) not in COMPARED:
            continue
        if isinstance(module, BaseLinearLayerWithLoRA):
            _check_layer(name, module, _slices(weights.lora_a), _slices(weights.lora_b))
        elif isinstance(module, LogitsProcessorWithLoRA | VocabParallelEmbeddingWithLoRA):
            _check_words(name, module, weights.lora_a, weights.lora_b)
    if not whole_model:
        return
    unmatched = (name for name, weights in adapter.loras.items() if id(weights) not in matched)
    strangers = [name for name in unmatched if not _is_left_out(manager, name)]
    if strangers:
        raise DoesNotFit(f"the model has no layer {strangers[0]} ({len(strangers)} such in the adapter)")
    if not matched:
        raise DoesNotFit("no layer of the adapter is one of the model")


def drafts_without_mapping(vllm_config: Any) -> bool:
    """Whether vLLM samples from more rows than it names adapters for: one a request, and a row a draft.

    Model Runner V1 names one for each row.
    """
    return bool(vllm_config.use_v2_model_runner) and vllm_config.speculative_config is not None


def check_head(manager: LoRAModelManager, adapter: LoRAModel) -> None:
    """Refuse an adapter of the output layer, where nobody can say which rows are its.

    Raises:
        DoesNotFit: names the layer.
    """
    for name, module in manager.modules.items():
        if isinstance(module, LogitsProcessorWithLoRA) and manager._get_lora_layer_weights(adapter, name):
            raise DoesNotFit(
                f"{name}: with speculative decoding vLLM's Model Runner V2 does not say which rows of the "
                "output layer are this adapter's: set VLLM_USE_V2_MODEL_RUNNER=0, leave out "
                "--speculative-config, or train the adapter without its output layer"
            )


def check_finite(adapter: LoRAModel) -> None:
    """Read every weight: kernels may answer a NaN with any text.

    Raises:
        DoesNotFit: names the layer that holds NaN or Inf.
    """
    for name, weights in adapter.loras.items():
        for tensor in (*_slices(weights.lora_a), *_slices(weights.lora_b)):
            if tensor is not None and not torch.isfinite(tensor).all():
                raise DoesNotFit(f"{name} holds NaN or Inf")


def _is_left_out(manager: LoRAModelManager, name: str) -> bool:
    """Whether vLLM leaves a layer as it is: by ``--lora-target-modules``, or as one of a tower's."""
    return not manager._match_target_modules(name) or manager._get_punica_wrapper(name) is None


def _slices(weights: Any) -> list[torch.Tensor | None]:
    return list(weights) if isinstance(weights, list | tuple) else [weights]


def _check_layer(
    name: str,
    module: BaseLinearLayerWithLoRA,
    a_slices: list[torch.Tensor | None],
    b_slices: list[torch.Tensor | None],
) -> None:
    whole = _whole(module)
    if len(a_slices) == 1:  # one A and B for all the slices, which the layer cuts and does not check
        whole = [(whole[0][0], sum(outputs for _, outputs in whole))]
    elif len(a_slices) != len(whole):
        return  # some for several slices: the layer itself cuts them, and checks
    most_rank = module.lora_b_stacked[0].shape[-1]  # a fully sharded A is cut along its ranks
    for (wanted_in, wanted_out), a, b in zip(whole, a_slices, b_slices, strict=True):
        if a is None or b is None:
            continue
        rank, has_in, has_out = a.shape[0], a.shape[1], b.shape[0]
        if rank != b.shape[1]:
            raise DoesNotFit(f"{name}: A has rank {rank}, B has rank {b.shape[1]}")
        if rank > most_rank:
            raise DoesNotFit(
                f"{name}: LoRA rank {rank} is greater than max_lora_rank {most_rank}: raise --max-lora-rank"
            )
        if (has_in, has_out) != (wanted_in, wanted_out):
            raise DoesNotFit(
                f"{name}: the adapter's layer is {has_in} → {has_out}, "
                f"the model's is {wanted_in} → {wanted_out}"
            )


def _check_words(name: str, module: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Check a layer with a row or a column a word. An adapter may have fewer words than the vocabulary."""
    base = module.base_layer
    if isinstance(module, LogitsProcessorWithLoRA):
        hidden, wanted, words, most_words = a.shape[1], module.hidden_size, b.shape[0], base.vocab_size
        most_rank = module.lora_a_stacked.shape[-2]
    else:
        hidden, wanted, words, most_words = b.shape[0], base.embedding_dim, a.shape[1], base.org_vocab_size
        most_rank = module.lora_b_stacked.shape[-1]
    if a.shape[0] != b.shape[1]:
        raise DoesNotFit(f"{name}: A has rank {a.shape[0]}, B has rank {b.shape[1]}")
    if a.shape[0] > most_rank:
        raise DoesNotFit(
            f"{name}: LoRA rank {a.shape[0]} is greater than max_lora_rank {most_rank}: raise --max-lora-rank"
        )
    if hidden != wanted:
        raise DoesNotFit(f"{name}: the adapter's hidden size is {hidden}, the model's is {wanted}")
    if words > most_words:
        raise DoesNotFit(f"{name}: the adapter has {words} words, the model has {most_words}")


def _whole(module: BaseLinearLayerWithLoRA) -> list[tuple[int, int]]:
    """For each slice the inputs and outputs of the whole model's layer, of which a rank has a share."""
    if module.tp_size == 1:
        pairs = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        return [(a.shape[-1], b.shape[-2]) for a, b in pairs]
    outputs = whole_outputs(module)
    if module.n_slices == 1:
        outputs = (sum(outputs),)
    return [(module.base_layer.input_size, width) for width in outputs]
