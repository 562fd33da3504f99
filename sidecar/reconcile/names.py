"""What names mean to one replica now: its catalog, and what a name is in it. From memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from lora_fs.sidecar.reconcile.catalog import Catalog, Served, Terms, build
from lora_fs.sidecar.reconcile.stage.looks import copy_name
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.view.snapshot import touched


class Names:
    """The names that one replica serves.

    Attributes:
        of_engine: names that the engine itself serves; they may be set before it answers.
    """

    def __init__(self, terms: Terms, volume: Volume) -> None:
        self.terms, self.of_engine = terms, frozenset[str]()
        self._volume = volume
        self._catalog = Catalog()
        self._digests: Counter[str] = Counter()  # of how many revisions each is
        self._copies: Counter[str] = Counter()

    def catalog(self) -> Catalog:
        """Return the catalog. Builds it anew after a change of the volume or of the engine's own names."""
        last, desired = self._catalog, self._volume.desired
        if last.source is not desired or last.terms.engine_names != self.of_engine:
            terms = self.terms._replace(engine_names=self.of_engine)
            self._catalog = build(desired, terms, last.version + 1, last)
            self._count(last)
        return self._catalog

    def digests(self) -> Container[str]:
        """Return those of every adapter there is, served or not."""
        self.catalog()
        return self._digests

    def copies(self) -> Container[str]:
        """Return what the copies of all adapters are called."""
        self.catalog()
        return self._copies

    def _count(self, last: Catalog) -> None:
        before, after = last.source.records, self._catalog.source.records
        changed = touched(before, after)
        for records, more in ((after, 1), (before, -1)):  # a thread that sweeps misses none that stays
            for record in map(records.get, changed):
                if record is None or not record.present:
                    continue
                for counts, one in ((self._digests, record.spec.digest), (self._copies, copy_name(record))):
                    counts[one] += more
                    if not counts[one]:
                        del counts[one]

    def lookup(self, name: str) -> Served | None:
        """Resolve a public name; None for an unknown one."""
        return self.catalog().find(name)
