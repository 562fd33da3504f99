"""What the how-to pages quote is what the code prints: a reader who searches for a message finds it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_links import prose

HOWTO = sorted((ROOT / "docs/howto").glob("*.md"))
# In quotation marks, and not printed by lora-fs.
OTHERS: dict[str, str] = {}


def template(node: ast.JoinedStr) -> str:
    """An f-string with ``…`` where its values go."""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


@cache
def texts() -> str:
    """Every text of the code, one a line."""
    found = []
    for folder in ("sidecar", "worker_patch"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append(template(node))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(" ".join(re.sub(r"%[sd]", "…", text).split()) for text in found)


def quotes(text: str) -> list[str]:
    """The sentences that a page has in quotation marks; one word is a name, not a message."""
    found = re.findall(r'(?<![\w=(:`])"([^"\n{}]+)"(?!`)', prose(text))
    return [quote for quote in found if " " in quote]


def printed(quote: str) -> bool:
    """Whether some text of the code holds it, ``…`` standing for whatever a value is."""
    parts = [re.escape(part) for part in quote.split("…")]
    return re.search(r"[^\n]*".join(parts), texts()) is not None


def test_quotes_are_found_and_compared() -> None:
    """A message with values in it is one; a sentence that nobody prints is none."""
    assert quotes('is "a b" and "c", not `"d e"`\n```\n"f g"\n```\n') == ["a b"]
    assert printed("… is still loading after … s")
    assert printed("adoption of … is retried")
    assert not printed("the moon is full")


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.name)
def test_messages_exist(page: Path) -> None:
    """Each one that the page quotes."""
    assert [quote for quote in quotes(page.read_text()) if quote not in OTHERS and not printed(quote)] == []


def test_symptoms_have_a_cause_and_a_cure() -> None:
    """Each one is a heading, and under it stand why, what to do, and nothing else."""
    page = (ROOT / "docs/howto/troubleshooting.md").read_text()
    groups = page.partition("\n## An adapter is not registered")[2].partition("\n## What a client gets")[0]
    symptoms = re.split(r"^### ", groups, flags=re.MULTILINE)[1:]
    assert len(symptoms) > 30
    told = re.compile(r".+\n\n\*\*Why:\*\* .+\n\n\*\*Do:\*\* .+\n(\n## .+\n)?\s*")
    assert [symptom for symptom in symptoms if not told.fullmatch(symptom)] == []
