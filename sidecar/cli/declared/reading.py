"""Files, folders and stdin become documents. A wrong document is reported, and stops no other."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from lora_fs.sidecar import field_errors
from lora_fs.sidecar import yaml_texts as texts
from lora_fs.sidecar.cli.declared import others
from lora_fs.sidecar.cli.declared.documents import LoraAdapter
from lora_fs.sidecar.cli.declared.others import Translated
from lora_fs.sidecar.cli.options.values import stdin
from lora_fs.sidecar.errors import InvalidName
from lora_fs.sidecar.model import Scope, model_slug
from lora_fs.sidecar.sources.migration.gie import CONFIG
from lora_fs.sidecar.yaml_texts import Tree, Wrong, shown_path

MOST_BYTES: Final = 64 << 20
SUFFIXES: Final = frozenset({".yaml", ".yml", ".json"})
STDIN: Final = "-"
KEY: Final = "[key]"  # pydantic's word for a mapping's key, behind the key itself


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault and its place. ``line``: 0 if no line is at fault."""

    file: str
    line: int
    field: str
    why: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.field}: {self.why}" if self.field else f"{where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Declared:
    """A document, and where it stands. ``folder``: what its ``source`` is relative to."""

    file: str
    folder: Path
    scope: Scope
    document: LoraAdapter
    absent: bool
    tree: Tree = field(repr=False)
    at: texts.Path = ()

    @property
    def key(self) -> tuple[Scope, str]:
        return self.scope, self.document.metadata.name

    @property
    def line(self) -> int:
        return self.tree.line_of(self.at)

    def problem(self, path: texts.Path, why: str) -> Problem:
        """A fault in one of its fields."""
        return Problem(self.file, self.tree.line_of((*self.at, *path)), shown_path(path), why)


@dataclass
class Read:
    """The documents, in their order, and the faults of the unreadable ones."""

    declared: list[Declared] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read(names: Sequence[str], namespace: str, model: str | None) -> Read:
    """Read documents.

    Args:
        names: files, folders, ``-``. namespace, model: of documents that do not say them.
    """
    found = Read()
    for file in _files(names, found):
        try:
            text = _text(file)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            found.problems.append(Problem(file, 0, "", f"cannot be read: {why}"))
            continue
        for line, part in texts.cut(text):
            try:
                found.declared += _documents(file, part, line, namespace, model)
            except Wrong as wrong:
                found.problems.append(Problem(file, wrong.line, wrong.field, wrong.why))
    _refuse_twice(found)
    return found


def _files(names: Sequence[str], found: Read) -> Iterator[str]:
    for name in names:
        if name == STDIN or not os.path.isdir(name):
            yield name
            continue
        try:
            inside = sorted(str(one) for one in Path(name).iterdir() if one.suffix in SUFFIXES)
        except OSError as error:
            found.problems.append(Problem(name, 0, "", f"cannot be read: {error.strerror}"))
            continue
        if not inside:
            found.problems.append(Problem(name, 0, "", "this folder holds no .yaml, .yml or .json"))
        yield from inside


def _text(file: str) -> str:
    if file == STDIN:
        data = stdin("a document").read(MOST_BYTES + 1)
    else:
        with Path(file).open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(0, f"it is longer than {MOST_BYTES >> 20} MiB")
    return data.decode("utf-8-sig")


def _documents(file: str, text: str, line: int, namespace: str, model: str | None) -> list[Declared]:
    """Return the adapters in one document; all of them, or raise Wrong."""
    tree = texts.parse(text, line)
    if tree is None or tree.value is None:
        return []
    folder = Path() if file == STDIN else Path(file).parent
    return [_declared(file, folder, tree, one, namespace, model) for one in _translated(tree)]


def _translated(tree: Tree) -> list[Translated]:
    if not isinstance(tree.value, dict):
        raise Wrong(tree.line_of(()), "", "not a mapping")
    kind = tree.value.get("kind", "ConfigMap" if CONFIG in tree.value else None)
    if kind == "LoraAdapter":
        return [Translated(tree.value)]
    translate = others.KINDS.get(kind) if isinstance(kind, str) else None
    if translate is None:
        known = ", ".join(["LoraAdapter", *others.KINDS])
        why = "is missing" if kind is None else f"{str(kind)[:80]!a} is not read"
        raise Wrong(tree.line_of(("kind",)), "kind", f"{why}: one of {known}")
    return list(translate(tree))


def _declared(
    file: str, folder: Path, tree: Tree, one: Translated, namespace: str, model: str | None
) -> Declared:
    try:
        document = LoraAdapter.model_validate(one.value)
    except ValidationError as error:
        whole, why = field_errors.first(error)
        loc = tuple(part for part in whole if part != KEY)
        why = "its key is empty" if KEY in whole else why
        raise Wrong(tree.line_of((*one.at, *loc)), shown_path(loc), why) from error
    base = document.spec.model or model
    if base is None:
        raise Wrong(tree.line_of(one.at), "spec.model", "is missing, and the command has no --model")
    try:
        slug = model_slug(base)
    except InvalidName as error:
        raise Wrong(tree.line_of((*one.at, "spec", "model")), "spec.model", str(error)) from error
    scope = Scope(document.metadata.namespace or namespace, slug)
    return Declared(file, folder, scope, document, one.absent, tree, one.at)


def _refuse_twice(found: Read) -> None:
    """Two documents for one name: none of them is right, whatever their order."""
    times = Counter(one.key for one in found.declared)
    places: dict[tuple[Scope, str], list[str]] = {}
    for one in found.declared:
        places.setdefault(one.key, []).append(f"{one.file}:{one.line}")
    for one in found.declared:
        if times[one.key] > 1:
            where = ", ".join(places[one.key][:5])
            why = f"{one.key[1]} of {one.scope} has {times[one.key]} documents, and none is applied: {where}"
            found.problems.append(one.problem(("metadata", "name"), why))
    found.declared = [one for one in found.declared if times[one.key] == 1]
