"""The parts of adapters that only newer engines serve right, as a table. Pure: bytes and words come in.

An older vLLM does not refuse such an adapter: it ignores the field, and its answers are another model's. An
unknown version never counts as new enough.

Source: vllm 0.31 and 0.32, ``lora/peft_helper.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from packaging.version import InvalidVersion, Version

from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import Finding
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE, parse_config
from lora_fs.sidecar.validate.report import Findings

SINCE: Mapping[str, Version] = MappingProxyType(
    {"rank_pattern": Version("0.32"), "alpha_pattern": Version("0.32")}
)
_CURE = (
    "serve it with vLLM {} or newer, or train it with one rank and one alpha; other replicas serve what "
    "their engines can"
)


def version_problem(said: str | None) -> str | None:
    """Say why an engine's version is unknown; None for a known one."""
    if said is None:
        return "this replica's engine does not say its version"
    try:
        Version(said)
    except InvalidVersion:
        return f"what this replica's engine says its version is, {shown(said)}, is none"
    return None


@lru_cache(maxsize=8)  # each load asks, and the answer is the version's
def heeds_all(said: str | None) -> bool:
    """Whether an engine that says this version heeds every field that one before it ignored."""
    return not too_old(tuple(SINCE), said)


def needs_newer(config: bytes) -> tuple[str, ...]:
    """The fields that are set and that not every engine heeds."""
    value = parse_config(config, Findings())
    return tuple(field for field in SINCE if value is not None and value.get(field))


def too_old(fields: tuple[str, ...], said: str | None) -> tuple[Finding, ...]:
    """Say of each field why an engine of this version cannot serve it; none: it can.

    Args:
        fields: as ``needs_newer`` gives them.
        said: what the engine says its version is.
    """
    found, problem = Findings(), version_problem(said)
    for field in fields:
        since = SINCE[field]
        if said is None or problem is not None:
            why = f"vLLM before {since} ignores it, and {problem}"
        elif Version(said) < since:
            why = f"this replica's engine, vLLM {shown(said)}, ignores it: it would answer as another model"
        else:
            continue
        found.add("engine-too-old", CONFIG_FILE, field, why, hint=_CURE.format(since))
    return found.freeze()
