"""Rules for the tensors an adapter lists: names, pairs, ranks, dtypes. Pure; no byte is read.

It parses a name the way vLLM does. It refuses what vLLM would refuse, and reports what vLLM would
skip or overwrite without a word.

Source: vllm 0.32, ``lora/utils.py::parse_fine_tuned_lora_name``,
``lora/lora_model.py::LoRAModel.from_lora_tensors``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE, AdapterConfig
from lora_fs.sidecar.validate.config.features import CLASSIFICATION_HEADS
from lora_fs.sidecar.validate.config.patterns import Budget, TooCostly, suffixes
from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.weights.header import TensorEntry

PREFIX = "base_model.model."
# safetensors' name → the name people know it by
FLOATS: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# With ``ensure_weight_tying`` PEFT trains both if the config targets either.
_TIED = frozenset({"embed_tokens", "lm_head"})
BASE_EMBEDDINGS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
# PEFT's names of what it keeps in one pair for all experts of a layer.
_FUSED_EXPERTS = (".experts", ".experts.base_layer")
# A part of the name → the code of the feature it belongs to, and what to say
_FOREIGN = (
    ("lora_magnitude_vector", "dora", "is DoRA's: vLLM does not yet support DoRA"),
    ("lora_B.bias", "lora-bias", "is a bias: vLLM does not support LoRA bias"),
    ("trainable_tokens", "added-tokens", "is a trained token embedding, which vLLM ignores"),
    (
        "embed_tokens.weight",
        "added-tokens",
        "is an embedding: tokens were added, or it was trained",
    ),
    ("lm_head.weight", "added-tokens", "is an output layer: tokens were added, or it was trained"),
    ("modules_to_save", "modules-to-save", "is a whole trained module, which vLLM does not load"),
    (".default.", "unknown-tensor", "holds the adapter's name: use PEFT's save_pretrained"),
    ("", "unknown-tensor", "is no lora_A.weight, lora_B.weight or lora_embedding_A/B"),
)


class Part(StrEnum):
    """Which half of a LoRA a tensor is; ``HEAD`` is a whole classification head."""

    A = "lora_A"
    B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The pair of one module: ``a`` is [r, in], ``b`` is [out, r] and multiplied with ``scale``."""

    name: str
    a: TensorEntry
    b: TensorEntry
    embedding: bool
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def of_all_experts(self) -> bool:
        """Whether it is one pair for all n experts of a layer, n × r wide."""
        return self.name.endswith(_FUSED_EXPERTS)


@lru_cache(maxsize=4096)  # the adapters of one model name the same tensors
def parse_name(name: str) -> tuple[str, Part] | None:
    """Split a tensor's name into its module and its part; None when vLLM would refuse it."""
    if name.startswith(PREFIX):  # once, vLLM drops it wherever it is; else it is a part of the name
        name = name.replace(PREFIX, "")
    parts = name.removeprefix(PREFIX).split(".")
    if len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in (Part.A, Part.B):
        return ".".join(parts[:-2]), Part(parts[-2])
    if len(parts) >= 2 and parts[-1] in ("weight", "bias") and parts[-2] in CLASSIFICATION_HEADS:
        return parts[-2], Part.HEAD
    if parts[-1] in (Part.EMBEDDING_A, Part.EMBEDDING_B):
        return ".".join(parts[:-1]), Part(parts[-1])
    return None


def check_tensors(
    entries: Iterable[TensorEntry], config: AdapterConfig, file: str, found: Findings
) -> tuple[LoraModule, ...]:
    """Pair the tensors up and check each pair; returns the modules that are whole."""
    halves = _halves(entries, config, file, found)
    modules: list[LoraModule] = []
    for name, half in halves.items():
        a = next((half[part] for part in (Part.A, Part.EMBEDDING_A) if part in half), None)
        b = next((half[part] for part in (Part.B, Part.EMBEDDING_B) if part in half), None)
        if a is None or b is None or len({part.startswith("lora_emb") for part in half}) > 1:
            there = ", ".join(sorted(half))
            found.add("unpaired-tensor", file, name, f"has only {there} of its pair")
        elif _check_shapes(name, a, b, file, found):
            modules.append(LoraModule(name, a, b, Part.EMBEDDING_A in half))
    if not halves:
        found.add("no-tensors", file, "", "holds no LoRA tensor")
        return ()
    _check_experts(modules, file, found)
    budget = Budget()
    try:
        for at, module in enumerate(modules):
            _check_rank(module, config, budget, file, found)
            modules[at] = replace(module, scale=config.scale_of(peft_name(module.name), budget))
        _check_targets(modules, halves, config, budget, file, found)
    except TooCostly:
        found.add(
            "pattern",
            CONFIG_FILE,
            "rank_pattern, target_modules",
            "takes too long to compare with the tensors' names",
            hint="name the modules in full instead of by regular expressions",
        )
    return tuple(modules)


