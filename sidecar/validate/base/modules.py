"""Hold an adapter's modules against the base model's ``config.json``. Pure.

vLLM copies whatever fits into a slot and drops what has no layer to go to: it answers a missing module or
a smaller matrix with HTTP 200 and other text. For the model families in the table this module
knows every module's name and sizes; for other model types only the number of layers.

Source: vllm 0.32, ``model_executor/models/<family>.py`` (``embedding_modules``,
``packed_modules_mapping``), ``lora/layers/base_linear.py::set_lora``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.weights.header import TensorEntry
from lora_fs.sidecar.validate.weights.tensors import BASE_EMBEDDINGS, LoraModule

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_BARE = re.compile(r"layers\.\d+\..+")  # as PEFT names them on an AutoModel
_RENAMED_EXPERTS = ".mlp.experts"  # transformers 5's name of a Mixtral's, which vLLM 0.32 does not know
_DECODER_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Family:
    """How one model type names its modules.

    Attributes:
        embeddings: whether vLLM serves LoRA on ``embed_tokens`` and ``lm_head``.
        fused: q, k, v and gate, up are one matrix each, as in Phi-3.
        derives_head_dim: without ``head_dim`` it is hidden_size / num_attention_heads.
    """

    embeddings: bool
    fused: bool = False
    derives_head_dim: bool = True


FAMILIES: Mapping[str, Family] = {
    "llama": Family(embeddings=True),
    "mistral": Family(embeddings=False),
    "qwen2": Family(embeddings=False),
    "qwen3": Family(embeddings=True, derives_head_dim=False),
    "gemma": Family(embeddings=False, derives_head_dim=False),
    "gemma2": Family(embeddings=False, derives_head_dim=False),
    "granite": Family(embeddings=True),
    "phi3": Family(embeddings=True, fused=True),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A module's sizes; None where the config does not tell. ``embedding``: a look-up table."""

    size_in: int | None
    size_out: int | None
    embedding: bool = False


def check_modules(
    modules: Iterable[LoraModule], base: Mapping[str, object], file: str, found: Findings
) -> None:
    """Note every module the base model does not have, or has in another size."""
    model_type = base.get("model_type")
    layers = layer_count(base)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        for module in modules:
            match = _LAYER.search(module.name)
            if match is not None and layers is not None and int(match[1]) >= layers:
                found.add(
                    "layer-out-of-range",
                    file,
                    module.name,
                    f"the base model has {layers} layers: vLLM would ignore it",
                )
            elif model_type == "mixtral" and _RENAMED_EXPERTS in module.name:
                found.add(
                    "renamed-experts",
                    file,
                    module.name,
                    "is transformers 5's name of a Mixtral's experts: a stock vLLM would ignore it",
                    hint="serve it with lora-fs's plugin, which knows the name",
                )
        return
    in_layer, around = _sizes(base, family)
    modules = list(modules)
    bare = bool(modules) and all(_BARE.fullmatch(module.name) for module in modules)
    if bare:
        found.add(
            "bare-model",
            file,
            modules[0].name,
            "lacks `model.`, as saved of an AutoModel: a generating engine refuses the adapter",
        )
    for module in modules:
        name = f"model.{module.name}" if bare else module.name
        match = _DECODER_LAYER.fullmatch(name)
        expected = around.get(name) if match is None else in_layer.get(match[2])
        if match is not None and layers is not None and int(match[1]) >= layers:
            found.add(
                "no-such-module",
                file,
                module.name,
                f"the base model has {layers} layers: vLLM would ignore it",
            )
        elif expected is None or expected.embedding != module.embedding:
            known = ", ".join([*(f"model.layers.N.{name}" for name in in_layer), *around])
            found.add(
                "no-such-module",
                file,
                module.name,
                f"a {model_type} model has no such module for LoRA: vLLM would refuse or ignore it",
                hint=f"it has {known}",
            )
        else:
            _check_sizes(module, expected, file, found)


def check_vocabulary(
    entries: Iterable[TensorEntry], base: Mapping[str, object], file: str, found: Findings
) -> None:
    """Note an embedding saved with the adapter that has another number of tokens."""
    vocab = _size(base, "vocab_size")
    for entry in entries:
        if not entry.name.endswith(BASE_EMBEDDINGS) or vocab is None or not entry.shape:
            continue
        if entry.shape[0] != vocab:
            found.add(
                "added-tokens",
                file,
                entry.name,
                f"has {entry.shape[0]} tokens, the base model {vocab}; vLLM ignores the others",
            )


_COMPARED = (
    *("hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def compared(base: Mapping[str, object]) -> dict[str, int | str]:
    """Return the fields of a base model's config that an adapter is held against; equal ones judge alike."""
    model_type, layers = base.get("model_type"), layer_count(base)
    told: dict[str, int | str | None] = {name: _size(base, name) for name in _COMPARED}
    told |= {"model_type": model_type if isinstance(model_type, str) else None, "num_hidden_layers": layers}
    return {name: value for name, value in told.items() if value is not None}


def layer_count(base: Mapping[str, object]) -> int | None:
    """Read ``num_hidden_layers``, of the text model where there are several; None if unknown."""
    text = base.get("text_config")
    return _size(base, "num_hidden_layers") or (
        _size(text, "num_hidden_layers") if isinstance(text, dict) else None
    )


def _check_sizes(module: LoraModule, expected: Layer, file: str, found: Findings) -> None:
    for entry, axis, size, what in (
        (module.a, 1, expected.size_in, "takes"),
        (module.b, 0, expected.size_out, "gives"),
    ):
        if size is not None and entry.shape[axis] != size:
            found.add(
                "wrong-shape",
                file,
                entry.name,
                f"is {list(entry.shape)}; the base model's layer {what} {size}",
                hint="it was trained on another base model",
            )


def _sizes(base: Mapping[str, object], family: Family) -> tuple[Mapping[str, Layer], Mapping[str, Layer]]:
    """List the modules inside a decoder layer, and those around the layers, by name."""
    hidden = _size(base, "hidden_size")
    inner = _size(base, "intermediate_size")
    vocab = _size(base, "vocab_size")
    heads = _size(base, "num_attention_heads")
    kv_heads = _size(base, "num_key_value_heads")
    if kv_heads is None and base.get("model_type") == "llama":
        kv_heads = heads  # configs from before grouped queries
    head_dim = _size(base, "head_dim")
    if head_dim is None and family.derives_head_dim and hidden and heads:
        head_dim = hidden // heads
    q, kv = _times(heads, head_dim), _times(kv_heads, head_dim)
    in_layer = {"self_attn.o_proj": Layer(q, hidden), "mlp.down_proj": Layer(inner, hidden)}
    if family.fused:
        qkv = None if q is None or kv is None else q + 2 * kv
        in_layer["self_attn.qkv_proj"] = Layer(hidden, qkv)
        in_layer["mlp.gate_up_proj"] = Layer(hidden, _times(inner, 2))
    else:
        in_layer["self_attn.q_proj"] = Layer(hidden, q)
        in_layer["self_attn.k_proj"] = in_layer["self_attn.v_proj"] = Layer(hidden, kv)
        in_layer["mlp.gate_proj"] = in_layer["mlp.up_proj"] = Layer(hidden, inner)
    around = {}
    if family.embeddings:
        around["model.embed_tokens"] = Layer(vocab, hidden, embedding=True)
        around["lm_head"] = Layer(hidden, vocab)
    return in_layer, around


def _size(config: Mapping[str, object], field: str) -> int | None:
    value = config.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _times(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left * right
