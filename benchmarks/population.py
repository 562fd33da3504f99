"""A registry with many adapters, made fast: one adapter registered for real, then its records
copied under other names, each sealed anew. What a reader sees is what as many commands leave.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry import operations, registration
from lora_fs.sidecar.registry.codec import seal
from lora_fs.sidecar.registry.layout import generation_name
from lora_fs.sidecar.registry.registration import Registration
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.validate import Expectation

SCOPE = Scope("default", "tiny")


def register(registry: Registry, name: str, folder: Path) -> registration.Registered:
    """Register as the command does."""
    wanted = Registration(name, folder, folder.as_uri())
    return registration.register(registry, SCOPE, wanted, Expectation(("tiny",)), writer="benchmark")


def unregister(registry: Registry, name: str) -> None:
    """Unregister as the command does."""
    operations.unregister(registry, SCOPE, name, all_revisions=True, writer="benchmark")


def populate(root: Path, folder: Path, count: int) -> Registry:
    """Register ``count`` adapters, ``many-00000`` and on, all with the bytes of ``folder``."""
    registry = Registry(root, create=True)
    first = register(registry, "many-00000", folder).record
    pointer = operations.active(registry, SCOPE, first.name)
    assert pointer is not None
    layout = registry.layout
    for number in range(1, count):
        name = f"many-{number:05d}"
        key = AdapterKey(*SCOPE, first.revision, name)
        artifact = layout.artifact(key)
        shutil.copytree(layout.artifact(first.key), artifact, copy_function=os.link)
        int_id = registration.int_id(registry.marker.registry_uuid, key, first.spec.digest)
        spec = first.spec.model_copy(update={"path": f"{SCOPE}/{key.revision}/{name}", "int_id": int_id})
        record = first.model_copy(update={"name": name, "uid": f"{number:032x}", "spec": spec})
        active = pointer.model_copy(update={"name": name})
        file_name = generation_name(name, 1)
        (layout.revision(SCOPE, key.revision) / file_name).write_bytes(seal(record))
        (layout.active(SCOPE) / file_name).write_bytes(seal(active))
    registry.announce()
    return registry
