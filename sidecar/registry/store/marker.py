"""The marker that says *this folder is a registry*: read it, and make it on demand.

An empty folder is not an empty registry: an unmounted volume looks the same. So ``lora-fs.json`` marks a
registry. A process makes it only when asked. It compares the uuid with that of the registry it opened before.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import (
    CorruptRecord,
    FormatTooNew,
    RegistryLost,
    RegistryMissing,
    VolumeUnavailable,
)
from lora_fs.sidecar.registry.format.layout import MARKER, Layout
from lora_fs.sidecar.registry.format.sealed import decode, seal, unseal
from lora_fs.sidecar.registry.store.head import Head, current_head
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import LinkUnsupported, TemporaryNames
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.mounts import mount_of

FORMAT = 1


class Marker(BaseModel):
    """``lora-fs.json``. ``tier``: "cas" where link() works, else "lww" (last writer wins)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    format: int = FORMAT
    min_reader: int = 1
    min_writer: int = 1
    registry_uuid: str
    epoch: int = Field(default=1, ge=1)
    tier: Literal["cas", "lww"] = "cas"
    sum: str = ""


class _Empty(RegistryLost):
    """The marker has its name and no bytes: damaged, or where link() is missing, not written yet."""


class Created(NamedTuple):
    """A registry's marker. ``made``: this call wrote it."""

    marker: Marker
    made: bool


def has_hard_links(folder: Path) -> bool:
    """Try whether link() gives a file a second name. On some mounts it makes a copy, which decides no race.

    Raises:
        VolumeUnavailable: the volume does not allow the trial.
    """
    first = atomic.write_temporary(folder, b"probe\n")
    second = first.with_name(first.name + "-link")
    try:
        os.link(first, second)
        return _is_one_file(first, second)
    except OSError as error:
        if error.errno in atomic.NO_LINK:
            return False
        raise atomic.unavailable(error, f"cannot try hard links in {folder}") from error
    finally:
        for left in (second, first):
            atomic.discard(left)


