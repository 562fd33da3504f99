"""How much of an adapter is this worker's share, before any of it is read. Pure: sizes and names.

A tensor-parallel rank keeps a part of A or of B. It reserves room for that part: the whole adapter may not
fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 64  # kinds of adapters


class Part(NamedTuple):
    """Elements that one rank of an adapter has for a layer: here, and in the whole model."""

    here: int
    whole: int


@dataclass(slots=True)
class Shares:
    """The shares of one rank.

    Attributes:
        parts: of every layer that an adapter may change, by the name that an adapter has for it.
    """

    parts: Mapping[str, Part]
    _known: dict[frozenset[str], Part] = field(default_factory=dict)

    def of(self, targets: Collection[str]) -> Part:
        """The sum over the layers that ``targets`` name, each in full or by its last words."""
        key = frozenset(targets)
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            ends = tuple(f".{target}" for target in key)
            found = [part for name, part in self.parts.items() if f".{name}".endswith(ends)]
            self._known[key] = Part(sum(part.here for part in found), sum(part.whole for part in found))
        return self._known[key]

    def size_bytes(self, files_bytes: int, targets: Collection[str], rank: int, itemsize: int) -> int:
        """Return the bytes of this rank's share.

        Args:
            files_bytes: of the whole adapter, in the type that it is kept in.
            targets: the adapter's target modules. If no layer here has such a name, count the whole.
            rank: the adapter's, of all layers; 0 if unknown.
            itemsize: of that type.
        """
        here, whole = self.of(targets)
        if not here:
            return files_bytes
        by_files = -(-files_bytes * here // whole)
        # Files have headers and a configuration besides; but an adapter may leave layers out.
        return min(by_files, here * rank * itemsize) if rank else by_files
