"""Restoring: an export laid down in a folder without a marker, as the registry that it was.

The files are as they were exported, the marker comes last and has another epoch: no registry is
there until all of it is, readers that knew the old one believe the volume anew, and a restore that
was killed is completed by the same one.
"""

from __future__ import annotations

import time
from pathlib import Path

from lora_fs.sidecar.errors import Conflict, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import Pointer, Record
from lora_fs.sidecar.registry import atomic, root
from lora_fs.sidecar.registry.archive import Contents
from lora_fs.sidecar.registry.artifacts import Progress
from lora_fs.sidecar.registry.atomic import TemporaryNames
from lora_fs.sidecar.registry.head import advance_head
from lora_fs.sidecar.registry.layout import Layout, generation_name
from lora_fs.sidecar.registry.root import Marker
from lora_fs.sidecar.registry.unpack import is_whole, place_files


def restore(path: Path, file: Path, contents: Contents, progress: Progress | None = None) -> list[str]:
    """Make a folder without a marker the registry that was exported; returns what it could not bring back.

    Raises:
        Conflict: something lies where an exported record belongs, and is another.
        VolumeUnavailable: the volume does not take it; called again it goes on.
    """
    layout = Layout(path)
    atomic.make_folder(path, inherit=False)
    if layout.marker.name in (atomic.list_names(path) or ()):
        raise Conflict(f"{path} is a registry already")
    for folder in (layout.leases, layout.replicas):
        atomic.make_folder(folder)
    tier = root.find_tier(path)
    present = {key: record for key, record in contents.records.items() if record.present}
    here = {key: record for key, record in present.items() if is_whole(layout, record)}
    offered = {key: record for key, record in present.items() if contents.has_files_of(record)}
    own = {key: r for key, r in offered.items() if layout.resolve(r.spec.path) == layout.artifact(key)}
    wanted = {key: record for key, record in own.items() if key not in here}
    place_files(layout, file, wanted, progress, recorded=True)  # no sidecar looks before the marker is there
    names = TemporaryNames()
    try:
        for key, record in contents.records.items():
            _lay(layout.revision(key.scope, key.revision), record, contents.raw[key], tier, names)
        for (scope, name), pointer in contents.pointers.items():
            _lay(layout.active(scope), pointer, contents.raw[scope, name], tier, names)
        epoch = max(contents.begin.epoch + 1, int(time.time()))  # one that no reader has seen
        marker = Marker(registry_uuid=contents.begin.registry_uuid, tier=tier, epoch=epoch)
        root.write_marker(path, marker, names)
        advance_head(path, epoch)
    finally:
        names.sweep(wait=True)
    return [
        f"{key}: its files are not in the export and not in {layout.resolve(record.spec.path)}"
        for key, record in present.items()
        if key not in here and key not in own
    ]


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
        raise VolumeUnavailable(f"{error}: import again") from error
    raise Conflict(f"{path} is another one than the export's: move it away, or import into an empty folder")
