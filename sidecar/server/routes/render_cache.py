"""A rendering of each adapter, such as a card or a row, made anew only when the adapter changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from lora_fs.sidecar.registry.view.snapshot import touched
from lora_fs.sidecar.server.ports import Served

One = TypeVar("One")


class RenderCache(Generic[One]):
    """Renderings of the adapters served at the last call. One thread at a time."""

    def __init__(self, make: Callable[[Served], One]) -> None:
        self._make = make
        self._of: Mapping[str, Served] = {}
        self._made: dict[str, One] = {}

    def of(self, served: Mapping[str, Served]) -> dict[str, One]:
        """By name, in no order. Another mapping than before if anything is another."""
        names = touched(self._of, served)
        came = {name: self._make(served[name]) for name in names if name in served}
        gone = [name for name in names if name not in served]
        self._of = served
        if came or gone:
            self._made = self._made | came
            for name in gone:
                del self._made[name]
        return self._made
