"""The README: short, its numbers from the benchmarks, its moving picture made from a recording."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.docs.blocks import ROOT

README = (ROOT / "README.md").read_text()
MAX_LINES = 110


@pytest.fixture(scope="module")
def timeline() -> ModuleType:
    """``.ci/timeline.py``, which draws the moving picture."""
    spec = importlib.util.spec_from_file_location("timeline", ROOT / ".ci/timeline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["timeline"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measured() -> list[str]:
    """The rows under `Five numbers`, without the table's head."""
    section = README.partition("## Five numbers")[2].partition("\n## ")[0]
    return re.findall(r"^\| .* \|$", section, re.MULTILINE)[1:]


def numbers(text: str) -> set[str]:
    """The decimal numbers of a text."""
    return set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)", text))


def test_it_is_short() -> None:
    """A reader sees all of the README in a few minutes: at most 110 lines."""
    assert len(README.splitlines()) <= MAX_LINES


def test_there_are_five_numbers() -> None:
    """Each of five rows says what was measured, the result, what it is compared with, and the command."""
    assert len(measured()) == 5
    assert all(len(row.strip("| ").split(" | ")) == 4 for row in measured())


TWELVE = re.findall(r"^\| \d+ \| .* \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)


def test_there_are_twelve_numbers() -> None:
    """The performance page has twelve rows."""
    assert len(TWELVE) == 12


@pytest.mark.parametrize("row", [*measured(), *TWELVE])
def test_a_number_has_a_command_that_exists(row: str) -> None:
    """The last cell is a target of the Makefile, or a script with options that the script has."""
    found = re.fullmatch(
        r"`(?:make ([\w-]+)|python (benchmarks/\w+\.py)((?: --[\w-]+(?: \d+)?)*))`",
        row.strip("| ").split(" | ")[-1],
    )
    assert found is not None
    target, script, options = found.groups()
    if target is not None:
        assert f"\n{target}: " in (ROOT / "Makefile").read_text()
    else:
        source = (ROOT / script).read_text()
        names = [name.replace("-", "_") for name in re.findall(r"--([\w-]+)", options)]
        assert [name for name in names if not re.search(rf"\b{name}=|--{name}\b", source)] == []


def figures(row: str) -> set[str]:
    """What a row of the README or of the performance page says was measured; its goals were not."""
    *_, result, baseline, _ = row.strip("| ").split(" | ")
    return numbers(re.sub("×", " ", result if baseline.startswith("goal: ") else f"{result} {baseline}"))


@pytest.mark.parametrize("row", TWELVE)
def test_a_number_is_the_lab_notes(row: str) -> None:
    """To the digit, in the row of that number: the one sitting that the page is of."""
    notes = (ROOT / "docs/lab/benchmarks.md").read_text().partition("## The twelve numbers in one sitting")[2]
    number = row.strip("| ").partition(" | ")[0]
    (kept,) = re.findall(rf"^\| {number} \| .* \|$", notes.partition("\n## ")[0], re.MULTILINE)
    assert figures(row)
    assert figures(row) <= numbers(kept), kept


@pytest.mark.parametrize("row", measured())
def test_a_number_is_the_performance_pages(row: str) -> None:
    """To the digit or rounded to one ms, in the row of the same command."""
    command = row.strip("| ").rpartition(" | ")[2]
    (kept,) = (one for one in TWELVE if one.strip("| ").endswith(f" | {command}"))
    told = figures(kept)
    assert figures(row)
    assert figures(row) <= told | {f"{float(number):.0f}" for number in told}, kept


def test_the_status_is_in_plain_sight() -> None:
    """Before the first picture a reader knows that it is alpha, and what never ran on a GPU."""
    head = README.partition("![")[0]
    assert "alpha" in head
    assert "No vLLM served from lora-fs on a GPU" in head


@pytest.mark.parametrize("picture", re.findall(r"!\[[^\]]*\]\((docs/[\w-]+\.svg)\)", README))
def test_a_picture_fetches_nothing(picture: str) -> None:
    """It is well-formed, has a title for screen readers, and names no other file or host."""
    text = (ROOT / picture).read_text()
    root = ElementTree.fromstring(text)  # noqa: S314 - our own file
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert not re.search(r"(href|src)=|url\((?!#)|@import|@font-face", text)


def test_two_pictures_are_shown() -> None:
    """One that moves, and the diagram."""
    assert "docs/two-replicas.svg" in README
    assert "docs/overview.svg" in README


def test_the_moving_picture_shows_a_replica_killed_and_back() -> None:
    """The recording holds the registrations, the kill, the failed requests, and answers of both replicas."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (ROOT / "docs/two-replicas.svg").read_text())
    assert "registered support@v1 in default/tiny" in texts
    assert any(text.startswith("$ kill -9") for text in texts)
    assert any(text.startswith("✗ no answer") for text in texts)
    answers = [text for text in texts if text.startswith("▸ support: ")]
    assert len(answers) >= 3, "a's, b's before the kill and b's after it"
    assert len(set(answers)) == 1, "every replica gives the same answer"


def test_a_text_is_shown_until_another_takes_its_row(timeline: ModuleType) -> None:
    """A text that is repeated is one span; empty text ends a span and is none."""
    moments = [timeline.Moment(at, 0, row, text) for at, row, text in MOMENTS]
    told = {(span.moment.text, span.moment.at_s, span.until_s) for span in timeline.spans(moments)}
    assert told == {("a", 0.0, 2.0), ("b", 2.0, 3.0), ("c", 1.0, None)}


MOMENTS = [(0.0, 0, "a"), (1.0, 0, "a"), (1.0, 1, "c"), (2.0, 0, "b"), (3.0, 0, "")]


def test_a_drawing_moves_and_ends_in_the_last_state(timeline: ModuleType) -> None:
    """Each text appears at its share of the film; without motion only the last state is opaque."""
    panes = [timeline.Pane("x <y>", 0, 0, 20, 3)]
    drawn = timeline.draw("t", panes, [timeline.Moment(at, 0, row, text) for at, row, text in MOMENTS])
    ElementTree.fromstring(drawn)  # noqa: S314 - our own text
    assert "x &lt;y&gt;" in drawn
    assert "25.000%{opacity:1}37.500%{opacity:0}" in drawn  # b, from 2 s to 3 s of 8 s
    assert [text for hidden, text in re.findall(r'<text[^>]*?( opacity="0")?[^>]*>(\w)</text>', drawn)] == [
        "a",
        "b",
        "c",
    ]
