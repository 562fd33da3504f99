"""Restores an export into an empty folder.

Records and pointers keep their bytes. The marker comes last, with a new epoch. Until then the folder holds no
registry. Afterwards running sidecars read the restored state anew. If a restore was killed, the same call
completes it. A linked adapter whose folder is gone gets one more generation, with a folder of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO

from lora_fs.sidecar.errors import Conflict, InputError, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Previous, Record
from lora_fs.sidecar.registry.backup.archive import CHUNK_BYTES, Contents, opened
from lora_fs.sidecar.registry.format.layout import MARKER, Layout, generation_name, parse_place
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import CARRIED
from lora_fs.sidecar.registry.lifecycle.mending import is_whole
from lora_fs.sidecar.registry.lifecycle.taking import Taker
from lora_fs.sidecar.registry.store.head import advance_head
from lora_fs.sidecar.registry.store.marker import Marker, find_tier, is_registry, was_written_to, write_marker
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import TemporaryNames
from lora_fs.sidecar.registry.volume.folders import make_folder


def restore(path: Path, file: Path, contents: Contents, *, as_new: bool = False) -> list[str]:
    """Make an empty folder the registry in the export. Returns the adapters left without files.

    Args:
        as_new: give the copy a registry id of its own, so that nobody takes it for the original.
    Raises:
        Conflict: a registry is or was there, or something else lies where a part of the export belongs.
        InputError: the export changed after its check.
        VolumeUnavailable: the volume does not take it; the same call continues.
    """
    layout = Layout(path)
    check_empty(path)
    if is_registry(path):
        with atomic.explained(f"cannot remove {layout.marker}"):
            layout.marker.unlink()
    make_folder(path, inherit=False)
    for folder in (layout.leases, layout.replicas, layout.events):
        make_folder(folder)
    tier = find_tier(path)
    homes, wanted, lost = _homes(layout, contents)
    generations = _generations(layout, contents, homes, tier)
    _check_alone(layout.root, generations)
    _place_files(layout, file, wanted)
    epoch = max(contents.begin.epoch + 1, int(time.time()))  # one that no reader has seen
    identity = str(uuid.uuid4()) if as_new else contents.begin.registry_uuid
    names = TemporaryNames()
    try:
        for target, data in generations.items():
            _lay(target, data, tier, names)
        for key, data in contents.evaluations.items():
            make_folder(layout.evaluation(key).parent)
            atomic.replace(layout.evaluation(key), data, sync=True)
        if not write_marker(path, Marker(registry_uuid=identity, tier=tier, epoch=epoch), names):
            raise Conflict(f"somebody made {path} a registry meanwhile: restore into another, empty folder")
        advance_head(layout, epoch)
    finally:
        names.sweep(wait=True)
    return lost


def check(path: Path, contents: Contents) -> list[str]:
    """Find what ``restore`` would refuse or leave without files. Writes nothing; returns and raises as it."""
    layout = Layout(path)
    check_empty(path)
    homes, wanted, lost = _homes(layout, contents)
    _check_alone(
        path, {one for tier in ("cas", "lww") for one in _generations(layout, contents, homes, tier)}
    )
    for target in map(layout.artifact, wanted):
        if atomic.list_names(target):
            raise _in_the_way(target)
    return lost


def check_empty(path: Path) -> None:
    """Raise Conflict if a folder is or was a registry: a restore overwrites none."""
    if is_registry(path) and not _is_begun(Layout(path)):
        raise Conflict(
            f"{path} is a registry already, and an archive is restored into an empty folder: restore it with "
            "`lora-fs --root EMPTY import archive FILE --as-new`, then `lora-fs register NAME "
            "EMPTY/NAMESPACE/MODEL/REVISION/NAME` what you need of it"
        )
    if was_written_to(path):
        raise Conflict(
            f"{path} was a registry, whose {MARKER} is gone: restore the archive into an empty folder on the "
            f"same volume, with `lora-fs --root EMPTY import archive FILE`, and copy {MARKER} from there"
        )


def _is_begun(layout: Layout) -> bool:
    """Whether a restore was killed before it wrote its marker's first byte, where link() is missing.

    A registry that somebody used has HEAD, which comes after the marker here.
    """
    names = atomic.list_names(layout.root) or ()
    return layout.head.name not in names and atomic.read_bytes(layout.marker) == b""


def _homes(
    layout: Layout, contents: Contents
) -> tuple[dict[AdapterKey, Record], dict[AdapterKey, Record], list[str]]:
    """Return what gets files of its own, what of it the export has to give, and the adapters left without."""
    homes, wanted, lost = dict[AdapterKey, Record](), dict[AdapterKey, Record](), list[str]()
    for record in contents.records.values():
        if not record.present or is_whole(layout, record):
            continue
        home = _at_home(layout, record)
        if not is_whole(layout, home):
            if not contents.has_files_of(home):
                where = layout.resolve(record.spec.path)
                lost.append(f"{record.key}: its files are not in the export and not in {where}")
                continue
            wanted[record.key] = home
        homes[record.key] = home
    return homes, wanted, lost


def _generations(
    layout: Layout, contents: Contents, homes: Mapping[AdapterKey, Record], tier: str
) -> dict[Path, bytes]:
    """Return the file of each generation that a restore writes, with its bytes."""
    found: dict[Path, bytes] = {}

    def add(key: AdapterKey, body: Record | Pointer, data: bytes) -> None:
        folder = layout.revision(key.scope, key.revision) if key.revision else layout.active(key.scope)
        token = body.token if tier == "lww" else ""
        found[folder / generation_name(body.name, body.generation, token)] = data

    for key, body in contents.bodies.items():
        add(key, body, contents.raw[key])
        home = homes.get(key)
        if home is not None and home is not body:
            following = _next(home)
            add(key, following, seal(following))
    return found


def _check_alone(root: Path, generations: Collection[Path]) -> None:
    """Raise Conflict if a generation lies there that is not the export's: it could be in force afterwards."""
    with atomic.explained(f"cannot look into {root}"):
        for file in root.glob("*/*/*/*.json"):
            if file not in generations and parse_place(str(file.relative_to(root))) is not None:
                raise Conflict(f"{file} is not in the export: restore it into an empty folder")


