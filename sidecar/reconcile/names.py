"""What names mean to one replica now: its catalog, and what a name is in it. From memory."""

from __future__ import annotations

from lora_fs.sidecar.model import Policy
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, build, find, is_withdrawn
from lora_fs.sidecar.reconcile.watch.watcher import Volume


class Names:
    """Of one replica.

    Attributes:
        default: the policy of an adapter that has none.
        of_engine: names that the engine itself serves; they may be set before it answers.
    """

    def __init__(self, model: str, namespaces: tuple[str, ...], volume: Volume, default: Policy) -> None:
        self.model, self.namespaces, self.default = model, namespaces, default
        self.of_engine: frozenset[str] = frozenset()
        self._volume = volume
        self._catalog = Catalog()
        self._built_from: tuple[int, frozenset[str]] | None = None

    def catalog(self) -> Catalog:
        """Return the catalog; it is built anew after a change of the volume or of the engine's own names."""
        desired = self._volume.desired
        key = (desired.version, self.of_engine)
        if self._built_from != key:
            version = self._catalog.version + 1
            self._catalog = build(
                desired, self.namespaces, self.of_engine, version, self.default, self._catalog
            )
            self._built_from = key
        return self._catalog

    def lookup(self, name: str) -> Served | None:
        """Resolve a public name; None if it is unknown."""
        return find(self.catalog(), self._volume.desired, self.model, self.namespaces, name)

    def is_withdrawn(self, name: str) -> bool:
        """Whether a tombstone says that a public name is gone. Absence says nothing."""
        return is_withdrawn(self._volume.desired, self.model, self.namespaces, name)

    def may_be_asked_for(self, engine_name: str) -> bool:
        """Whether a public name of this replica looks so; others are from when it served other namespaces."""
        namespace, slash, _ = engine_name.partition("/")
        return bool(slash) and namespace in self.namespaces if len(self.namespaces) > 1 else not slash

    def tenant(self, name: str) -> str:
        """Return the namespace of a public name or an engine's."""
        return name.partition("/")[0] if len(self.namespaces) > 1 else self.namespaces[0]
