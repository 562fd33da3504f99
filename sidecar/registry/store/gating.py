"""Whether a revision may serve the plain name, where its namespace or who promotes it wants it evaluated.

No gate stops a rollback: it restores what the name served before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from lora_fs.sidecar.errors import GateNotPassed, OperatorError, OverQuota
from lora_fs.sidecar.model import AdapterKey, Quota, Record
from lora_fs.sidecar.model.gates import BadGate, Gate, parse
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.quota import WAIT_S
from lora_fs.sidecar.registry.store.writer import Registry


def required_gate(registry: Registry, namespace: str) -> Gate | None:
    """Return the gate of a namespace; None: none. Raises OperatorError if it is unknown."""
    return _gate_of(registry.accounts.quota(namespace))


def _gate_of(quota: Quota | None) -> Gate | None:
    if quota is None or quota.require_evaluation is None:
        return None
    try:
        return parse(quota.require_evaluation)
    except BadGate as error:
        raise OperatorError(
            f"namespace {quota.namespace}: {error}: nothing is promoted there until `lora-fs quota "
            "--require-evaluation` is given a gate, or none"
        ) from error


def check(registry: Registry, record: Record, *, required: bool = False) -> None:
    """Raise unless the revision may serve the plain name.

    Args:
        required: its evaluation must have passed its own gate, whatever the namespace wants.
    Raises:
        GateNotPassed: says why. OperatorError: the gate or the evaluation cannot be understood.
    """
    gate = required_gate(registry, record.namespace)
    if gate is None and not required:
        return
    pointer = registry.latest(registry.pointers(record.key.scope, record.name))[1]
    if not required and pointer is not None and pointer.revision == record.revision:
        return  # it serves the name already
    what = f"{record.name}@{record.revision}"
    found = evaluations.read(registry, record)
    if found is None:
        raise GateNotPassed(
            f"{what} may not serve {record.name}: it was not evaluated. Run `lora-fs evaluate {what}`"
        )
    unmet = gate.unmet(found.figures, found.baseline_figures) if gate is not None else ()
    if required and not found.passed:
        unmet += found.unmet or ("it was evaluated without a gate",)
    if unmet:
        raise GateNotPassed(f"{what} may not serve {record.name}: {'; '.join(unmet)}")


def check_new(quota: Quota | None, name: str, *, activates: bool) -> None:
    """Raise GateNotPassed where bytes that are new, so never evaluated, would serve the plain name.

    Args:
        quota: the namespace's; None: it has none.
    """
    if quota is not None and activates and _gate_of(quota) is not None:
        raise GateNotPassed(
            f"namespace {quota.namespace} lets {name} serve evaluated revisions only: register these bytes "
            "as another revision with --no-activate, evaluate it, and promote it"
        )


def admitted(
    registry: Registry, key: AdapterKey, size_bytes: int, *, serves_new: bool, wait_s: float = WAIT_S
) -> AbstractContextManager[Callable[[], OverQuota | None]]:
    """Return ``Accounts.admitted`` by what the namespace's quota says now: one read for gate and bounds.

    Args:
        serves_new: the record has bytes that are new, and is to serve the plain name.
    Raises:
        GateNotPassed: see ``check_new``.
    """
    quota = registry.accounts.quota(key.namespace)
    check_new(quota, key.name, activates=serves_new)
    return registry.accounts.admitted(quota, key, size_bytes, wait_s=wait_s)
