"""What a registration asks of the revisions that a name has, told by one listing of each folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.registry.format.layout import Listing
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.release import active
from lora_fs.sidecar.registry.store.writer import Registry


@dataclass(frozen=True, slots=True)
class Revisions:
    """The revisions of a name as they were listed once.

    Attributes:
        listed: the revisions that mention the name, and what is there of it.
        newest: the newest good record of each; withdrawn ones, too.
    """

    listed: Mapping[str, Listing]
    newest: Mapping[str, Record]

    @property
    def present(self) -> dict[str, Record]:
        return {revision: record for revision, record in self.newest.items() if record.present}


def revisions_of(registry: Registry, scope: Scope, name: str) -> Revisions:
    """Read a name's revisions afresh. Raises VolumeUnavailable."""
    listed = registry.mentions(scope, name)
    series = {revision: registry.records(AdapterKey(*scope, revision, name)) for revision in listed}
    found = {
        revision: registry.newest(series[revision], listing.records[name])
        for revision, listing in listed.items()
        if name in listing.records
    }
    return Revisions(listed, {revision: record for revision, record in found.items() if record is not None})


def next_revision(
    registry: Registry, scope: Scope, name: str, known: Revisions, digest: str, files: Sequence[str]
) -> str:
    """Return a revision whose ``files`` lie there unrecorded (a register was killed), else the next one."""
    for revision, listing in known.listed.items():
        if name in listing.folders and revision not in known.newest:
            folder = registry.layout.artifact(AdapterKey(*scope, revision, name))
            with suppress(LoraFsError):  # other files than ours
                if artifacts.digest_of(artifacts.hash_files(folder, files)) == digest:
                    return revision
    taken = [int(match[1]) for revision in known.listed if (match := re.fullmatch(r"v([0-9]+)", revision))]
    return f"v{max(taken, default=0) + 1}"


def policy_of_served(
    registry: Registry, scope: Scope, name: str, existing: Mapping[str, Record]
) -> Policy | None:
    """Return the policy of what the name serves: a name stays pinned, or eager, with its next revision."""
    pointer = active(registry, scope, name) if existing else None
    served = existing.get(pointer.revision) if pointer is not None and pointer.revision is not None else None
    return served.spec.policy if served is not None else None
