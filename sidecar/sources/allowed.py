"""Which folders may be registered from, linked to and read: the registry's own, and those allowed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Allowed:
    """Places an adapter may lie in, each with all that is under it. Links are followed before it is asked."""

    def __init__(self, root: Path, sources: Iterable[str | Path] = ()) -> None:
        self.places = tuple(Path(place).resolve() for place in (root, *sources))

    def covers(self, path: Path) -> bool:
        """Whether ``path`` is under an allowed place, wherever links on its way lead."""
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError, ValueError):  # a link to itself; a NUL
            return False
        return any(resolved.is_relative_to(place) for place in self.places)
