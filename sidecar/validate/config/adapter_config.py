"""Rules for ``adapter_config.json``: pure on its bytes; opens no file.

The rules are vLLM 0.32's (``lora/peft_helper.py``), stricter where vLLM would misread in
silence: a rank must be an integer, a scale must be finite, the JSON must be unambiguous.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lora_fs.sidecar.escaping import shown, shown_json
from lora_fs.sidecar.validate.config.features import CLASSIFICATION_HEADS, check_features
from lora_fs.sidecar.validate.config.patterns import (
    KEPT_COMPILED,
    MAX_CHOICES_IN_KEY,
    MAX_CHOICES_IN_TARGET,
    MAX_KEYS,
    Budget,
    ModulePatterns,
    TargetModules,
    TooCostly,
    objection,
    suffixes,
)
from lora_fs.sidecar.validate.report import Findings

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1024 * 1024
_LONGEST_NAME = 1_024  # of a module: no tensor has a longer one
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127  # beyond it the engine multiplies by infinity


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The config's values, after a check of every field that vLLM reads.

    Attributes:
        covers: which modules the config targets; None if its form is not
            comparable with the tensors.
        left_out: ``exclude_modules``.
        excludes: which modules that leaves out; None if none, or if its form is not comparable.
        ties: ``ensure_weight_tying``: training ties the embedding and the output layer.
        ranks: ``rank_pattern``: ranks of modules that differ from ``rank``.
        alphas: ``alpha_pattern``: as ``ranks``, of ``alpha``.
        heads: the classification heads in ``modules_to_save``.
        terms: the source of ``covers``, ``ranks`` and ``alphas``, to compare configurations by.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    covers: TargetModules | None = field(compare=False)
    left_out: tuple[str, ...] | str | None
    excludes: TargetModules | None = field(compare=False)
    ties: bool
    ranks: ModulePatterns = field(compare=False)
    alphas: ModulePatterns = field(compare=False)
    largest_rank: int
    heads: frozenset[str]
    terms: tuple[object, ...]

    def rank_of(self, module: str, budget: Budget) -> int:
        """Return the rank PEFT gave a module. Raises TooCostly."""
        rank = self.ranks.find(module, budget)
        return self.rank if rank is None else int(rank)

    def may_exclude(self, targets: Collection[str]) -> set[str]:
        """The targets of which ``exclude_modules`` may be why none of their modules has a tensor."""
        if isinstance(self.left_out, str):
            return set(targets)  # an expression: its names are unknown here
        left_out = frozenset(self.left_out or ())
        within = {target for target in targets if not left_out.isdisjoint(suffixes(target))}
        return within | {suffix for one in left_out for suffix in suffixes(one) if suffix in targets}

    def scale_of(self, module: str, budget: Budget) -> float:
        """Return what vLLM multiplies a module's lora_B with. Raises TooCostly."""
        alpha, rank = self.alphas.find(module, budget), self.rank_of(module, budget)
        return (self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(raw: bytes, found: Findings) -> Mapping[str, object] | None:
    """Read one unambiguous JSON object, or note why it is none and return None."""
    if raw.startswith(codecs.BOM_UTF8):  # vLLM's reader refuses it, too
        hint = "save it as UTF-8 without one"
        found.add("config-json", CONFIG_FILE, "", "begins with a byte order mark", hint=hint)
        return None
    try:
        value = json.loads(
            raw.decode(),
            object_pairs_hook=unique_object,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        found.add("config-json", CONFIG_FILE, "", "is nested too deeply to be read")
        return None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        found.add("config-json", CONFIG_FILE, "", f"is not JSON: {shown(str(error))}")
        return None
    if not isinstance(value, dict):
        found.add("config-json", CONFIG_FILE, "", "is not a JSON object")
        return None
    return value


def check_config(config: Mapping[str, object], max_rank: int | None, found: Findings) -> AdapterConfig | None:
    """Apply every rule; returns None when a field the tensors depend on is unusable."""
    check_features(config, CONFIG_FILE, found)
    rank = _positive(config, "r", found)
    alpha = _alpha(config, found)
    target = _targets(config, found)
    rslora = config.get("use_rslora", False)
    if not isinstance(rslora, bool | None):
        found.add("config-field", CONFIG_FILE, "use_rslora", "must be true or false")
    budget = Budget()
    rank_pattern = _pattern(config, "rank_pattern", budget, found)
    alpha_pattern = _pattern(config, "alpha_pattern", budget, found)
    if rank is None or alpha is None or target is None or rank_pattern is None or alpha_pattern is None:
        return None
    keys = len({*rank_pattern, *alpha_pattern})
    if keys > KEPT_COMPILED:
        found.add(
            "many-patterns",
            CONFIG_FILE,
            "rank_pattern, alpha_pattern",
            f"have {keys} keys: a stock vLLM would compile keys again for each module, and all its streams "
            "would wait",
            hint="write the modules of one rank as one regular expression, or serve it with the plugin",
        )
    largest = max([rank, *(int(value) for value in rank_pattern.values())])
    if max_rank is not None and largest > max_rank:
        found.add(
            "rank-too-high",
            CONFIG_FILE,
            "r" if largest == rank else "rank_pattern",
            f"LoRA rank {largest} is greater than max_lora_rank {max_rank}, the engine's",
            hint=f"start the engine with --max-lora-rank of at least {largest}",
        )
    saved = config.get("modules_to_save")
    heads = [head for head in CLASSIFICATION_HEADS if isinstance(saved, list) and head in saved]
    covers = _coverage(config, "target_modules", target, found)
    left_out = _excluded(config, found)
    excludes = _coverage(config, "exclude_modules", left_out, found) if left_out else None
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=rslora is True,
        target_modules=target,
        covers=covers,
        left_out=left_out,
        excludes=excludes,
        ties=config.get("ensure_weight_tying") is True,
        ranks=ModulePatterns(rank_pattern),
        alphas=ModulePatterns(alpha_pattern),
        largest_rank=largest,
        heads=frozenset(heads),
        terms=(covers is None, tuple(rank_pattern.items()), tuple(alpha_pattern.items())),
    )


def unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object; ValueError for a repeated key (readers would disagree)."""
    built = dict(pairs)
    if len(built) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)!r} is given twice")
            seen.add(key)
    return built


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _missing(config: Mapping[str, object], field: str, found: Findings) -> bool:
    if field in config:
        return False
    found.add("config-field", CONFIG_FILE, field, "is missing; vLLM cannot serve without it")
    return True


def _positive(config: Mapping[str, object], field: str, found: Findings) -> int | None:
    if _missing(config, field, found):
        return None
    value = config[field]
    if _is_rank(value):
        assert isinstance(value, int)
        return value
    found.add("config-field", CONFIG_FILE, field, f"is {shown_json(value)}, not a positive integer")
    return None


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _alpha(config: Mapping[str, object], found: Findings) -> float | None:
    if _missing(config, "lora_alpha", found):
        return None
    value = config["lora_alpha"]
    number = _finite(value)
    if number is None:
        found.add("config-field", CONFIG_FILE, "lora_alpha", f"is {shown_json(value)}, not a finite number")
    elif number == 0:
        found.add("zero-weights", CONFIG_FILE, "lora_alpha", "is 0: the adapter does nothing at all")
    else:
        _check_scale(number, "lora_alpha", found)
    return number


def _check_scale(alpha: float, where: str, found: Findings) -> None:
    """Even of zeros a scale beyond float32 makes NaN; the weights show what smaller ones make."""
    if abs(alpha) > LARGEST_FLOAT32:
        found.add(
            "overflow",
            CONFIG_FILE,
            where,
            f"is {alpha:g}, which float32 cannot hold: the weights are multiplied with it",
            hint="set it to what the adapter was trained with",
        )


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _targets(config: Mapping[str, object], found: Findings) -> tuple[str, ...] | str | None:
    if _missing(config, "target_modules", found):
        return None
    value = config["target_modules"]
    if _is_text(value):
        return str(value)
    if isinstance(value, list) and all(_is_name(item) for item in value):
        if value or config.get("target_parameters"):
            return tuple(sorted(value))  # a set, which PEFT writes in any order
    elif value is None and config.get("target_parameters"):
        return ()
    found.add(
        "config-field",
        CONFIG_FILE,
        "target_modules",
        f"is {shown(value)}, not a list of module names or a regular expression",
    )
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_name(value: object) -> bool:
    return _is_text(value) and len(str(value)) <= _LONGEST_NAME


def _excluded(config: Mapping[str, object], found: Findings) -> tuple[str, ...] | str | None:
    value = config.get("exclude_modules")
    if not value:
        return None
    if isinstance(value, list) and all(_is_name(item) for item in value):
        return tuple(sorted(value))
    if _is_text(value):
        return str(value)
    found.add(
        "config-field",
        CONFIG_FILE,
        "exclude_modules",
        f"is {shown(value)}, not a list of module names or a regular expression",
    )
    return None


def _coverage(
    config: Mapping[str, object], where: str, target: tuple[str, ...] | str, found: Findings
) -> TargetModules | None:
    """Prepare the comparison with the tensors, where the config allows one."""
    if config.get("target_parameters"):
        return None  # names parameters, which the file spells in another way
    if isinstance(target, str) and target != "all-linear":
        reason = objection(target, MAX_CHOICES_IN_TARGET)
        if reason is not None:
            found.add(
                "target-without-tensors",
                CONFIG_FILE,
                where,
                f"{reason}; it is not compared with the tensors, which vLLM goes by",
            )
            return None
    return TargetModules(target)


def _pattern(
    config: Mapping[str, object], field: str, budget: Budget, found: Findings
) -> Mapping[str, float] | None:
    """Read ``rank_pattern`` or ``alpha_pattern``; None for an unusable one."""
    value = config.get(field)
    if not value:
        return {}
    if not isinstance(value, dict):
        found.add("config-field", CONFIG_FILE, field, f"is {shown(value)}, not an object")
        return None
    if len(value) > MAX_KEYS:
        found.add("pattern", CONFIG_FILE, field, f"has {len(value)} keys, and may have {MAX_KEYS}")
        return None
    try:
        return _usable(value, field, budget, found)
    except TooCostly:
        found.add(
            "pattern", CONFIG_FILE, field, "takes too long to compile", hint="write fewer or shorter keys"
        )
        return None


def _usable(
    value: Mapping[str, object], field: str, budget: Budget, found: Findings
) -> Mapping[str, float] | None:
    usable: dict[str, float] = {}
    for key, entry in value.items():
        budget.check()
        where = f"{field}.{shown(key)}"
        reason = objection(key, MAX_CHOICES_IN_KEY)
        number = _finite(entry)
        if reason is not None:
            found.add("pattern", CONFIG_FILE, where, f"{reason}; vLLM runs it in the engine")
        elif field == "rank_pattern" and not _is_rank(entry):
            found.add("config-field", CONFIG_FILE, where, f"is {shown_json(entry)}, not a positive integer")
        elif number is None:
            found.add("config-field", CONFIG_FILE, where, f"is {shown_json(entry)}, not a finite number")
        else:
            if field == "alpha_pattern":
                _check_scale(number, where, found)
            usable[key] = number
    return usable if len(usable) == len(value) else None