def _is_one_file(first: Path, second: Path) -> bool:
    """By the inode; or, where each name has a number of its own (sshfs), by a write that both names show."""
    status = os.stat(first)
    if os.path.samestat(status, os.stat(second)):
        return status.st_nlink == 2
    with suppress(OSError):
        handle = os.open(first, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(handle, b"PROBE\n")
        finally:
            os.close(handle)
        return second.read_bytes() == b"PROBE\n"
    return False


def create(root: Path) -> Created:
    """Make ``root`` a registry, or return the marker of the one that is there already.

    Where link() is missing it also completes a call that was killed before its marker had any bytes.

    Raises:
        RegistryLost: it was one, and its marker is gone or damaged.
        VolumeUnavailable: the volume does not take it.
    """
    layout = Layout(root)
    names = atomic.list_names(root)
    if names is None:
        make_folder(root, inherit=False)
        names = []
    if layout.marker.name in names:
        try:
            return Created(_read_fresh_marker(root), made=False)
        except _Empty:
            head = None if was_written_to(root) else current_head(layout)
            if head is None or find_tier(root) == "cas":
                raise
            atomic.replace(layout.marker, seal(_completed(head)), sync=True)
            return Created(read_marker(root), made=True)
    if was_written_to(root):
        raise RegistryLost(f"{_without_marker(layout)}, or remove {layout.head} to begin a new registry here")
    for folder in (layout.leases, layout.replicas, layout.events):  # so that each can be a mount of its own
        make_folder(folder)
    tier = find_tier(root)
    if layout.head.name not in names:
        first = Head(made=secrets.token_hex(8), nonce=secrets.token_hex(8))
        atomic.replace(layout.head, seal(first), sync=True)  # readers would take a torn one as valid
    temporary, ours = TemporaryNames(), Marker(registry_uuid=str(uuid.uuid4()), tier=tier)
    try:
        made = write_marker(root, ours, temporary)
    finally:
        temporary.sweep(wait=True)
    return Created(_read_fresh_marker(root), made)


def _completed(head: Head) -> Marker:
    """Return the marker that completes a killed ``create``: the same one, however many write it at once."""
    return Marker(registry_uuid=str(uuid.uuid5(uuid.NAMESPACE_OID, head.made + head.nonce)), tier="lww")


def is_registry(root: Path) -> bool:
    """Whether a marker lies there; raises as ``atomic.list_names`` does."""
    return MARKER in (atomic.list_names(root) or ())


def find_tier(root: Path) -> Literal["cas", "lww"]:
    """Try what the tier of a registry made here is."""
    return "cas" if has_hard_links(root) else "lww"


def write_marker(root: Path, marker: Marker, temporary: TemporaryNames) -> bool:
    """Write the marker: from then on the folder is a registry. Returns False if another one is there.

    Raises:
        VolumeUnavailable: the volume does not take it.
    """
    path = Layout(root).marker
    try:
        if marker.tier == "cas":
            return atomic.publish(path, seal(marker), temporary)
        atomic.create_unique(path, seal(marker))
        return True
    except LinkUnsupported as error:
        raise VolumeUnavailable(f"{root}: hard links work and do not: try again") from error
    except VolumeUnavailable as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        return False


def _read_fresh_marker(root: Path) -> Marker:
    """Read a marker that another process may be writing at this moment, where link() is missing."""
    for pause_s in (0.02, 0.1, 0.4):
        try:
            return read_marker(root)
        except RegistryLost:
            time.sleep(pause_s)
    return read_marker(root)


def was_written_to(root: Path) -> bool:
    """Whether HEAD lists records; an unreadable HEAD counts as if it did.

    Raises:
        VolumeUnavailable: the volume does not list the folder.
    """
    layout = Layout(root)
    if layout.head.name not in (atomic.list_names(root) or ()):
        return False
    with suppress(VolumeUnavailable):
        head = current_head(layout)
        return head is None or head.seq > 0
    return True


def read_marker(root: Path) -> Marker:
    """Read the marker.

    Raises:
        RegistryMissing: there is no registry here.
        RegistryLost: the marker is there and unreadable.
        FormatTooNew: it needs a newer lora-fs even to be read.
    """
    layout = Layout(root)
    try:
        data = atomic.read_bytes(layout.marker)
    except atomic.NotRegular as error:
        raise RegistryLost(f"{error}: restore it from a backup") from error
    if data is None:
        raise missing(layout)
    if not data:
        raise _Empty(
            f"{layout.marker} is damaged: it is empty; if `lora-fs init` or `lora-fs import archive` was "
            "killed here, call it again, else restore it from a backup"
        )
    try:
        needs = unseal(data).get("min_reader", FORMAT)
        if isinstance(needs, int) and needs > FORMAT:  # says so before a shape that only a newer one knows
            raise FormatTooNew(
                f"{root} needs a reader of format {needs}; this lora-fs reads up to {FORMAT}: upgrade it"
            )
        return decode(Marker, data)
    except CorruptRecord as error:
        raise RegistryLost(f"{layout.marker} is damaged: {error}; restore it from a backup") from error


def missing(layout: Layout) -> RegistryMissing:
    """Return what a root without a marker is: not there, a registry that lost its marker, or none."""
    names = atomic.list_names(layout.root)
    if was_written_to(layout.root):
        return RegistryMissing(_without_marker(layout))
    if os.path.isfile(layout.root):
        return RegistryMissing(f"{layout.root} is a file, and a registry is a folder: name another root")
    mount, kind = mount_of(layout.root)
    where = f"no {MARKER}" if names is not None else "there is no such folder"
    where += f"; it lies on {mount}, {kind}" if mount else ""
    return RegistryMissing(
        f"{layout.root} holds no registry ({where}). Is the volume mounted? "
        f"If this is a new volume: lora-fs init --root {layout.root}"
    )


def _without_marker(layout: Layout) -> str:
    head = None
    with suppress(VolumeUnavailable):
        head = current_head(layout)
    says = "tells of records" if head is not None else "cannot be read"
    return f"{layout.marker} is gone and {layout.head} {says}: restore the marker from a backup"
