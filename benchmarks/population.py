"""A registry with many adapters, made fast: one adapter registered for real, then its records
copied under other names, each sealed anew. What a reader sees is what as many commands leave.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import struct
from pathlib import Path

from lora_fs.sidecar.model import FileEntry, Scope
from lora_fs.sidecar.registry.format.ids import int_id
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import artifacts, ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation

SCOPE = Scope("default", "tiny")
WEIGHTS = "adapter_model.safetensors"


def register(registry: Registry, name: str, folder: Path, scope: Scope = SCOPE) -> ingest.Registered:
    """Register as the command does."""
    wanted = Registration(name, folder, folder.as_uri())
    return ingest.register(registry, scope, wanted, Expectation(("tiny",)), writer="benchmark")


def unregister(registry: Registry, name: str, scope: Scope = SCOPE) -> None:
    """Unregister as the command does."""
    release.unregister(registry, scope, name, all_revisions=True, writer="benchmark")


def populate(root: Path, folder: Path, count: int) -> Registry:
    """Register ``count`` adapters, ``many-00000`` and on, all with the bytes of ``folder``."""
    registry = Registry(root, create=True)
    fill(registry, SCOPE, folder, count)
    return registry


def fill(registry: Registry, scope: Scope, folder: Path, count: int, *, own_bytes: bool = False) -> None:
    """Register ``count`` adapters in a scope that has none; ``own_bytes``: no two of them alike."""
    first = register(registry, "many-00000", folder, scope).record
    pointer = release.active(registry, scope, first.name)
    assert pointer is not None
    layout, bytes_of = registry.layout, _contents(registry.layout.artifact(first.key))
    for number in range(1, count):
        key = first.key._replace(name=f"many-{number:05d}")
        artifact, files = layout.artifact(key), first.spec.files
        if own_bytes:
            files = _write_own(artifact, number, bytes_of, files)
        else:
            shutil.copytree(layout.artifact(first.key), artifact, copy_function=os.link)
        digest = artifacts.digest_of(files)
        identity = int_id(registry.marker.registry_uuid, key, digest)
        path = f"{scope}/{key.revision}/{key.name}"
        of_it = {"path": path, "int_id": identity, "digest": digest, "files": files}
        spec = first.spec.model_copy(update=of_it)
        own = {name: secrets.token_hex(16) for name in ("uid", "request_id", "token")}
        record = first.model_copy(update={**own, "name": key.name, "spec": spec})
        active = pointer.model_copy(update={"name": key.name, "token": secrets.token_hex(16)})
        file_name = generation_name(key.name, 1)
        (layout.revision(scope, key.revision) / file_name).write_bytes(seal(record))
        (layout.active(scope) / file_name).write_bytes(seal(active))
    registry.announce()


def _contents(artifact: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in artifact.iterdir()}


def _write_own(
    artifact: Path, number: int, contents: dict[str, bytes], files: tuple[FileEntry, ...]
) -> tuple[FileEntry, ...]:
    """The files with the last value of the last tensor another; returns what the record says of them."""
    artifact.mkdir()
    own = {**contents, WEIGHTS: contents[WEIGHTS][:-4] + struct.pack("<f", 1 + number)}
    for name, data in own.items():
        (artifact / name).write_bytes(data)
    changed = {"sha256": hashlib.sha256(own[WEIGHTS]).hexdigest()}
    return tuple(one.model_copy(update=changed) if one.path == WEIGHTS else one for one in files)
