"""How often each adapter was asked for, by the record that answered: in memory, since this replica began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lora_fs.sidecar.model import AdapterKey

if TYPE_CHECKING:
    from lora_fs.sidecar.reconcile.catalog import Served


class Tally:
    """Counts by plain name, until they are dropped."""

    def __init__(self) -> None:
        self._counted: dict[str, Counter[AdapterKey]] = {}

    def count(self, served: Served) -> None:
        """A request that ``served`` answers."""
        self._counted.setdefault(served.name.partition("@")[0], Counter())[served.record.key] += 1

    def of(self, names: Iterable[str], told: Callable[[str, AdapterKey], bool]) -> dict[tuple[str, str], int]:
        """Requests by plain name and revision, of those that are to be ``told``."""
        return {
            (name, key.revision): count
            for name in names
            for key, count in self._counted.get(name, {}).items()
            if told(name, key)
        }

    def drop(self, name: str, key: AdapterKey) -> None:
        """Forget what a record answered."""
        counted = self._counted.get(name)
        if counted is not None:
            del counted[key]
            if not counted:
                del self._counted[name]
