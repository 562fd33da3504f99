"""What an adapter is but for its weights' values: pure on its configuration and its header's bytes.

Adapters that were trained alike have the same. So what gave no finding is kept, and the next of its
kind is not worked out anew; what gave one is, to tell it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lora_fs.sidecar.model import LoraShape
from lora_fs.sidecar.validate.base import check_modules, check_vocabulary
from lora_fs.sidecar.validate.config import AdapterConfig
from lora_fs.sidecar.validate.header import TensorEntry, parse_header
from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.tensors import FLOATS, LoraModule, check_tensors

KINDS_KEPT = 16
MAX_KEPT_BYTES = 128 * 1024  # of a header: what is built from one takes several times as much

Base = Mapping[str, object]


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


_in_order: dict[Kind, tuple[Base | None, Structure]] = {}  # replaced, never changed: any thread may look


def study(kind: Kind, base: Base | None, file: str, found: Findings) -> Structure | None:
    """Apply every rule to what the header lists; None when it cannot be trusted.

    Args:
        base: the base model's ``config.json``.
        file: the weights' name.
    """
    global _in_order
    kept = _in_order.get(kind)
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
        _in_order = dict(list({**_in_order, kind: (base, structure)}.items())[-KINDS_KEPT:])
    return structure


def shape_of(
    config: AdapterConfig, entries: tuple[TensorEntry, ...] = (), modules: tuple[LoraModule, ...] = ()
) -> LoraShape:
    """Say what the config and the tensors agree on."""
    names = tuple(sorted({module.name.rsplit(".", 1)[-1] for module in modules}))
    said = config.target_modules
    return LoraShape(
        rank=max((module.rank for module in modules), default=config.largest_rank),
        alpha=config.alpha,
        target_modules=names or ((said,) if isinstance(said, str) else said),
        dtype="+".join(sorted({FLOATS.get(e.dtype, e.dtype) for e in entries})) or "unknown",
        use_rslora=config.use_rslora,
    )
