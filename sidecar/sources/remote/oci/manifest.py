"""Read a manifest of unknown origin: which layers are an adapter's files, and which are tars. Pure: no I/O.

A layer with the name of a served file is that file; other layers are unpacked if they are tars. Names come
from ``org.opencontainers.image.title`` (ORAS) or ``org.cncf.model.filepath`` (ModelPack). No name becomes a
path: the last segment selects a file, and must be one of five names.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.sources.offer import CARRIED, MAX_CARRIED_BYTES, wanted
from lora_fs.sidecar.sources.receive.tarball import TAKEN
from lora_fs.sidecar.sources.remote.oci.reference import DIGEST

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MOST_BYTES = 4 << 20  # what the Distribution specification lets a registry refuse above
MOST_LAYERS = 512

_TITLES = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_UNPACK = "io.deis.oras.content.unpack"
_ATTESTATION = "vnd.docker.reference.type"
# These say of a tar that it is one. ORAS's default type says it of plain files, too.
_TARS = re.compile(r"application/vnd\.(?:cncf\.model|kitops)\..*[.+]tar\b")
_TAR = re.compile(r"[.+]tar\b")
_OLOT = "olot.layer.content.type"
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob. ``title``: the name that its push gave it; empty if none."""

    media_type: str
    digest: str
    size_bytes: int
    title: str
    packed: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files to fetch, by their name in the adapter's folder, and the tars to unpack into it."""

    files: dict[str, Layer]
    tars: tuple[Layer, ...]


def read(told: str, data: bytes) -> dict[str, Any]:
    """Read the JSON of a manifest or an index.

    Raises:
        InputError: it is neither.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{told}: its manifest is no JSON") from error
    if not isinstance(body, dict):
        raise InputError(f"{told}: its manifest is no JSON object")
    kind = body.get("mediaType") or (INDEXES if "manifests" in body else MANIFESTS)[0]
    if kind not in (*MANIFESTS, *INDEXES) or body.get("schemaVersion") != 2:
        raise InputError(
            f"{told}: it is a {shown(str(kind)[:120])}, and not an image manifest of version 2: push the "
            "adapter with ORAS, or as a ModelPack"
        )
    return {**body, "mediaType": kind}


def only_manifest(told: str, index: Mapping[str, Any]) -> str:
    """The digest of the one manifest that an index lists, attestations left out.

    Raises:
        InputError: it lists another index, or not one manifest.
    """
    found = []
    for entry in _listed(told, index, "manifests"):
        annotations = _annotations(told, entry)
        if entry.get("mediaType") not in MANIFESTS:
            raise InputError(
                f"{told}: its index lists a {shown(str(entry.get('mediaType'))[:120])}: an index is "
                "followed to manifests alone"
            )
        if _ATTESTATION not in annotations:
            found.append(_digest(told, entry))
    if len(set(found)) != 1:
        some = ", ".join(found[:4]) or "none"
        raise InputError(
            f"{told}: its index lists {len(set(found))} manifests ({some}): write @sha256:… of one"
        )
    return found[0]


def choose(told: str, manifest: Mapping[str, Any]) -> Chosen:
    """Which layers of a manifest to fetch.

    Raises:
        InputError: no adapter can be in it, or a name leaves its folder.
    """
    layers = [_layer(told, entry) for entry in _listed(told, manifest, "layers")]
    named = [
        (*posixpath.split(posixpath.normpath(layer.title)), layer) for layer in layers if not layer.packed
    ]
    folders = {folder for folder, name, _ in named if name in TAKEN and name not in CARRIED}
    files: dict[str, Layer] = {}
    for folder, name, layer in named:
        if name not in TAKEN or (name in CARRIED and folders and folder not in folders):
            continue
        if name in files or len(folders) > 1:
            raise InputError(f"{told} holds more than one adapter: push one folder")
        files[name] = layer
    tars = tuple(layer for layer in layers if layer.packed)
    if any(layer.media_type.endswith("zstd") for layer in tars):
        raise InputError(f"{told} is packed with zstd, which is not read: push it as tar or tar+gzip")
    if not tars:
        try:
            names = wanted({name: layer.size_bytes for name, layer in files.items()})
        except InputError as error:
            kinds = sorted({layer.media_type for layer in layers})[:4]
            more = f"; its layers are {', '.join(map(shown, kinds))}" if kinds else "; it has no layer"
            raise InputError(f"{told}: {error}{more}") from error
        return Chosen({name: files[name] for name in names}, ())
    return Chosen(
        {
            name: layer
            for name, layer in files.items()
            if name not in CARRIED or layer.size_bytes <= MAX_CARRIED_BYTES
        },
        tars,
    )


def _layer(told: str, entry: Mapping[str, Any]) -> Layer:
    media_type, size, annotations = entry.get("mediaType"), entry.get("size"), _annotations(told, entry)
    if not isinstance(media_type, str) or type(size) is not int or size < 0:
        raise InputError(f"{told}: a layer of its manifest has no media type, or no size")
    title = next((annotations[key] for key in _TITLES if key in annotations), "").removeprefix("./")
    if title.startswith("/") or ".." in title.split("/") or _CONTROL.search(title):
        raise InputError(f"{told}: the layer {shown(title[:120])} leaves its folder")
    packed = annotations.get(_UNPACK, "").lower() == "true" or bool(_TARS.match(media_type))
    if not packed and _TAR.search(media_type):
        packed = _OLOT in annotations or title.rpartition("/")[2] not in TAKEN
    return Layer(media_type[:200], _digest(told, entry), size, title, packed)


def _listed(told: str, body: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    entries = body.get(field)
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise InputError(f"{told}: its manifest has no list of {field}")
    if len(entries) > MOST_LAYERS:
        raise InputError(f"{told}: its manifest has {len(entries)} {field}; {MOST_LAYERS} are the most")
    return entries


def _digest(told: str, entry: Mapping[str, Any]) -> str:
    digest = entry.get("digest")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise InputError(f"{told}: {shown(str(digest)[:120])} in its manifest is no sha256 digest")
    return digest


def _annotations(told: str, entry: Mapping[str, Any]) -> dict[str, str]:
    found = entry.get("annotations") or {}
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise InputError(f"{told}: the annotations of its manifest are no texts")
    return found
