"""Describes the faults of a field that a person wrote, in words that name no class of ours. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lora_fs.sidecar.escaping import shown

_WORDS = {
    "extra_forbidden": "there is no such field",
    "missing": "is missing",
    "bool_type": "is neither true nor false",
    "int_type": "is no whole number",
    "int_parsing": "is no whole number",
    "list_type": "is no list",
    "tuple_type": "is no list",
}
_MAPPINGS = frozenset({"dict_type", "model_type", "model_attributes_type"})


def first(error: ValidationError, mapping: str = "mapping") -> tuple[tuple[int | str, ...], str]:
    """Return the path of the first wrong field, and the reason.

    Args:
        mapping: what the format calls a mapping.
    """
    found: Any = error.errors(include_url=False)[0]
    return found["loc"], _reason(found, mapping)


def _reason(found: dict[str, Any], mapping: str) -> str:
    kind, given = found["type"], found["input"]
    if kind in _MAPPINGS:
        return f"is no {mapping}"
    if kind == "string_type":
        return "is no text" + (": quote it" if isinstance(given, (bool, int, float)) else "")
    if kind == "string_pattern_mismatch":
        return f"{shown(given)!r} does not match {found['ctx']['pattern']}"
    if kind in ("literal_error", "enum"):
        return f"{shown(given)!r} is not {found['ctx']['expected']}"
    return _WORDS.get(kind) or str(found["msg"]).removeprefix("Value error, ")