def _halves(
    entries: Iterable[TensorEntry], config: AdapterConfig, file: str, found: Findings
) -> dict[str, dict[Part, TensorEntry]]:
    halves: dict[str, dict[Part, TensorEntry]] = {}
    for entry in entries:
        if entry.dtype not in FLOATS:
            found.add("dtype", file, entry.name, f"is {entry.dtype}, not {' '.join(FLOATS)}")
        if entry.name.endswith(BASE_EMBEDDINGS):
            found.add(
                "base-embedding",
                file,
                entry.name,
                "is a copy of the base model's embedding: vLLM ignores it, and tokens added to it",
            )
            continue
        parsed = parse_name(entry.name)
        if parsed is None or not parsed[0]:
            code, message = next((code, message) for mark, code, message in _FOREIGN if mark in entry.name)
            found.add(code, file, entry.name, message)
            continue
        module, part = parsed
        if part is Part.HEAD:
            if module not in config.heads:
                found.add("unknown-tensor", file, entry.name, "is a head modules_to_save does not list")
            continue
        pair = halves.setdefault(module, {})
        if part in pair:
            found.add("duplicate-tensor", file, entry.name, f"names the same module as {pair[part].name}")
        pair[part] = entry
    return halves


def _check_shapes(name: str, a: TensorEntry, b: TensorEntry, file: str, found: Findings) -> bool:
    if len(a.shape) != 2 or len(b.shape) != 2 or 0 in a.shape or 0 in b.shape:
        found.add(
            "tensor-shape",
            file,
            name,
            f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}; [r, in] and [out, r] is needed",
        )
        return False
    if a.shape[0] != b.shape[1]:
        found.add(
            "tensor-shape",
            file,
            name,
            f"lora_A {list(a.shape)} has rank {a.shape[0]}, lora_B {list(b.shape)} has rank {b.shape[1]}",
        )
        return False
    return True


def _check_experts(modules: Iterable[LoraModule], file: str, found: Findings) -> None:
    """Note the layers of which not every expert has a LoRA on each of its projections.

    vLLM packs a layer's experts together, and asserts that none is missing. Of a pair for all experts it
    ignores the ``base_layer`` that stands alone.

    Source: vllm 0.32, ``lora/lora_weights.py::pack_moe``, ``lora/model_manager.py::_stack_moe_lora_weights``.
    """
    layers: dict[str, dict[str, set[str]]] = {}  # of each expert its projections
    for module in modules:
        layer, experts, rest = module.name.partition(".experts")
        if experts:
            expert, _, projection = rest.removeprefix(".").partition(".")
            layers.setdefault(layer, {}).setdefault(expert, set()).add(projection)
    for layer, projections in layers.items():
        numbers, first = projections.keys(), next(iter(projections.values()))
        listed = numbers == {str(number) for number in range(len(numbers))}
        alike = all(one == first for one in projections.values())
        needed = 2 if layer.endswith(".mixer") else 3  # a NemotronH's have no gate
        if numbers != {"", "base_layer"} and not (listed and alike and len(first) == needed):
            found.add(
                "partial-experts",
                file,
                f"{layer}.experts",
                "not every expert has a LoRA on each of its projections: vLLM refuses or ignores them",
                hint="train all projections of the experts, or none",
            )


def _check_rank(
    module: LoraModule, config: AdapterConfig, budget: Budget, file: str, found: Findings
) -> None:
    expected = config.rank_of(peft_name(module.name), budget)
    fused = module.of_all_experts and module.rank % expected == 0
    if module.rank != expected and not fused:
        found.add(
            "rank-mismatch",
            file,
            module.name,
            f"has rank {module.rank}; {CONFIG_FILE} says {expected}",
            hint=f"set r or rank_pattern to what was trained; vLLM scales by alpha / {expected}",
        )


def peft_name(module: str) -> str:
    """Name the parameter PEFT's patterns refer to where a layer's experts are one tensor."""
    if module.endswith(".experts.base_layer"):
        return module.removesuffix(".base_layer") + ".gate_up_proj"
    return f"{module}.down_proj" if module.endswith(".experts") else module


def _check_targets(
    modules: list[LoraModule],
    named: Iterable[str],
    config: AdapterConfig,
    budget: Budget,
    file: str,
    found: Findings,
) -> None:
    """Compare what the configuration targets with the modules, and with all that are ``named``."""
    if config.covers is None:
        return

    def meant(name: str) -> bool:
        out = config.excludes is not None and config.excludes.covers(name, budget)
        return not out and config.covers is not None and config.covers.covers(name, budget)

    tied = [module.name for module in modules if module.name.rpartition(".")[2] in _TIED]
    ties = config.ties and any(meant(name) for name in tied)
    for module in modules:
        if not meant(module.name) and not (ties and module.name in tied):
            found.add(
                "target-modules",
                file,
                module.name,
                "has tensors, but the configuration leaves it out: vLLM applies it, PEFT does not",
            )
    if isinstance(config.target_modules, tuple):
        targets = set(config.target_modules)
        for name in named:
            budget.check()
            targets.difference_update(suffixes(name))
        for target in sorted(targets - config.may_exclude(targets)):
            found.add(
                "target-without-tensors",
                CONFIG_FILE,
                "target_modules",
                f"names {target!r}, for which {file} holds no tensor",
            )
