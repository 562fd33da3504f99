"""What PEFT can put in an adapter's config and vLLM 0.32 does not serve, as a table.

vLLM refuses the first group itself; the second it ignores without a word and serves plain
LoRA instead. A field counts as set by the same truth test vLLM uses, so that no adapter passes
here that the engine refuses. Of what vLLM refuses the message has vLLM's own phrase: clients look for it.

Source: vllm 0.32, ``lora/peft_helper.py::PEFTHelper._validate_features``; peft 0.21,
``tuners/lora/config.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.validate.report import Findings

CLASSIFICATION_HEADS = ("classifier", "score")
MAX_SAVED = 64  # PEFT adds a head's names anew each time; vLLM compares each tensor's name with all of them
# These set only the first weights of training: the saved adapter is a plain LoRA.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
_MERGE = "merge it into the base model or train a plain LoRA"


@dataclass(frozen=True, slots=True)
class Feature:
    """One field that must not be set: ``is_set`` says of its value whether it is."""

    field: str
    code: str
    message: str
    hint: str = _MERGE
    is_set: Callable[[object], bool] = bool


def _init_changes_base(value: object) -> bool:
    return isinstance(value, str) and value.lower() not in _PLAIN_INITS


def _bias_is_trained(value: object) -> bool:
    return value != "none"


def _modules_are_not_heads(value: object) -> bool:
    if isinstance(value, list):
        return any(module not in CLASSIFICATION_HEADS for module in value)
    return bool(value)


FEATURES = (
    Feature("use_dora", "dora", "vLLM does not yet support DoRA"),
    Feature("lora_bias", "lora-bias", "vLLM does not support LoRA bias (lora_bias)"),
    Feature(
        "bias",
        "bias",
        'must be "none": Adapter bias is not supported',
        is_set=_bias_is_trained,
    ),
    Feature(
        "init_lora_weights",
        "init",
        "vLLM does not support init_lora_weights that changed the base model's weights in training",
        "convert it with PEFT's path_initial_model_for_weight_conversion, or set it to true if "
        "the served base model holds the changed weights",
        _init_changes_base,
    ),
    Feature("alora_invocation_tokens", "alora", "vLLM does not support Activated LoRA (aLoRA)"),
    Feature("layer_replication", "layer-replication", "vLLM does not support layer_replication"),
    Feature("use_bdlora", "bdlora", "vLLM does not support block-diagonal LoRA (BD-LoRA)"),
    Feature("use_qalora", "qalora", "vLLM does not support QALoRA"),
    Feature(
        "modules_to_save",
        "modules-to-save",
        "Unsupported modules_to_save: vLLM loads a head (classifier, score) and no other whole module",
        is_set=_modules_are_not_heads,
    ),
    # Ignored by vLLM: the answers would be another model's.
    Feature(
        "trainable_token_indices",
        "added-tokens",
        "token embeddings were trained; vLLM ignores them",
    ),
    Feature("kasa_config", "lora-variant", "KaSA is ignored by vLLM, which computes plain LoRA"),
    Feature(
        "monteclora_config",
        "lora-variant",
        "MonteCLoRA is ignored by vLLM, which computes plain LoRA",
    ),
    Feature(
        "context_length",
        "lora-variant",
        "LongLoRA's own RoPE scaling is ignored by vLLM, which computes plain LoRA",
        "merge it into a base model with that scaling, or train a plain LoRA",
    ),
    Feature("arrow_config", "lora-variant", "Arrow routing is ignored by vLLM"),
)


def check_features(config: Mapping[str, object], file: str, found: Findings) -> None:
    """Note every feature the config sets that the engine does not serve."""
    for feature in FEATURES:
        if feature.field in config and feature.is_set(config[feature.field]):
            value = shown(config[feature.field])
            found.add(
                feature.code,
                file,
                feature.field,
                f"is {value}: {feature.message}",
                hint=feature.hint,
            )
    kind = config.get("peft_type")
    if kind is None:
        found.add("peft-type-missing", file, "peft_type", "is missing; LORA is assumed")
    elif not isinstance(kind, str) or kind.upper() != "LORA":
        found.add(
            "peft-type",
            file,
            "peft_type",
            f"is {shown(kind)}: vLLM would read the tensors as LORA all the same",
            hint=_MERGE,
        )
    saved = config.get("modules_to_save")
    if isinstance(saved, list) and len(saved) > MAX_SAVED:
        told = f"names {len(saved)} modules, and may name {MAX_SAVED}"
        found.add("config-field", file, "modules_to_save", told)
    if saved and not _modules_are_not_heads(saved):
        found.add(
            "classification-head",
            file,
            "modules_to_save",
            "holds a classification head: a generating engine refuses the adapter",
        )
