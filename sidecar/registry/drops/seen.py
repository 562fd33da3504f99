"""The scopes as the last step saw them: a step looks through a scope's records again only once it changed.

Ten thousand records that commands wrote are no drops: one look tells, as long as their scope stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.registry.format.ids import natural_order
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.view.snapshot import Desired


@dataclass(slots=True)
class Seen:
    """A scope at one step.

    Attributes:
        records: None if it has none.
        drops: the folders that may be drops; None if nobody asked so far.
    """

    listing: ScopeListing
    records: Mapping[AdapterKey, Record] | None
    drops: list[AdapterKey] | None = None

    @classmethod
    def of(cls, scope: Scope, desired: Desired, before: Seen | None) -> Seen:
        """A scope now: the very object ``before`` if it did not change."""
        listing, records = desired.listings[scope], desired.records.parts.get(scope)
        same = before is not None and before.listing is listing and before.records is records
        return before if before is not None and same else cls(listing, records)

    def possible_drops(self, scope: Scope) -> list[AdapterKey]:
        """The folders that may be drops, by the record of each; earlier revisions first."""
        if self.drops is None:
            records = self.records or {}
            keys = (
                AdapterKey(*scope, revision, name)
                for revision, entries in self.listing.revisions.items()
                for name in entries.folders
            )
            self.drops = sorted((key for key in keys if may_be_a_drop(records.get(key))), key=_by_revision)
        return self.drops

    def new_folders(self, scope: Scope, before: Seen | None) -> list[AdapterKey]:
        """The folders that the listing ``before`` did not have; earlier revisions first."""
        known = before.listing if before is not None else ScopeListing()
        found: list[AdapterKey] = []
        for revision, entries in self.listing.revisions.items():
            earlier = known.of(revision)
            if entries is not earlier:
                names = entries.folders - earlier.folders
                found += [AdapterKey(*scope, revision, name) for name in names]
        return sorted(found, key=_by_revision)


def _by_revision(key: AdapterKey) -> tuple[tuple[int, int, str], ...]:
    """Revisions that came together are adopted in their order: a rollback then has one to go back to."""
    return natural_order(key.revision)


def may_be_a_drop(record: Record | None) -> bool:
    """The digest guards a registered folder, and what a withdrawal left of it."""
    if record is None:
        return True
    return record.origin == "folder" if record.present else record.spec.fingerprint is not None
