"""YAML as plain values, each with its line. Pure.

A text is cut at its ``---`` lines, so that a document that is no YAML leaves the others as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import yaml

MOST_NODES: Final = 100_000  # of one document, each use of an anchor counted
MOST_DEPTH: Final = 64  # libyaml's composer calls itself for each level, and a deep text overflows its stack
Path = tuple[str | int, ...]
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
EMPTY: Final = '""'  # the form of a key of no characters
_CUT: Final = re.compile(r"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)


class Wrong(Exception):
    """A fault of a document: its line, its field, the reason."""

    def __init__(self, line: int, field: str, why: str) -> None:
        super().__init__(f"{line}: {field}: {why}")
        self.line, self.field, self.why = line, field, why


@dataclass(frozen=True, slots=True)
class Tree:
    """A document: its value, the line of each part, and the text it was read from."""

    value: Any
    lines: dict[Path, int]
    text: str

    def line_of(self, path: Path) -> int:
        """The line of a part; of the part around it where there is none."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]


def shown_path(path: Path) -> str:
    """``spec.loras[1].source``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part or EMPTY}" for part in path).lstrip(".")


def cut(text: str) -> Iterator[tuple[int, str]]:
    """Every document's text with the line, from 1, that it begins in."""
    starts = [0, *(found.start() for found in _CUT.finditer(text)), len(text)]
    line = 1
    for start, end in pairwise(starts):
        part = text[start:end]
        if any(_says(one) for one in part.splitlines()):
            yield line, part
        line += part.count("\n")


def _says(line: str) -> bool:
    """Whether it is more than a comment, a directive or a document's mark."""
    return not line.startswith("%") and line.split("#")[0].strip() not in ("", "---")


def parse(text: str, first_line: int) -> Tree | None:
    """Read one document; None where nothing is in it.

    Raises:
        Wrong: it is no YAML, has too deep a nesting, repeats a key, or its anchors multiply.
    """
    try:
        _check_depth(text, first_line)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = text.rstrip().count("\n")  # libyaml's end of a text is the line after it
        line = first_line + (min(mark.line, last) if mark is not None else 0)
        raise Wrong(line, "", f"not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Wrong(first_line, "", f"not YAML: {' '.join(str(error).split())}") from error
    if node is None:
        return None
    reading = _Reading(first_line)
    return Tree(reading.value(node, ()), reading.lines, text)


def _check_depth(text: str, first_line: int) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            mark = event.start_mark
            line = first_line + (mark.line if mark is not None else 0)
            raise Wrong(line, "", f"nested deeper than {MOST_DEPTH} levels")


@dataclass
class _Reading:
    first_line: int
    lines: dict[Path, int] = field(default_factory=dict)
    around: set[int] = field(default_factory=set)
    count: int = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        line = self.first_line + node.start_mark.line
        self.lines.setdefault(path, line)
        self.count += 1
        if self.count > MOST_NODES:
            at = path[:1]
            raise Wrong(
                self.lines[at], shown_path(at), f"more than {MOST_NODES} values, its anchors written out"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line, path)
        if id(node) in self.around:
            raise Wrong(line, shown_path(path), "an anchor that holds itself")
        self.around.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(one, (*path, number)) for number, one in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self.around.remove(id(node))

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = self.first_line + key.start_mark.line
            if key.tag == _MERGE:
                raise Wrong(line, shown_path((*path, "<<")), "merge keys are not read: write the fields out")
            if key.tag != _TEXT:
                raise Wrong(line, shown_path(path), f"a key that is no text: {str(key.value)[:80]!a}")
            here = (*path, key.value)
            if key.value in found:
                raise Wrong(line, shown_path(here), "this key is there twice")
            self.lines[here] = line
            found[key.value] = self.value(value, here)
        return found

    def _scalar(self, node: yaml.ScalarNode, line: int, path: Path) -> Any:
        if node.tag == _TEXT:
            return node.value
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            why = getattr(error, "problem", None) or error
            raise Wrong(line, shown_path(path), f"not a value: {why}") from error
