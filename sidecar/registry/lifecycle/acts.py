"""What people do to a registered name, as values: at a volume and over HTTP the same.

An act holds the request. ``do`` does it to a registry; a rehearsal of one writes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lora_fs.sidecar.errors import Conflict, InputError
from lora_fs.sidecar.model import Pointer, Policy, PolicyKind, Priority, Record, Scope
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.model.names import LabelKey, Text
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.store import evaluations, gating
from lora_fs.sidecar.registry.store.writer import Registry

REVISION: Final = "This revision alone; null: every one"


@dataclass(frozen=True, slots=True)
class By:
    """Who acts. ``default``: the policy where a record without one begins."""

    writer: str
    default: Policy


class Done(BaseModel):
    """The writes of an act, or with ``dry_run`` its planned ones."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    dry_run: bool = Field(False, description="A rehearsal: no write")
    records: tuple[Record, ...] = Field((), description="The new generations now in force")
    pointer: Pointer | None = Field(None, description="Of the name; null if the act does not move it")


class Act(BaseModel):
    """What a caller asks of one name. ``word``: the command's, and the last part of the route."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    word: ClassVar[str]

    dry_run: bool = Field(False, description="Check, and answer what would change; change nothing")

    def audited(self) -> dict[str, Any]:
        """Return what the audit keeps."""
        return self.model_dump(mode="json", exclude={"dry_run"}, exclude_defaults=True)

    @abstractmethod
    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        """Do it. Blocking; raises what the function of ``release`` or ``amend`` that it calls does."""

    def _done(self, *records: Record, pointer: Pointer | None = None) -> Done:
        return Done(dry_run=self.dry_run, records=records, pointer=pointer)


class Unregister(Act):
    """Withdraw a revision, or a name with all it has."""

    word = "unregister"

    revision: str | None = Field(None, description="This one alone; null: the only one there is")
    all_revisions: bool = Field(False, description="The name with everything it has")
    keep_files: bool = Field(False, description="gc never removes its files")
    force: bool = Field(False, description="Also the revision that the name serves while it has others")

    @model_validator(mode="after")
    def _one_of_both(self) -> Unregister:
        if self.revision is not None and self.all_revisions:
            raise ValueError("revision and all_revisions exclude each other")
        return self

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        if self.revision is not None and not self.force:
            self._check_not_serving(registry, scope, name)
        gone = release.unregister(
            registry,
            scope,
            name,
            revision=self.revision,
            all_revisions=self.all_revisions,
            keep_files=self.keep_files,
            writer=by.writer,
        )
        return self._done(*gone)

    def _check_not_serving(self, registry: Registry, scope: Scope, name: str) -> None:
        """Raise Conflict if ``name`` would serve nothing while it has another registered revision."""
        pointer = release.active(registry, scope, name)
        if pointer is None or pointer.revision != self.revision:
            return
        others = release.present_revisions(registry, scope, name).keys() - {self.revision}
        if others:
            raise Conflict(
                f"{name} serves {self.revision}: without it the name serves nothing. Promote another "
                f"revision first ({', '.join(sorted(others))}), or repeat with --force"
            )


class Promote(Act):
    """Let the plain name serve a revision."""

    word = "promote"

    revision: str
    require_evaluation: bool = Field(False, description="Its evaluation must have passed a gate")
    force: bool = Field(False, description="Also one that the namespace's gate refuses; the audit has it")

    @model_validator(mode="after")
    def _one_of_both(self) -> Promote:
        if self.force and self.require_evaluation:
            raise ValueError("force and require_evaluation exclude each other")
        return self

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        if not self.force:
            record = release.chosen_of(registry, scope, name, self.revision)[self.revision]
            gating.check(registry, record, required=self.require_evaluation)
        return self._done(pointer=release.promote(registry, scope, name, self.revision, writer=by.writer))


class Rollback(Act):
    """Let the plain name serve the revision it served before."""

    word = "rollback"

    revision: str | None = Field(
        None, description="Only to this one, and only if it served that before; null: whichever it was"
    )

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        pointer = release.rollback(registry, scope, name, self.revision, writer=by.writer)
        return self._done(pointer=pointer)


class Try(Act):
    """Let another revision answer a share of the requests for the name; change, finish or abort that."""

    word = "canary"

    revision: str | None = Field(None, description="Null: the one on trial")
    percent: int | None = Field(None, ge=0, le=100, description="Null: as it is; at first 0")
    end: Literal["finish", "abort"] | None = Field(
        None, description="finish: it serves the name from now on; abort: it answers nothing more"
    )
    force: bool = Field(False, description="Also one that the namespace's gate refuses; the audit has it")

    @model_validator(mode="after")
    def _one_of_both(self) -> Try:
        if (self.end is None) == (self.revision is None and self.percent is None):
            raise ValueError("say a revision, a percent or both; or only the end")
        return self

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        if not self.force and (self.percent or self.end == "finish"):
            self._check(registry, scope, name)
        if self.end is not None:
            finish = self.end == "finish"
            pointer = release.end_canary(registry, scope, name, finish=finish, writer=by.writer)
        else:
            pointer = release.set_canary(registry, scope, name, self.revision, self.percent, writer=by.writer)
        return self._done(pointer=pointer)

    def _check(self, registry: Registry, scope: Scope, name: str) -> None:
        pointer = release.active(registry, scope, name)
        tried = pointer.canary.revision if pointer is not None and pointer.canary is not None else None
        if (revision := self.revision or tried) is not None:
            gating.check(registry, release.chosen_of(registry, scope, name, revision)[revision])


class Pin(Act):
    """Never evict the name."""

    word = "pin"

    revision: str | None = Field(None, description=REVISION)
    priority: Priority | None = Field(None, description="Greater stays where not all pinned ones have room")

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        said = {"kind": PolicyKind.PINNED.value} | _said(priority=self.priority)
        changes = [amend.with_policy(by.default, said)]
        records = amend.amend(registry, scope, name, changes, writer=by.writer, revision=self.revision)
        return self._done(*records)


class Unpin(Act):
    """Restore the policy that the name had before `pin`."""

    word = "unpin"

    revision: str | None = Field(None, description=REVISION)

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        records = amend.unpin(registry, scope, name, writer=by.writer, revision=self.revision)
        return self._done(*records)


class Set(Act):
    """Change a name's policy, labels or retention."""

    word = "set"

    revision: str | None = Field(None, description=REVISION)
    policy: PolicyKind | Literal["default"] | None = Field(
        None, description="When it is in the engine; default: as each sidecar is set"
    )
    ttl_s: int | None = Field(None, ge=1, description="Idle seconds of a lazy adapter")
    priority: Priority | None = Field(None, description="Eager and pinned: greater loads first")
    labels: dict[LabelKey, Text | None] = Field({}, description="To set; null takes a label away")
    keep_revisions: Annotated[int, Field(ge=1)] | Literal["none"] | None = Field(
        None, description="gc keeps so many revisions; none: as the namespace says"
    )
    if_generation: int | None = Field(
        None, ge=1, description="Only if the record is of this generation still"
    )

    @model_validator(mode="after")
    def _something(self) -> Set:
        if self.policy == "default" and _said(ttl_s=self.ttl_s, priority=self.priority):
            raise ValueError("the policy default leaves ttl_s and priority to each sidecar, too")
        if not self._changes(Policy()) and self.keep_revisions is None:
            raise ValueError("say what to change: policy, ttl_s, priority, labels or keep_revisions")
        return self

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        records, pointer, changes = [], None, self._changes(by.default)
        if changes:
            records = amend.amend(
                registry,
                scope,
                name,
                changes,
                writer=by.writer,
                revision=self.revision,
                expect=self.if_generation,
            )
        if self.keep_revisions is not None:
            count = None if self.keep_revisions == "none" else self.keep_revisions
            pointer = amend.keep_revisions(registry, scope, name, count, writer=by.writer)
        return self._done(*records, pointer=pointer)

    def _changes(self, default: Policy) -> list[amend.Change]:
        changes: list[amend.Change] = []
        kind = self.policy.value if isinstance(self.policy, PolicyKind) else None
        said = _said(kind=kind, ttl_s=self.ttl_s, priority=self.priority)
        if self.policy == "default":
            changes.append(amend.without_policy)
        elif said:
            changes.append(amend.with_policy(default, said))
        if self.labels:
            changes.append(amend.with_labels(self.labels))
        return changes


class Evaluate(Act):
    """Keep what an evaluation of a revision found. A newer one takes its place."""

    word = "evaluate"

    evaluation: Evaluation

    def audited(self) -> dict[str, Any]:
        found = self.evaluation
        return {"revision": found.measured.revision, "gate": found.gate, "passed": found.passed}

    def do(self, registry: Registry, scope: Scope, name: str, by: By) -> Done:
        found = self.evaluation.model_copy(update={"writer": by.writer})
        if (found.namespace, found.model, found.name) != (*scope, name):
            raise InputError(f"this evaluation is of {found.name} in {found.namespace}/{found.model}")
        revision = found.measured.revision
        record = release.chosen_of(registry, scope, name, revision)[revision]
        if record.spec.digest != found.measured.digest:
            raise Conflict(f"{name}@{revision} has other bytes than were evaluated: evaluate it again")
        if not self.dry_run:
            evaluations.write(registry, found)
        return self._done(record)


ACTS: Final[tuple[type[Act], ...]] = (Unregister, Promote, Rollback, Try, Pin, Unpin, Set, Evaluate)


def _said(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
