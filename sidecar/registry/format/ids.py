"""The engine's integer ids, and the order of revisions, by name and by time. Pure: no I/O."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping

from lora_fs.sidecar.model import AdapterKey, Record


def int_id(registry_uuid: str, key: AdapterKey, digest: str) -> int:
    """Return the engine's id: 63 bits of a hash over registry, key and digest."""
    data = f"{registry_uuid}|{key}|{digest}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1 or 1


def natural_order(revision: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts v9 before v10."""
    parts = re.split(r"([0-9]+)", revision)
    return tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts if p)


def written_at(text: str) -> datetime.datetime | None:
    """Parse a time that a writer noted, in RFC 3339; without a zone it is UTC. None if it is no time."""
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)


def new_ids(records: Mapping[AdapterKey, Record], registry_uuid: str) -> dict[AdapterKey, int]:
    """Return new ids for adapters that share one, so that all ids differ. Pure.

    The adapter whose id equals ``int_id`` keeps it; if none does, the first by name keeps it.
    """
    holders: dict[int, list[AdapterKey]] = defaultdict(list)
    for key, record in sorted(records.items()):
        if record.present:
            holders[record.spec.int_id].append(key)
    taken, changed = set(holders), {}
    for identity, keys in holders.items():
        ours = [key for key in keys if int_id(registry_uuid, key, records[key].spec.digest) == identity]
        for key in keys:
            if len(keys) > 1 and key != (ours or keys)[0]:
                fresh = int_id(registry_uuid, key, records[key].spec.digest)
                while fresh in taken:
                    fresh = fresh % (2**63 - 1) + 1
                taken.add(fresh)
                changed[key] = fresh
    return changed
