"""How to register an adapter, as a value, and the result: the same at a volume and over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.model import Finding, Pointer, Policy, PolicyKind, Priority, Record, Scope
from lora_fs.sidecar.model.names import Text
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.revisions import revisions_of
from lora_fs.sidecar.registry.store.writer import Registry

Bring = Callable[[Registration], Registered]


class RegisterAs(BaseModel):
    """The name, revision and policy that a registration gives an adapter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str | None = Field(None, description="Null: the next vN")
    base_model: Text | None = Field(None, description="What it was made for, when its config does not say")
    policy: PolicyKind | None = Field(None, description="Null: as what the name serves")
    ttl_s: int | None = Field(None, ge=1, description="Idle seconds, after which a lazy one goes")
    priority: Priority | None = Field(None, description="Eager and pinned: greater loads first")
    labels: dict[Text, Text] = Field({}, description="Kept in the record")
    amend: bool = Field(True, description="Known bytes get this policy and labels; false: they keep theirs")
    activate: bool = Field(True, description="Let the plain name serve it")
    allow: tuple[str, ...] = Field((), description="Codes of findings to take as warnings")
    force: bool = Field(False, description="Register also what no live replica can serve")
    dry_run: bool = Field(False, description="Check, and answer what would change; change nothing")

    def registration(self, registry: Registry, scope: Scope, name: str, default: Policy) -> Registration:
        """Make the registration; the caller fills in its source.

        Args:
            default: the policy where a record without one begins.
        """
        policy = self._policy(registry, scope, name, default)
        return Registration(
            name,
            Path(),
            "",
            self.revision,
            self.base_model,
            policy,
            self.labels,
            amends=self.amend,
            activate=self.activate,
        )

    def _policy(self, registry: Registry, scope: Scope, name: str, default: Policy) -> Policy | None:
        """The policy; without its kind, the other fields change that of the served revision."""
        said: dict[str, Any] = {"kind": self.policy, "ttl_s": self.ttl_s, "priority": self.priority}
        said = {field: value for field, value in said.items() if value is not None}
        if not said:
            return None
        begins = default
        if self.policy is None:
            begins = revisions_of(registry, scope, name).policy or begins
        return Policy.model_validate({**begins.model_dump(), **said})


class Outcome(BaseModel):
    """The outcome of a registration."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    dry_run: bool = Field(description="A rehearsal: no write")
    record: Record = Field(description="The one in force")
    changed: bool = Field(description="False if the registry has these bytes already")
    amended: bool = Field(description="They were, and their policy or labels are new")
    restored: bool = Field(description="They were, and files that the volume lost are there again")
    before: Pointer | None = Field(description="What the plain name served; null: it never served anything")
    pointer: Pointer | None = Field(description="What it serves now")
    warnings: tuple[Finding, ...] = Field(description="What validation found and did not refuse")


def register(
    registry: Registry, scope: Scope, name: str, said: RegisterAs, bring: Bring, *, default: Policy
) -> Outcome:
    """Register by ``bring``, which fills in where the bytes are and calls ``ingest.register``. Blocking."""
    before = release.active(registry, scope, name)
    done = bring(said.registration(registry, scope, name, default))
    return Outcome(
        dry_run=said.dry_run,
        record=done.record,
        changed=done.changed,
        amended=done.amended,
        restored=done.restored,
        before=before,
        pointer=before if said.dry_run else release.active(registry, scope, name),
        warnings=done.report.warnings,
    )
