"""What nobody needs any more: old tombstoned artifacts, temporary names, half-done copies.

Temporary names go before anything else, so that a writer that slept cannot link one later.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry import atomic
from lora_fs.sidecar.registry.layout import TEMPORARY
from lora_fs.sidecar.registry.store import Registry


@dataclass(frozen=True, slots=True)
class Garbage:
    """One thing that may go, and why."""

    path: Path
    why: str


def find(
    registry: Registry, scope: Scope, in_use: Collection[AdapterKey], older_than_s: float
) -> list[Garbage]:
    """List what may go. ``in_use``: keys that some replica reports loaded."""
    layout, found = registry.layout, []
    listing = registry.scan(scope)
    folders = [layout.root, layout.leases, layout.replicas, layout.active(scope)]
    folders += [layout.revision(scope, revision) for revision in listing.revisions]
    for folder in folders:
        for name in atomic.list_names(folder) or ():
            if name.startswith(TEMPORARY) and _older(folder / name, older_than_s):
                found.append(Garbage(folder / name, "a temporary name left by a writer that died"))
    incoming = layout.incoming(scope)
    for name in atomic.list_names(incoming) or ():
        if _older(incoming / name, older_than_s):
            found.append(Garbage(incoming / name, "a copy that was never finished"))
    for revision, entries in listing.revisions.items():
        for name in entries.records:
            key = AdapterKey(*scope, revision, name)
            _, record = registry.latest(registry.records(key))
            artifact = layout.artifact(key)
            if record is None or record.present or record.keep_files or key in in_use:
                continue
            if record.origin == "folder" or name not in entries.folders:
                continue  # a dropped folder is its owner's
            generation = layout.revision(scope, revision) / f"{name}.@{record.generation:08d}.json"
            if _older(generation, older_than_s):
                found.append(Garbage(artifact, f"unregistered at {record.updated_at}"))
    return found


def collect(garbage: Collection[Garbage]) -> None:
    """Remove it."""
    for item in garbage:
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except OSError as error:
            raise atomic.unavailable(error, f"cannot remove {item.path}") from error


def _older(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.lstat().st_mtime >= seconds
    except OSError:
        return False  # gone, or cannot be told: leave it
