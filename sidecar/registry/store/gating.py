"""Whether a revision may serve the plain name, where its namespace or who promotes it wants it evaluated.

No gate stops a rollback: it restores what the name served before.
"""

from __future__ import annotations

from lora_fs.sidecar.errors import GateNotPassed, OperatorError
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.model.gates import BadGate, Gate, parse
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.writer import Registry


def required_gate(registry: Registry, namespace: str) -> Gate | None:
    """Return the gate of a namespace; None: none. Raises OperatorError if it is unknown."""
    quota = registry.accounts.quota(namespace)
    if quota is None or quota.require_evaluation is None:
        return None
    try:
        return parse(quota.require_evaluation)
    except BadGate as error:
        raise OperatorError(
            f"namespace {namespace}: {error}: nothing is promoted there until `lora-fs quota "
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


def check_new(registry: Registry, namespace: str, name: str, *, activates: bool) -> None:
    """Raise GateNotPassed where bytes that are new, so never evaluated, would serve the plain name."""
    if activates and required_gate(registry, namespace) is not None:
        raise GateNotPassed(
            f"namespace {namespace} lets {name} serve evaluated revisions only: register it with "
            "--no-activate, evaluate it, and promote it"
        )