def _at_home(layout: Layout, record: Record) -> Record:
    """Return the record with its own folder on the volume; a linked one then owns its files."""
    if layout.resolve(record.spec.path) == layout.artifact(record.key):
        return record
    spec = record.spec.model_copy(update={"path": str(record.key)})
    return record.model_copy(update={"spec": spec, "keep_files": False})


def _next(home: Record) -> Record:
    """A record as the generation after itself. Every repeat of a restore writes the same one."""
    previous = Previous(generation=home.generation, sum=home.sum)
    return home.model_copy(
        update={"generation": home.generation + 1, "previous": previous, "request_id": home.sum[:32]}
    )


def _place_files(layout: Layout, file: Path, wanted: Mapping[AdapterKey, Record]) -> None:
    """Copy adapters' files out of an export, in which those of one adapter lie together."""
    left = {str(key): record for key, record in wanted.items()}
    with opened(file) as members:
        for owner, group in groupby(members, lambda member: member[0].rpartition("/")[0]):
            record = left.pop(owner, None)
            if record is not None:
                _place(layout, record, group)
    if left:
        raise InputError(f"{file} changed while it was read: restore again")


def _place(layout: Layout, record: Record, members: Iterable[tuple[str, IO[bytes]]]) -> None:
    """Place one folder. It is whole and synced before it has its name."""
    served, target = {entry.path for entry in record.spec.files}, layout.artifact(record.key)
    draft = artifacts.new_draft(layout, record.key.scope)
    for folder in (draft.parent, target.parent):
        make_folder(folder)
    try:
        with Taker(draft) as taker:
            for member, reader in members:
                name = member.rpartition("/")[2]
                if name in served or name in CARRIED:
                    taker(name, memoryview(b""))
                    while chunk := reader.read(CHUNK_BYTES):
                        taker(name, memoryview(chunk))
            taker.end()
            taker.sync_names()
        if artifacts.digest_of([one for one in taker.files if one.path in served]) != record.spec.digest:
            raise InputError(f"{record.key}: the export changed while it was read: restore again")
        if not artifacts.place(draft, target):
            raise _in_the_way(target)
    finally:
        artifacts.discard(draft)


def _in_the_way(folder: Path) -> Conflict:
    return Conflict(f"{folder} holds other bytes than the export: move it away")


def _lay(path: Path, data: bytes, tier: str, names: TemporaryNames) -> None:
    make_folder(path.parent)
    there = atomic.read_bytes(path)
    try:
        if tier == "lww" and there is None:  # nobody else writes here yet, and half a file is never seen
            atomic.replace(path, data, sync=True)
            return
        if there is None and atomic.publish(path, data, names):
            return
    except LoraFsError as error:
        raise VolumeUnavailable(f"{error}: restore again") from error
    if data not in (there, atomic.read_bytes(path)):
        raise Conflict(
            f"{path} is another one than the export's: move it away, or import into an empty folder"
        )
