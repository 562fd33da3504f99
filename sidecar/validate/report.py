"""What a caller expects of an adapter, what validation answers, and the list findings grow in.

Types and bookkeeping only; it contains no rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.escaping import printable, shown
from lora_fs.sidecar.model import Finding, LoraShape, Severity
from lora_fs.sidecar.validate.codes import CODES

if TYPE_CHECKING:
    from lora_fs.sidecar.trust import Trust

# A broken adapter repeats its fault in every layer; the first ones tell the story.
MAX_FINDINGS_PER_CODE = 8
ERRORS_OF_STOCK = frozenset({"renamed-experts", "many-patterns"})


@dataclass(slots=True)
class Learned:
    """The engine's word about its base model. Attributes are replaced whole: any thread may look."""

    base_config: Mapping[str, object] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expectation:
    """The caller's facts. Each is optional, and rules skip what is unknown.

    Attributes:
        model_ids: the names the base model goes by: hub id, served name, path.
        base_config: the base model's ``config.json``, parsed.
        max_rank: the engine's ``--max-lora-rank``.
        allow: codes the caller overrides; their errors become warnings.
        strict_base_model: another name of the base model is an error, also where names cannot tell.
        learned: what takes the place of ``base_config`` where that is None, and further names.
        fleet: the live replicas that are to serve it: what none of them can is an error.
        forced: that is a warning.
        trust: who has to have signed it; None: nobody.
        stock: a vLLM without lora-fs's plugin serves it: what only the plugin serves well is an error.
    Raises:
        InputError: ``allow`` names a code that does not exist or cannot be overridden.
    """

    model_ids: tuple[str, ...] = ()
    base_config: Mapping[str, object] | None = None
    max_rank: int | None = None
    allow: frozenset[str] = frozenset()
    strict_base_model: bool = False
    learned: Learned = field(default_factory=Learned)
    fleet: tuple[Peer, ...] = ()
    forced: bool = False
    trust: Trust | None = None
    stock: bool = False

    def base(self) -> Mapping[str, object] | None:
        """The base model's ``config.json``, as far as known now."""
        return self.learned.base_config if self.base_config is None else self.base_config

    def allowed(self, codes: frozenset[str] | None = None) -> tuple[str, ...]:
        """The codes, in order, of errors that become warnings: its own, or those of ``codes``."""
        allow = self.allow if codes is None else codes
        return tuple(sorted(code for code in allow if code in CODES and CODES[code].overridable))

    def __post_init__(self) -> None:
        for code in sorted(self.allow):
            if code not in CODES:
                raise InputError(f"cannot allow {shown(code)!r}: there is no such finding code")
            if not CODES[code].overridable and CODES[code].severity is Severity.ERROR:
                raise InputError(f"cannot allow {code!r}: an adapter like this cannot be served")


@dataclass(frozen=True, slots=True)
class Peer:
    """A live replica, as it reports itself.

    Attributes:
        judges_by: its facts; rules skip what is unknown.
        loads: whether its engine can load adapters; None: unknown.
        version: its engine's; None: not known.
    """

    replica: str
    judges_by: Expectation = field(default_factory=Expectation)
    loads: bool | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What validation found.

    Attributes:
        findings: in the order they were made: files, config, header, tensors, contents.
        shape: None when the config or the header could not be read. ``rank`` is the largest
            rank of any module, ``target_modules`` what the tensors are for (what the config
            says, if nothing read them); ``dtype`` is "unknown" for an allowed pickle.
        base_model: the config's ``base_model_name_or_path``.
        served_files: the files an engine reads, by name; empty unless both opened.
        size_bytes: of the served files together.
    """

    findings: tuple[Finding, ...]
    shape: LoraShape | None
    base_model: str | None
    served_files: tuple[str, ...]
    size_bytes: int = 0

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is Severity.WARNING)

    @property
    def ok(self) -> bool:
        """Whether lora-fs may serve the adapter: no finding is an error."""
        return not self.errors


class Findings:
    """Collects findings: applies the table's severities, the caller's overrides and a bound.

    Args:
        allow, stock: as an ``Expectation`` has them.
    """

    def __init__(self, allow: frozenset[str] = frozenset(), *, stock: bool = False) -> None:
        self.allow = allow
        self._errors = ERRORS_OF_STOCK if stock else frozenset()
        self._kept: list[Finding] = []
        self._seen: Counter[tuple[str, Severity, str]] = Counter()

    def add(
        self,
        code: str,
        file: str,
        field: str,
        message: str,
        *,
        hint: str = "",
        severity: Severity | None = None,
    ) -> None:
        """Note one finding.

        Args:
            code: a key of ``CODES``.
            field: the config's field or the tensor's name; may come from the adapter.
            severity: replaces the table's, where a rule is sure only in some cases.
        """
        entry = CODES[code]
        if severity is None:
            severity = Severity.ERROR if code in self._errors else entry.severity
        if severity is Severity.ERROR and entry.overridable and code in self.allow:
            severity = Severity.WARNING
        self._seen[code, severity, file] += 1
        if self._seen[code, severity, file] <= MAX_FINDINGS_PER_CODE:
            self._kept.append(
                Finding(
                    code=code,
                    severity=severity,
                    file=shown(file),
                    field=shown(field),
                    message=printable(message),
                    hint=printable(hint),
                )
            )

    @property
    def count(self) -> int:
        """How many findings, repeats too."""
        return self._seen.total()

    def freeze(self) -> tuple[Finding, ...]:
        """Return the findings; repeats beyond the bound become one line with their number."""
        can_be_allowed = all(
            CODES[code].overridable and CODES[code].served
            for code, severity, _ in self._seen
            if severity is Severity.ERROR
        )
        more = [
            Finding(
                code=code,
                severity=severity,
                file=shown(file),
                message=f"and {count - MAX_FINDINGS_PER_CODE} more like these",
            )
            for (code, severity, file), count in self._seen.items()
            if count > MAX_FINDINGS_PER_CODE
        ]
        return (*(map(_allowable, self._kept) if can_be_allowed else self._kept), *more)


def _allowable(finding: Finding) -> Finding:
    """The same, with how to allow it if it is an error: where all errors can be, that helps."""
    if finding.severity is not Severity.ERROR:
        return finding
    allow = f"allow with --allow {finding.code}, or in LORA_FS_ALLOW of every replica"
    return finding.model_copy(update={"hint": "; ".join(part for part in (finding.hint, allow) if part)})
