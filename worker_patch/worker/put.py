"""Put ours in the place of a name of vLLM's that must exist."""

from __future__ import annotations

from typing import Any


def put(owner: Any, name: str, ours: Any) -> None:
    """Put ours in the place of what vLLM has.

    Raises:
        AttributeError: it has nothing there: what is put where nobody looks changes nothing.
    """
    if not hasattr(owner, name):
        who = getattr(owner, "__name__", type(owner).__name__)
        raise AttributeError(f"{who} has no {name}: nothing of vLLM's would be replaced")
    setattr(owner, name, ours)
