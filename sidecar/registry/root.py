"""Opening and creating a registry: the marker that says *this folder is one*, and HEAD.

An empty folder is not an empty registry: an unmounted volume looks the same. So a registry
is known by ``lora-fs.json``, and one that was open before is compared by its uuid.
HEAD is a hint, replaced at every write: bytes that differ from the last read say *look*.
"""

from __future__ import annotations

import os
import secrets
import uuid
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord, FormatTooNew, NotFound, RegistryLost
from lora_fs.sidecar.registry import atomic
from lora_fs.sidecar.registry.atomic import LinkUnsupported, TemporaryNames
from lora_fs.sidecar.registry.codec import decode, seal
from lora_fs.sidecar.registry.layout import Layout

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


class Head(BaseModel):
    """``HEAD``: replaced at every write. ``nonce`` makes two writes at one seq differ."""

    model_config = ConfigDict(frozen=True, extra="allow")

    epoch: int = 1
    seq: int = 0
    snap: int = 0
    gc_floor: int = 0
    nonce: str = ""
    sum: str = ""


def _has_links(folder: Path) -> bool:
    first = atomic.write_temporary(folder, b"probe\n")
    second = first.with_name(first.name + "-link")
    try:
        os.link(first, second)
    except OSError as error:
        if error.errno in atomic.NO_LINK:
            return False
        raise atomic.unavailable(error, f"cannot try hard links in {folder}") from error
    else:
        second.unlink(missing_ok=True)
        return True
    finally:
        first.unlink(missing_ok=True)


def create(root: Path) -> Marker:
    """Make ``root`` a registry, or return the marker of the one that is there already."""
    layout = Layout(root)
    names = atomic.list_names(root)
    if names is None:
        atomic.make_folder(root)
        names = []
    if layout.marker.name in names:
        return read_marker(root)
    atomic.make_folder(layout.leases)
    atomic.make_folder(layout.replicas)
    tier: Literal["cas", "lww"] = "cas" if _has_links(root) else "lww"
    marker = Marker(registry_uuid=str(uuid.uuid4()), tier=tier)
    if layout.head.name not in names:
        atomic.replace(layout.head, seal(Head(nonce=secrets.token_hex(8))))
    temporary = TemporaryNames()
    try:
        if tier == "cas":
            atomic.publish(layout.marker, seal(marker), temporary)
        else:
            atomic.create_unique(layout.marker, seal(marker))
    except LinkUnsupported:
        atomic.create_unique(layout.marker, seal(marker))
    finally:
        temporary.sweep(wait=True)
    return read_marker(root)


def read_marker(root: Path) -> Marker:
    """Read the marker.

    Raises:
        NotFound: there is no registry here.
        RegistryLost: the marker is there and unreadable.
        FormatTooNew: it needs a newer lora-fs even to be read.
    """
    layout = Layout(root)
    data = atomic.read_bytes(layout.marker)
    if data is None:
        raise NotFound(
            f"{root} holds no registry (no {layout.marker.name}). Is the volume mounted? "
            "`lora-fs register` and the sidecar create one in an empty folder."
        )
    try:
        marker = decode(Marker, data)
    except CorruptRecord as error:
        raise RegistryLost(f"{layout.marker} is damaged: {error}; restore it from a backup") from error
    if marker.min_reader > FORMAT:
        raise FormatTooNew(
            f"{root} has format {marker.format}; this lora-fs reads up to {FORMAT}: upgrade it"
        )
    return marker


def read_head(root: Path) -> bytes | None:
    """HEAD as it lies there, to be compared with the last one; None if it cannot be told."""
    return atomic.read_bytes(Layout(root).head, limit_bytes=4096)


def advance_head(root: Path, epoch: int) -> None:
    """Replace HEAD so that every reader looks. A damaged or missing one is made anew."""
    data = read_head(root)
    try:
        head = decode(Head, data) if data else Head()
    except CorruptRecord:
        head = Head()
    after = head.model_copy(update={"epoch": epoch, "seq": head.seq + 1, "nonce": secrets.token_hex(8)})
    layout = Layout(root)
    atomic.replace(layout.head, seal(after), draft_in=layout.leases)
