"""What an import is to do, decided from both sides before anything is written. Pure: no I/O.

A later state of the same series is never taken back unasked, and what both sides changed apart
from one another is a conflict that a person decides. The bytes of a revision never change, so an
export that has others under the same revision is refused whatever was decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope


class Rule(StrEnum):
    """What happens where both sides differ."""

    REFUSE = "refuse"  # change nothing at all, and say where
    KEEP = "keep"  # keep what is registered here
    TAKE = "take"  # take what the export has


class Verdict(StrEnum):
    """What is done with one record or pointer of an export."""

    ADD = "add"
    SAME = "same"
    MEND = "mend"  # the same, and its files are missing here
    NEWER = "newer here"
    KEPT = "kept"
    REPLACE = "replace"
    CONFLICT = "conflict"
    BYTES = "other bytes"
    NO_FILES = "no files"


REFUSED = frozenset({Verdict.CONFLICT, Verdict.BYTES})
WRITTEN = frozenset({Verdict.ADD, Verdict.MEND, Verdict.REPLACE})


@dataclass(frozen=True, slots=True)
class Here:
    """What is known here of a record of an export.

    Attributes:
        newest: the newest good one, or None.
        descends: the exported generation is one of those here, so what is here came later.
        whole: its files lie here where it would be written to have them, with the bytes that it names.
        offered: the export has those files.
        mendable: the newest one's files are missing or damaged where it has them, and can be had.
    """

    newest: Record | None = None
    descends: bool = False
    whole: bool = False
    offered: bool = False
    mendable: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One record or pointer, what is done with it, and why."""

    what: AdapterKey | tuple[Scope, str]
    verdict: Verdict
    why: str

    @property
    def name(self) -> str:
        if isinstance(self.what, AdapterKey):
            return str(self.what)
        scope, name = self.what
        return f"{scope}: {name}"


def judge_record(archived: Record, here: Here, rule: Rule) -> Step:
    """Decide about one record of an export.

    Args:
        archived: with its own folder if the newest one has its own, whatever it was linked to there.
    """
    key, newest = archived.key, here.newest

    def step(verdict: Verdict, why: str) -> Step:
        return Step(key, verdict, why)

    if newest is None and not archived.present:
        return step(Verdict.SAME, "withdrawn there and unknown here")
    if newest is None:
        return step(*_with_files(Verdict.ADD, "not registered here", here))
    if _same(archived, newest):
        if newest.present and here.mendable:
            return step(Verdict.MEND, "registered, and its files are missing or damaged here")
        return step(Verdict.SAME, "registered here" if newest.present else "withdrawn here, too")
    if here.descends and rule is not Rule.TAKE:
        what = "a later generation" if newest.present else "withdrawn since"
        return step(Verdict.NEWER, f"here it is {what}")
    if archived.present and archived.spec.digest != newest.spec.digest:
        return step(Verdict.BYTES, "registered here with other bytes: revisions never change")
    differs = _difference(archived, newest)
    if rule is Rule.REFUSE:
        return step(Verdict.CONFLICT, differs)
    if rule is Rule.KEEP:
        return step(Verdict.KEPT, differs)
    return (
        step(*_with_files(Verdict.REPLACE, differs, here))
        if archived.present
        else step(Verdict.REPLACE, differs)
    )


def _with_files(verdict: Verdict, why: str, here: Here) -> tuple[Verdict, str]:
    if here.whole or here.offered:
        return verdict, why
    return Verdict.NO_FILES, "its files are neither in the export nor here"


def _same(archived: Record, newest: Record) -> bool:
    return archived.state is newest.state and (
        not archived.present
        or (archived.spec.digest == newest.spec.digest and _said(archived) == _said(newest))
    )


def _said(record: Record) -> tuple[object, ...]:
    """What people said of a revision; the rest follows from its bytes and its place."""
    return record.spec.policy, record.spec.labels, record.keep_files


def _difference(archived: Record, newest: Record) -> str:
    if archived.present != newest.present:
        return (
            "registered there and withdrawn here" if archived.present else "withdrawn there, registered here"
        )
    return "another policy, other labels or other ownership of its files"


def _pointed(pointer: Pointer) -> tuple[object, ...]:
    """What people said of a name; the revision before it follows from that."""
    return pointer.revision, pointer.canary, pointer.keep_revisions


def judge_pointer(
    archived: Pointer, newest: Pointer | None, *, descends: bool, registered: Mapping[str, bool], rule: Rule
) -> Step:
    """Decide about one pointer of an export.

    Args:
        registered: whether a revision of the name will be registered here after the import.
    """
    what = Scope(archived.namespace, archived.model), archived.name
    there, ours = archived.revision, newest.revision if newest is not None else None
    if (there is None) if newest is None else _pointed(archived) == _pointed(newest):
        return Step(what, Verdict.SAME, f"serves {ours or 'nothing'}")
    if there is not None and not registered.get(there, False):
        return Step(what, Verdict.NO_FILES, f"serves {there} there, which is not registered here")
    if newest is None:
        return Step(what, Verdict.ADD, f"is to serve {there}")
    differs = f"serves {ours or 'nothing'} here and {there or 'nothing'} there"
    if there == ours:
        differs = f"serves {ours or 'nothing'}, with another canary, or other revisions are kept"
    if descends and rule is not Rule.TAKE:
        return Step(what, Verdict.NEWER, differs)
    verdict = {Rule.REFUSE: Verdict.CONFLICT, Rule.KEEP: Verdict.KEPT, Rule.TAKE: Verdict.REPLACE}[rule]
    return Step(what, verdict, differs)
