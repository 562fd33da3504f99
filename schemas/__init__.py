"""JSON Schemas of every file on the volume and every body of the HTTP API.

Owns the ``*.json`` files beside this module and nothing else; imports nothing of lora-fs.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, cast


def names() -> list[str]:
    """List the schemas by name, sorted."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in files(__name__).iterdir()
        if entry.name.endswith(".json")
    )


@cache
def _text(name: str) -> str:
    return files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")


def load(name: str) -> dict[str, Any]:
    """Return the schema called ``name``, a fresh object at each call.

    Raises:
        FileNotFoundError: there is no such schema; ``names()`` lists them.
    """
    return cast("dict[str, Any]", json.loads(_text(name)))
