"""``rank_pattern`` and ``alpha_pattern``: each expression is compiled once, however many there are.

vLLM looks each up in a library's cache of 500. An adapter with more keys, as one with a rank for each module
of 80 layers, has keys compiled again for each module: 7 s of a thread that holds the interpreter's lock,
and 91 s with a rank and an alpha for each module of 126 layers.
Source: vllm 0.32, ``lora/peft_helper.py::PEFTHelper._match_pattern``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import regex
from vllm.lora.peft_helper import PEFTHelper

Value = TypeVar("Value", int, float)

KEPT = 4096  # a validated adapter has 2,000 keys in each of both at most


@lru_cache(maxsize=KEPT)
def _compiled(key: str) -> regex.Pattern[str]:
    return regex.compile(rf"(.*\.)?({key})$")


def keep_compiled() -> None:
    """Have vLLM match so, where it has a function of its own for it: since 0.32."""
    if hasattr(PEFTHelper, "_match_pattern"):
        PEFTHelper._match_pattern = staticmethod(match)


def match(pattern: Mapping[str, Value], name: str) -> Value | None:
    """The value of the first key that is a suffix of a module's name, from a dot on; else None."""
    for key, value in pattern.items():
        if _compiled(key).match(name):
            return value
    return None
