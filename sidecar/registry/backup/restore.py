"""Restores an export into a folder without a marker.

Records and pointers keep their bytes. The marker comes last, with a new epoch: until then no registry is
there, and running sidecars read the restored state anew. The same call completes a restore that was killed.
One more generation gives a linked adapter whose folder is gone a folder of its own, and gives an adapter
that shares its integer id another one.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from lora_fs.sidecar.errors import Conflict, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Previous, Record
from lora_fs.sidecar.registry.backup.archive import Contents
from lora_fs.sidecar.registry.backup.unpack import at_home, place_files
from lora_fs.sidecar.registry.format.ids import new_ids
from lora_fs.sidecar.registry.format.layout import Layout, generation_name, parse_generation
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle.artifacts import Progress
from lora_fs.sidecar.registry.lifecycle.mending import is_whole
from lora_fs.sidecar.registry.store.head import advance_head
from lora_fs.sidecar.registry.store.marker import Marker, find_tier, is_registry, write_marker
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import TemporaryNames


def restore(
    path: Path, file: Path, contents: Contents, progress: Progress | None = None, *, as_new: bool = False
) -> list[str]:
    """Make a folder without a marker the registry that was exported. Returns the adapters left without files.

    Args:
        as_new: give the copy a registry id of its own, so that nobody takes it for the original.
    Raises:
        Conflict: a registry is there, or another record lies where an exported one belongs.
        VolumeUnavailable: the volume does not take it; called again it goes on.
    """
    layout = Layout(path)
    check_empty(path)
    atomic.make_folder(path, inherit=False)
    for folder in (layout.leases, layout.replicas):
        atomic.make_folder(folder)
    tier = find_tier(path)
    present = {key: record for key, record in contents.records.items() if record.present}
    homes = {key: at_home(layout, r) for key, r in present.items() if not is_whole(layout, r)}
    copied = {key for key, home in homes.items() if home is not present[key] and is_whole(layout, home)}
    wanted = {key: r for key, r in homes.items() if key not in copied and contents.has_files_of(r)}
    epoch = max(contents.begin.epoch + 1, int(time.time()))  # one that no reader has seen
    identity = str(uuid.uuid4()) if as_new else contents.begin.registry_uuid
    marker = Marker(registry_uuid=identity, tier=tier, epoch=epoch)
    there = Reader(layout, marker)
    lost = {
        key: f"its files are not in the export and not in {layout.resolve(present[key].spec.path)}"
        for key in homes
        if key not in copied and key not in wanted
    }
    changed = {key: home for key, home in homes.items() if key not in lost and home is not present[key]}
    known = _others(there, contents) | present
    for key, fresh in new_ids(known, marker.registry_uuid).items():
        if key in present:
            spec = changed.get(key, present[key]).spec.model_copy(update={"int_id": fresh})
            changed[key] = changed.get(key, present[key]).model_copy(update={"spec": spec})
    lost |= place_files(there, file, wanted, progress)
    names = TemporaryNames()
    try:
        for key, record in contents.records.items():
            folder = layout.revision(key.scope, key.revision)
            _lay(folder, record, contents.raw[key], tier, names)
            if key in changed:
                home = _next(changed[key])
                if _is_newest(folder, home, seal(home)):
                    _lay(folder, home, seal(home), tier, names)
                else:
                    lost[key] = "a later generation is here already; fsck says whether it has its files"
        for (scope, name), pointer in contents.pointers.items():
            _lay(layout.active(scope), pointer, contents.raw[scope, name], tier, names)
        lost = {key: why for key, why in lost.items() if not _stands(there, key)}
        write_marker(path, marker, names)
        advance_head(path, epoch)
    finally:
        names.sweep(wait=True)
    return [f"{key}: {why}" for key, why in lost.items()]


def check_empty(path: Path) -> None:
    """Raise Conflict if a folder is a registry: nothing is restored over one."""
    if is_registry(path):
        raise Conflict(
            f"{path} is a registry already, and an archive is restored into an empty folder: restore it with "
            "`lora-fs --root EMPTY import archive FILE --as-new`, then `lora-fs register NAME "
            "EMPTY/NAMESPACE/MODEL/REVISION/NAME` what you need of it"
        )


def _others(there: Reader, contents: Contents) -> dict[AdapterKey, Record]:
    """The records that lie there and are not in the export, as where the marker alone was lost."""
    keys = (
        AdapterKey(*scope, revision, name)
        for scope in there.scopes()
        for revision, listing in there.scan(scope).revisions.items()
        for name in listing.records
    )
    found = {key: there.latest(there.records(key))[1] for key in keys if key not in contents.records}
    return {key: record for key, record in found.items() if record is not None}


def _stands(there: Reader, key: AdapterKey) -> bool:
    """Whether what is in force needs nothing: it is whole, or was withdrawn since the export."""
    newest = there.latest(there.records(key))[1]
    return newest is not None and (not newest.present or is_whole(there.layout, newest))


def _next(home: Record) -> Record:
    """A record as the generation after itself, the same each time: a restore that is repeated meets it."""
    previous = Previous(generation=home.generation, sum=home.sum)
    return home.model_copy(
        update={"generation": home.generation + 1, "previous": previous, "request_id": home.sum[:32]}
    )


def _is_newest(folder: Path, home: Record, data: bytes) -> bool:
    """Whether nothing lies there that is as late, but what a restore before this one made."""
    found = {name: parse_generation(name) for name in atomic.list_names(folder) or ()}
    return all(
        one is None
        or one[0] != home.name
        or one[1].generation < home.generation
        or atomic.read_bytes(folder / name) == data
        for name, one in found.items()
    )


def _lay(folder: Path, body: Record | Pointer, data: bytes, tier: str, names: TemporaryNames) -> None:
    token = body.token if tier == "lww" else ""
    path = folder / generation_name(body.name, body.generation, token)
    atomic.make_folder(folder)
    there = path.name in (atomic.list_names(folder) or ())
    if there and atomic.read_bytes(path) == data:
        return
    try:
        if tier == "lww" and not there:
            atomic.create_unique(path, data)
            return
        if not there and atomic.publish(path, data, names):
            return
    except LoraFsError as error:
        raise VolumeUnavailable(f"{error}: restore again") from error
    raise Conflict(f"{path} is another one than the export's: move it away, or import into an empty folder")
