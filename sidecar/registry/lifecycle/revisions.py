"""What a registration asks of the revisions that a name has, and the record that follows from it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lora_fs.sidecar.errors import Conflict, LoraFsError, Taken
from lora_fs.sidecar.model import AdapterKey, AdapterSpec, Origin, Pointer, Policy, Record, Scope, State
from lora_fs.sidecar.registry.format.layout import Listing
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.amend import over
from lora_fs.sidecar.registry.lifecycle.release import active, newest_revisions
from lora_fs.sidecar.registry.lifecycle.retention import serving
from lora_fs.sidecar.registry.store.writer import Registry

ADOPTED_IN_PLACE = "folder"  # the origin of a dropped folder, whose bytes its owner may change


@dataclass(frozen=True, slots=True)
class Revisions:
    """The revisions of a name in one listing.

    Attributes:
        folders: those of all revisions.
        listed: the revisions that mention the name, and what is there of it.
        newest: the newest good record of each; withdrawn ones, too.
        pointer: what the name serves, where a revision is present.
    """

    folders: Collection[str]
    listed: Mapping[str, Listing]
    newest: Mapping[str, Record]
    pointer: Pointer | None

    @property
    def present(self) -> dict[str, Record]:
        return {revision: record for revision, record in self.newest.items() if record.present}

    @property
    def served(self) -> Record | None:
        return self.present.get(self.pointer.revision or "") if self.pointer is not None else None

    def is_routed(self, revision: str) -> bool:
        """Whether the plain name serves it or tries it, or a rollback would serve it."""
        return revision in serving(self.pointer)

    def check_letters(self, registry: Registry, scope: Scope, revision: str) -> None:
        """Raise Conflict where the volume takes a new revision for one in other letters, upper or lower."""
        own = registry.layout.revision(scope, revision)
        for one in () if revision in self.folders else self.folders:
            if one.lower() == revision.lower():
                with suppress(OSError):  # else it is not there, as where both are two names
                    if os.path.samefile(own, own.with_name(one)):
                        raise Conflict(
                            f"revision {revision} is {one} on this volume, which takes upper and lower case "
                            "for one: use another revision"
                        )

    @property
    def policy(self) -> Policy | None:
        """The policy of the served revision: a name stays pinned, or eager, with its next one."""
        return self.served.spec.policy if self.served is not None else None


def revisions_of(registry: Registry, scope: Scope, name: str) -> Revisions:
    """Read a name's revisions afresh. Raises VolumeUnavailable."""
    folders = registry.revisions(scope)
    listed = registry.mentions(scope, name, folders)
    newest = newest_revisions(registry, scope, name, listed)
    is_present = any(record.present for record in newest.values())
    return Revisions(folders, listed, newest, active(registry, scope, name) if is_present else None)


def next_revision(
    registry: Registry, scope: Scope, name: str, known: Revisions, digest: str, files: Sequence[str]
) -> str:
    """Return a revision whose ``files`` lie there without a record (a killed register), else the next one."""
    for revision, listing in known.listed.items():
        if name in listing.folders and revision not in known.newest:
            folder = registry.layout.artifact(AdapterKey(*scope, revision, name))
            with suppress(LoraFsError):  # other files than ours
                if artifacts.digest_of(artifacts.hash_files(folder, files)) == digest:
                    return revision
    taken = [int(match[1]) for revision in known.listed if (match := re.fullmatch(r"v([0-9]+)", revision))]
    return f"v{max(taken, default=0) + 1}"


def next_fields(
    key: AdapterKey,
    spec: AdapterSpec,
    newest: Record | None,
    origin: Origin,
    *,
    keep_files: bool,
    unsaid: Collection[str],
) -> dict[str, Any]:
    """The fields of the generation after ``newest`` that says present.

    Args:
        unsaid: fields of the spec that the registration leaves as they are on a registered revision.
    Raises:
        Taken: the revision is there with other bytes.
    """
    said = spec.model_dump(mode="json")
    if newest is not None:
        if newest.spec.digest != spec.digest and origin != ADOPTED_IN_PLACE:
            raise Taken(
                f"revision {key.revision} of {key.name} exists with other bytes "
                f"({newest.spec.digest[:19]}…): revisions never change; register a new one"
            )
        earlier = newest.spec.model_dump(mode="json")
        said = over(earlier, said | ({field: earlier[field] for field in unsaid} if newest.present else {}))
    return {
        "revision": key.revision,
        "uid": newest.uid if newest is not None else secrets.token_hex(16),
        "state": State.PRESENT,
        "origin": origin,
        "keep_files": keep_files,
        "spec": said,
    }
