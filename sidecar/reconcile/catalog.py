"""The names a replica serves, made from the desired state. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.reconcile.plan import ALWAYS
from lora_fs.sidecar.registry.view import Desired


@dataclass(frozen=True, slots=True)
class Served:
    """One public name and the record it stands for."""

    name: str  # what clients send as "model": "name", "namespace/name" or "name@revision"
    record: Record


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything a replica serves, at one moment; ``served`` holds the plain names, sorted.

    ``unasked`` are those to be loaded before anyone asks. ``conflicts`` are names not served
    because the engine itself has them: its base model, an adapter it was started with.
    """

    version: int = 0
    served: Mapping[str, Served] = field(default_factory=dict)
    unasked: tuple[Served, ...] = ()
    conflicts: Mapping[str, Record] = field(default_factory=dict)


def public_name(scope: Scope, name: str, namespaces: Collection[str]) -> str:
    """``name`` where one namespace is served, ``namespace/name`` where several are."""
    return name if len(namespaces) == 1 else f"{scope.namespace}/{name}"


def namespace_of(name: str, namespaces: tuple[str, ...]) -> str | None:
    """The namespace that a name registered over HTTP belongs to; None if it is not served here.

    Where several are served a name without one is of the first.
    """
    namespace, slash, _ = name.partition("/")
    if not slash or len(namespaces) == 1:
        return namespaces[0]
    return namespace if namespace in namespaces else None


def build(
    desired: Desired,
    namespaces: Collection[str],
    engine_names: Collection[str],
    version: int,
    default_policy: Policy,
) -> Catalog:
    """Name every active record; a name the engine itself has keeps meaning what it means there."""
    named = {public_name(scope, name, namespaces): record for scope, name, record in desired.active()}
    served = {name: Served(name, named[name]) for name in sorted(named) if name not in engine_names}
    return Catalog(
        version,
        served,
        tuple(s for s in served.values() if (s.record.spec.policy or default_policy).kind in ALWAYS),
        {name: record for name, record in named.items() if name in engine_names},
    )


def find(
    catalog: Catalog, desired: Desired, model: str, namespaces: tuple[str, ...], name: str
) -> Served | None:
    """Resolve a plain name or ``name@revision``; a look-up in memory, whatever the name is."""
    served = catalog.served.get(name)
    if served is not None:
        return served
    plain, at, revision = name.rpartition("@")
    scoped = _scoped(model, namespaces, plain) if at and plain not in catalog.conflicts else None
    if scoped is None:
        return None
    record = desired.records.get(AdapterKey(*scoped[0], revision, scoped[1]))
    return Served(name, record) if record is not None and record.present else None


def is_withdrawn(desired: Desired, model: str, namespaces: tuple[str, ...], name: str) -> bool:
    """Whether the volume says that ``name`` is gone: by a tombstone. Absence says nothing."""
    plain, at, revision = name.rpartition("@")
    scoped = _scoped(model, namespaces, plain if at else name)
    if scoped is None:
        return False
    pointer = desired.pointers.get(scoped)
    if not at and (pointer is None or pointer.revision is None):
        return pointer is not None
    wanted = revision if at else str(pointer and pointer.revision)
    record = desired.records.get(AdapterKey(*scoped[0], wanted, scoped[1]))
    return record is not None and not record.present


def _scoped(model: str, namespaces: tuple[str, ...], plain: str) -> tuple[Scope, str] | None:
    namespace, slash, bare = plain.partition("/")
    if bool(slash) != (len(namespaces) > 1):
        return None
    if not slash:
        namespace, bare = namespaces[0], plain
    return (Scope(namespace, model), bare) if namespace in namespaces else None
