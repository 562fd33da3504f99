"""Evaluations that no record is of any more, found by what lies on the volume.

An evaluation outlives the tombstone that gc removes, and one that was under way comes even later. The next
gc finds both. Whoever registers the revision again before that keeps its evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.format.layout import Layout, parse_evaluation
from lora_fs.sidecar.registry.maintenance.garbage import Garbage, What, is_older, remove_empty, size_of
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.store.writer import Registry

EMPTY_S = 24 * 3600.0  # so that none goes that a writer has just made: it makes one anew at most once

ListNames = Callable[[Path], Sequence[str]]  # ``Registry.names``, or one that raises nothing


def folders(layout: Layout, scope: Scope, list_names: ListNames) -> list[Path]:
    """Folders of evaluations, one a revision."""
    above = layout.evaluations(scope)
    return [above / name for name in sorted(list_names(above))]


def files(layout: Layout, scope: Scope, list_names: ListNames) -> Iterator[tuple[Path, AdapterKey]]:
    """Each file of an evaluation, and whose it is."""
    for folder in folders(layout, scope, list_names):
        for name in sorted(list_names(folder)):
            key = parse_evaluation(str((folder / name).relative_to(layout.root)))
            if key is not None:
                yield folder / name, key


def orphans(
    registry: Registry,
    scope: Scope,
    listing: ScopeListing,
    older_than_s: float,
    list_names: ListNames,
) -> Iterator[Garbage]:
    """Evaluations of revisions that have no record, and folders that a writer left empty."""
    for path, key in files(registry.layout, scope, list_names):
        is_known = key.name in listing.of(key.revision).records
        if not is_known and is_older(path, older_than_s):
            remove = partial(_remove, registry, path, key)
            why = f"an evaluation of {key.name}@{key.revision}, which has no record"
            yield Garbage(path, What.LEFTOVER, why, size_of(path), remove)
    for folder in folders(registry.layout, scope, list_names):
        if not list_names(folder) and is_older(folder, max(older_than_s, EMPTY_S)):
            yield Garbage(
                folder, What.LEFTOVER, "an empty folder of evaluations", 0, partial(remove_empty, folder)
            )


def _remove(registry: Registry, path: Path, key: AdapterKey) -> None:
    if not registry.generations(registry.records(key)):
        path.unlink()
