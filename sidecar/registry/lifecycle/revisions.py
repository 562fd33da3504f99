"""What a registration asks of the revisions that a name has: the next free one, what the last was told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.release import active
from lora_fs.sidecar.registry.store.writer import Registry


def next_revision(registry: Registry, scope: Scope, name: str, digest: str, files: Sequence[str]) -> str:
    """The one whose ``files`` lie there unrecorded, as a killed register leaves them; else the next."""
    mentions = registry.mentions(scope, name)
    for revision, listing in mentions.items():
        key = AdapterKey(*scope, revision, name)
        if name in listing.folders and (name not in listing.records or _no_good_record(registry, key)):
            folder = registry.layout.artifact(key)
            with suppress(LoraFsError):  # other files than ours
                if artifacts.digest_of(artifacts.hash_files(folder, files)) == digest:
                    return revision
    taken = [int(match[1]) for revision in mentions if (match := re.fullmatch(r"v([0-9]+)", revision))]
    return f"v{max(taken, default=0) + 1}"


def _no_good_record(registry: Registry, key: AdapterKey) -> bool:
    """Whether none can be read, as where link() is missing and its writer was killed over it."""
    return registry.latest(registry.records(key))[1] is None


def newest_record(registry: Registry, key: AdapterKey) -> Record | None:
    """The newest record, without looking up a folder that is not there."""
    listing = registry.mentions(key.scope, key.name).get(key.revision)
    if listing is None or key.name not in listing.records:
        return None
    return registry.latest(registry.records(key))[1]


def policy_of_served(
    registry: Registry, scope: Scope, name: str, existing: Mapping[str, Record]
) -> Policy | None:
    """So that a name stays pinned, or eager, with its next revision."""
    pointer = active(registry, scope, name) if existing else None
    served = existing.get(pointer.revision) if pointer is not None and pointer.revision is not None else None
    return served.spec.policy if served is not None else None
