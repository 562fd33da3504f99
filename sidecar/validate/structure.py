"""What an adapter is but for its weights' values: pure on its configuration and its header's bytes.

Adapters of one training have the same. So it keeps a structure without findings, and does not work out the
next of its kind. It judges one with findings anew, to report them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import LoraShape
from lora_fs.sidecar.validate.base.identity import check_base_model
from lora_fs.sidecar.validate.base.modules import check_modules, check_vocabulary
from lora_fs.sidecar.validate.config.adapter_config import (
    CONFIG_FILE,
    AdapterConfig,
    check_config,
    parse_config,
)
from lora_fs.sidecar.validate.report import Expectation, Findings
from lora_fs.sidecar.validate.weights.header import TensorEntry, parse_header
from lora_fs.sidecar.validate.weights.tensors import FLOATS, LoraModule, check_tensors

KINDS_KEPT = 16
MAX_KEPT_BYTES = 128 * 1024  # of a file: the objects built from one take several times as much
_LONGEST_MODEL_NAME = 1_024

Base = Mapping[str, object]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Said:
    """The base model of a configuration, and its values if usable."""

    base_model: str | None
    config: AdapterConfig | None


class Kind(NamedTuple):
    """What adapters of a kind have in common: the configuration, the header's bytes, its file's size."""

    config: AdapterConfig | None
    header: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Structure:
    """``entries`` in the order of their bytes, the pairs among them, and what they agree on."""

    entries: tuple[TensorEntry, ...]
    modules: tuple[LoraModule, ...] = ()
    shape: LoraShape | None = None


@dataclass(slots=True)
class Known:
    """What gave no finding, by what it was made of: of either the latest ``KINDS_KEPT``.

    The mappings are replaced and never changed, so that any thread may look.
    """

    configs: Mapping[tuple[object, ...], Said] = field(default_factory=dict)
    structures: Mapping[Kind, tuple[Base | None, Structure]] = field(default_factory=dict)


known = Known()


def read_config(raw: bytes, expectation: Expectation, found: Findings) -> Said | None:
    """Apply every rule to a configuration's bytes; None when they are no JSON object."""
    names, further = expectation.model_ids, expectation.learned.names
    key = raw, expectation.max_rank, names, further, expectation.strict_base_model
    kept = known.configs.get(key)
    if kept is not None:
        return kept
    before = found.count
    fields = parse_config(raw, found)
    if fields is None:
        return None
    base_model = _base_model(fields, found)
    check_base_model(base_model, names, found, further=further, strict=expectation.strict_base_model)
    said = Said(base_model, check_config(fields, expectation.max_rank, found))
    if found.count == before and len(raw) <= MAX_KEPT_BYTES:
        known.configs = _with(known.configs, key, said)
    return said


def _with(kept: Mapping[Key, Value], key: Key, value: Value) -> Mapping[Key, Value]:
    return dict(list({**kept, key: value}.items())[-KINDS_KEPT:])


def _base_model(config: Mapping[str, object], found: Findings) -> str | None:
    field = "base_model_name_or_path"
    value = config.get(field)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > _LONGEST_MODEL_NAME or not value.isprintable():
        found.add("config-field", CONFIG_FILE, field, f"is {shown(value)}, not a model's name")
        return None
    return value


def study(kind: Kind, base: Base | None, file: str, found: Findings) -> Structure | None:
    """Apply every rule to the header's list; None if it is untrustworthy.

    Args:
        base: the base model's ``config.json``.
        file: the weights' name.
    """
    kept = known.structures.get(kind)
    if kept is not None and kept[0] == base:
        return kept[1]
    before = found.count
    entries = parse_header(kind.header, kind.size_bytes, file, found)
    if entries is None or kind.config is None:
        return None if entries is None else Structure(entries)
    modules = check_tensors(entries, kind.config, file, found)
    if base is not None:
        check_modules(modules, base, file, found)
        check_vocabulary(entries, base, file, found)
    structure = Structure(entries, modules, shape_of(kind.config, entries, modules))
    if found.count == before and len(kind.header) <= MAX_KEPT_BYTES:
        known.structures = _with(known.structures, kind, (base, structure))
    return structure


def shape_of(
    config: AdapterConfig, entries: tuple[TensorEntry, ...] = (), modules: tuple[LoraModule, ...] = ()
) -> LoraShape:
    """Say what the config and the tensors agree on."""
    names = tuple(sorted({module.name.rsplit(".", 1)[-1] for module in modules}))
    said = config.target_modules
    return LoraShape(
        rank=max(
            (config.largest_rank if module.of_all_experts else module.rank for module in modules),
            default=config.largest_rank,
        ),
        alpha=config.alpha,
        target_modules=names or ((said,) if isinstance(said, str) else said),
        dtype="+".join(sorted({FLOATS.get(e.dtype, e.dtype) for e in entries})) or "unknown",
        use_rslora=config.use_rslora,
    )
