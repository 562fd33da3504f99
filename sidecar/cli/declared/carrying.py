"""Documents carried out one by one: what one of them lacks stops none of the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lora_fs.sidecar.cli.declared.documents import OWNER
from lora_fs.sidecar.cli.declared.plan import (
    Difference,
    Name,
    Offered,
    Plan,
    Refused,
    Registered,
    by_name,
    pin_of,
    plan,
    plan_absent,
    prunable,
)
from lora_fs.sidecar.cli.declared.reading import Declared, Problem
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.errors import (
    Conflict,
    GateNotPassed,
    InvalidName,
    LoraFsError,
    OverQuota,
    SourceUnavailable,
    TemporaryError,
)
from lora_fs.sidecar.model import Pointer, Record, Scope
from lora_fs.sidecar.registry.lifecycle.acts import Act, Promote, Unregister
from lora_fs.sidecar.registry.lifecycle.artifacts import SERVED, digest_of, hash_files
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome
from lora_fs.sidecar.sources.known import is_remote
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.sources.uri import is_uri, parse

ROUNDS = 4  # the fourth plan sees register, promote, try and keep at the latest


@dataclass
class Row:
    """The outcome of a document, or of a pruned name."""

    scope: Scope
    name: str
    outcome: str
    differences: tuple[Difference, ...] = ()
    declared: Declared | None = None
    problem: Problem | None = None
    written: dict[str, Record | Pointer] = field(default_factory=dict)
    record: Record | None = None


class Carrying:
    """The state of one run. ``dry_run``: write nothing."""

    def __init__(self, context: Context, owner: str, *, dry_run: bool) -> None:
        self._context, self._owner, self._dry_run = context, owner, dry_run
        self._there: dict[Name, Registered] = {}
        self.unreadable: list[str] = []

    def look(self, scopes: Collection[Scope]) -> None:
        """Read the registered adapters; ``unreadable`` names the rest."""
        desired = self._context.backend.desired(sorted(scopes))
        self._there = by_name(desired.records.values(), desired.pointers)
        self.unreadable = [*desired.problems.values(), *filter(None, [desired.frozen])]

    def apply(self, declared: Declared) -> Row:
        """Carry one document out."""
        row = Row(declared.scope, declared.key[1], "unchanged", declared=declared)
        try:
            self._apply(declared, row)
        except Refused as refused:
            row.problem = declared.problem(refused.path, str(refused))
        except (LoraFsError, OSError) as error:
            row.problem = declared.problem(_field_of(error), str(error))
        if row.problem is not None:
            row.outcome = "failed"
        return row

    def prune(self, declared: Collection[Name]) -> list[Row]:
        """Remove what only an earlier ``apply`` of this owner made, and no document has."""
        return [self._prune(name) for name in prunable(self._there, declared, self._owner)]

    def _prune(self, name: Name) -> Row:
        row = Row(*name, "removed")
        try:
            there = self._afresh(name)  # others may have registered since the look
            if there.owners != {self._owner}:
                row.outcome = "kept" if there.revisions else "unchanged"
            else:
                self._remove(row, there)
        except (LoraFsError, OSError) as error:
            row.outcome = "failed"
            row.problem = Problem("--prune", 0, f"{name[0]}: {name[1]}", str(error))
        return row

    def _remove(self, row: Row, there: Registered) -> None:
        gone = plan_absent(there, self._owner)
        row.differences, row.outcome = gone.differences, "removed" if gone.acts else "unchanged"
        for act in gone.acts:
            self._do(row, act)

    def _apply(self, declared: Declared, row: Row) -> None:
        if declared.absent:
            self._remove(row, self._afresh(declared.key))
            return
        _check_allowed(declared.document.spec.allow)
        offered = self._offered(declared)
        there = self._there.get(declared.key, Registered())
        wanted = plan(declared.document, there, offered, self._owner)
        if wanted.differences:  # documents before this one may have taken hours
            there = self._afresh(declared.key)
            wanted = plan(declared.document, there, offered, self._owner)
        row.differences, row.record = wanted.differences, wanted.record
        if wanted.differences:
            row.outcome = "created" if not there.revisions else "changed"
        if self._dry_run:
            self._rehearse(declared, wanted, row)
            return
        for _ in range(ROUNDS):
            if wanted.register is not None:
                offered = self._register(declared, wanted, row)
            for act in wanted.acts:
                self._do(row, act)
            if wanted.register is None and (wanted.acts or not wanted.differences):
                return
            wanted = plan(declared.document, self._afresh(declared.key), offered, self._owner)
            row.record = wanted.record
        raise Conflict("another writer changes it at the same time: apply again")

    def _afresh(self, name: Name) -> Registered:
        named = self._context.backend.named(*name)
        present = {record.revision: record for record in named.revisions if record.present}
        return Registered(present, named.pointer)

    def _offered(self, declared: Declared) -> Offered:
        """The bytes at the source. A document with a digest needs no look at its source."""
        source = self._source(declared)
        if is_remote(source, self._context.settings.lora_downloader_plugin):
            return Offered(str(parse(source)) if is_uri(source) else source, declared.document.spec.digest)
        digest = declared.document.spec.digest
        known = self._there.get(declared.key, Registered()).revisions.values()
        if digest is not None and any(record.spec.digest == digest for record in known):
            return Offered(source, digest)
        folder = resolve(source, self._context.settings.mounts())
        files = [name for name in SERVED if (folder / name).is_file()]
        return Offered(folder.as_uri(), digest_of(hash_files(folder, files)))

    def _source(self, declared: Declared) -> str:
        source = declared.document.spec.source
        if is_uri(source) or self._context.settings.lora_downloader_plugin is not None:
            return source
        return str(declared.folder / source)

    def _rehearse(self, declared: Declared, wanted: Plan, row: Row) -> None:
        """Check the registration, if that needs no download, or the acts."""
        source = self._source(declared)
        remote = is_remote(source, self._context.settings.lora_downloader_plugin)
        if wanted.register is not None and not remote:
            said = wanted.register.model_copy(update={"dry_run": True})
            self._context.backend.register(*declared.key, source, said, link=False, plugin=None)
        for act in wanted.acts:
            self._do(row, act)
            if isinstance(act, Promote):
                return  # what follows needs the pointer that it writes

    def _register(self, declared: Declared, wanted: Plan, row: Row) -> Offered:
        assert wanted.register is not None
        done = self._context.backend.register(
            *declared.key, self._source(declared), wanted.register, link=False, plugin=None
        )
        self._check(declared, done)
        self._wrote(row, {"record": done.record, "pointer": done.pointer})
        return Offered(done.record.spec.source.uri, done.record.spec.digest)

    def _check(self, declared: Declared, done: Outcome) -> None:
        """Withdraw fetched bytes that are not those that the document names; they never served."""
        spec, record = declared.document.spec, done.record
        for field_name, wanted, found in (
            ("digest", spec.digest, record.spec.digest),
            ("pin", spec.pin, pin_of(record)),
        ):
            if wanted is not None and wanted != found:
                if record.spec.labels.get(OWNER) == self._owner and done.changed:
                    act = Unregister(revision=record.revision)
                    self._context.backend.do(*declared.key, act)
                raise Refused(("spec", field_name), f"what came from {spec.source} has {found}")

    def _do(self, row: Row, act: Act) -> None:
        act = act.model_copy(update={"dry_run": self._dry_run})
        done = self._context.backend.do(row.scope, row.name, act)
        records = {f"record {record.revision}": record for record in done.records}
        self._wrote(row, {**records, "pointer": done.pointer})

    def _wrote(self, row: Row, bodies: Mapping[str, Record | Pointer | None]) -> None:
        there = {what: body for what, body in bodies.items() if body is not None}
        if there and not row.written:
            self._context.written.append(f"{row.scope}: {row.name}")
        row.written |= there


def _check_allowed(codes: list[str]) -> None:
    if not codes:
        return
    from lora_fs.sidecar.validate import CODES

    for number, code in enumerate(codes):
        if code not in CODES:
            raise Refused(("spec", "allow", number), f"there is no finding {code!a:.80}")


def _field_of(error: Exception) -> tuple[str, ...]:
    if isinstance(error, InvalidName):
        return ("metadata", "name")
    is_whole = isinstance(error, Conflict | GateNotPassed | OverQuota | TemporaryError)
    return ("spec",) if is_whole and not isinstance(error, SourceUnavailable) else ("spec", "source")
