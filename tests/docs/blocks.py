"""The fenced blocks of the pages, and the commands in them with what they are shown to print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


@dataclass(frozen=True)
class Block:
    """One fenced block; ``mark`` is the comment above it, ``<!-- schema: record -->``."""

    page: Path
    line: int
    language: str
    text: str
    mark: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One line that is typed, continuations joined, and the lines that it is shown to print."""

    block: Block
    text: str
    prints: tuple[str, ...]


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Every fenced block of a page, those inside a list too."""
    text = page.read_text() if text is None else text
    pattern = (
        r"(?:^<!-- (?P<mark>.*?) -->\n)?"
        r"^(?P<indent> *)```(?P<language>\S*).*\n(?P<body>(?:.*\n)*?)(?P=indent)```$"
    )
    return [
        Block(
            page,
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE),
            match["mark"],
        )
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]


def commands(block: Block) -> Iterator[Command]:
    """The lines after ``$ ``, a backslash or an open quote going on in the next."""
    lines = block.text.splitlines()
    while lines:
        line = lines.pop(0)
        if not line.startswith("$ "):
            raise ValueError(f"{block}: a console block begins with a command, not with {line!r}")
        typed = line.removeprefix("$ ")
        while lines and (typed.endswith("\\") or typed.count("'") % 2):
            typed = typed.removesuffix("\\") + ("\n" if typed.count("'") % 2 else "") + lines.pop(0)
        prints = []
        while lines and not lines[0].startswith("$ "):
            prints.append(lines.pop(0))
        yield Command(block, re.sub(r"\s+# .*$", "", typed).strip(), tuple(prints))


ALL = [block for page in PAGES for block in blocks(page)]
CONSOLE = [block for block in ALL if block.language == "console"]


def told(language: str) -> list[Any]:
    """The blocks of one language, as parameters of a test."""
    return [pytest.param(block, id=str(block)) for block in ALL if block.language == language]
