"""Check the words of the docs and docstrings: ``python .ci/prose.py``; exits 1 if a sentence is at fault.

Errors are a sentence of more than 25 words and a phrase that docs and docstrings must not use. A sentence
in the passive is a warning, and only counted: ``--passive`` lists them. A sentence ends at a full stop, a
question or exclamation mark, a colon or a semicolon. Code in backticks is one word.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 25
FOLDERS = ("sidecar", "worker_patch", "kernels")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
# Records of what was decided or measured on a day; nobody rewrites them.
RECORDS = ("docs/adr/", "docs/lab/")

# Phrase → what to write instead. Understatement and the passive hide who does what.
BANNED = {
    r"(?:is|are|was|were|be|been) (?:not )?told": "name who reports, logs or says it",
    r"told (?:of|to|in|by|as|it|once)": "name who reports, logs or says it",
    r"tells? of": "reports, lists",
    r"(?:is|are|was|were|be|been) had": "is acquired, is available",
    r"gone on (?:from|with)": "resumed, continued",
    r"let be": "kept, ignored",
    r"who (?:asks|comes) next": "the next caller",
    r"what there is(?: of it)?": "name it",
    r"would have": "has, must",
    r"as may be": "name the case",
    r"(?:is|are|was|were) (?:not )?to be": "must be, will be",
    r"times (?:that|those) of": "N× slower, N× faster than",
    r"[Bb]efore this,|an (?:earlier|older) run|the (?:run|day) before": "history belongs in docs/lab",
}
BANNED_RE = {re.compile(rf"\b{phrase}(?!\w)"): instead for phrase, instead in BANNED.items()}
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been|being) (?:not |never |only |then )?\w+(?:ed|en|wn|lt|pt)\b"
)

FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
DROPPED = re.compile(r"<!--[\s\S]*?-->|^#+ .*$|^ *>>>.*$|^.*[├└│].*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"``.+?``|`[^`]*`", re.DOTALL)
PARTS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*>] |\d+\. |\|))|\n(?=\s*\w+: )")
MARK = re.compile(r"^(?:[-*>] |\d+\. )")
END = re.compile(r"(?<=[.!?:;])[\"')*_]*\s+")


@dataclass(frozen=True, slots=True)
class Fault:
    """One sentence at fault: where it begins, what is wrong, and what to do."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line, from 1, and the words of each sentence of Markdown or of a docstring."""
    blank = FENCE.sub(lambda match: re.sub(r"[^\n]", "", match[0]), text)
    blank = DROPPED.sub(lambda match: re.sub(r"[^\n]", "", match[0]), blank)
    blank = LINK.sub(lambda match: match[1] + "\n" * (match[0].count("\n") - match[1].count("\n")), blank)
    blank = CODE.sub(lambda match: "`x`" + "\n" * match[0].count("\n"), blank)
    at = 0
    for part in PARTS.split(blank):
        start = blank.index(part, at)
        at = start + len(part)
        line = blank.count("\n", 0, start + len(part) - len(part.lstrip())) + 1
        cells = part.strip().strip("|").split("|") if part.lstrip().startswith("|") else [part]
        for cell in cells:
            for sentence in END.split(MARK.sub("", " ".join(cell.split()))):
                yield line, sentence


def judged(path: str, text: str, first_line: int = 1) -> list[Fault]:
    """Return the errors of a page or a docstring that begins at ``first_line``."""
    faults = []
    for line, sentence in sentences(text):
        words = sum(bool(re.search(r"\w", word)) for word in sentence.split())
        found = [
            f"say it plainly: {match[0]!r} ({instead})"
            for pattern, instead in BANNED_RE.items()
            if (match := pattern.search(sentence))
        ]
        if words > MAX_WORDS:
            found.append(f"{words} words in a sentence, at most {MAX_WORDS}: {sentence[:70]}…")
        faults += [Fault(path, first_line + line - 1, message) for message in found]
    return faults


def texts() -> Iterator[tuple[str, int, str]]:
    """Yield path, first line and text of each page and each docstring that is checked."""
    pages = [ROOT / name for name in PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    for page in filter(Path.exists, pages):
        name = str(page.relative_to(ROOT))
        if not name.startswith(RECORDS):
            yield name, 1, page.read_text()
    for module in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = node.body[0] if node.body else None
            constant = first.value if isinstance(first, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield str(module.relative_to(ROOT)), constant.lineno, constant.value


def main() -> int:
    """Print the errors, then how many sentences are in the passive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passive", action="store_true", help="list the sentences in the passive")
    options = parser.parse_args()
    faults: list[Fault] = []
    passive: list[Fault] = []
    count = 0
    for path, first_line, text in texts():
        faults += judged(path, text, first_line)
        for line, sentence in sentences(text):
            count += 1
            if PASSIVE.search(sentence):
                passive.append(Fault(path, first_line + line - 1, f"passive: {sentence[:90]}"))
    for fault in faults + (passive if options.passive else []):
        print(fault)
    print(f"prose: {count} sentences, {len(faults)} at fault; warning: {len(passive)} in the passive")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
