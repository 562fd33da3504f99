"""Draw what panes of a terminal showed over time as one animated SVG that fetches nothing.

A recording is a list of moments: at a second, a row of a pane shows a text. The picture plays them at the
speed at which they happened, holds the last state, and starts again. Readers who asked their system for
less motion see the last state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

ROW_PX, COLUMN_PX, FONT_PX, MARGIN_PX = 21, 8.2, 13.6, 14
HOLD_S = 5.0
COLOURS = {"$": "#e6edf3", "✓": "#7ee787", "✗": "#ff7b72", "▸": "#79c0ff"}  # by a text's first character
PLAIN = "#9da7b3"


@dataclass(frozen=True, slots=True)
class Pane:
    """A terminal of the picture: its title, and where it stands in columns and rows."""

    title: str
    column: int
    row: int
    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class Moment:
    """From ``at_s`` on, a row of a pane shows ``text``; empty text clears the row."""

    at_s: float
    pane: int
    row: int
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """A text and the seconds in which it is seen; ``until_s`` is None for the last state."""

    moment: Moment
    until_s: float | None


def spans(moments: Sequence[Moment]) -> list[Span]:
    """Return each text with the time at which another text takes its row."""
    found: list[Span] = []
    shown: dict[tuple[int, int], Moment] = {}
    for moment in sorted(moments, key=lambda one: one.at_s):
        before = shown.get((moment.pane, moment.row))
        if before is not None and before.text == moment.text:
            continue
        if before is not None and before.text:
            found.append(Span(before, moment.at_s))
        shown[moment.pane, moment.row] = moment
    return found + [Span(moment, None) for moment in shown.values() if moment.text]


def draw(title: str, panes: Sequence[Pane], moments: Sequence[Moment]) -> str:
    """Return the SVG. ``title`` is what screen readers say."""
    length_s = max(moment.at_s for moment in moments) + HOLD_S
    width = max(pane.column + pane.columns for pane in panes) * COLUMN_PX + MARGIN_PX
    height = max(pane.row + pane.rows + 2 for pane in panes) * ROW_PX + MARGIN_PX
    rules, texts = [], []
    for number, span in enumerate(spans(moments)):
        begins, ends = span.moment.at_s / length_s * 100, 100.0
        if span.until_s is not None:
            ends = span.until_s / length_s * 100
        steps = f"0%{{opacity:0}}{begins:.3f}%{{opacity:1}}" + (f"{ends:.3f}%{{opacity:0}}" * (ends < 100))
        rules.append(f"@keyframes k{number}{{{steps}}}")
        texts.append(_text(panes[span.moment.pane], span, number, length_s))
    frames = "".join(_frame(pane) for pane in panes)
    still = "@media (prefers-reduced-motion: reduce){text{animation:none!important}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        f"<title>{escape(title)}</title><style>"
        f"text{{font:{FONT_PX}px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}}"
        f"{''.join(rules)}{still}</style>"
        f'<rect width="100%" height="100%" rx="10" fill="#010409"/>{frames}{"".join(texts)}</svg>\n'
    )


def _frame(pane: Pane) -> str:
    x, y = pane.column * COLUMN_PX + MARGIN_PX, pane.row * ROW_PX + MARGIN_PX
    width, height = pane.columns * COLUMN_PX - MARGIN_PX, (pane.rows + 1.5) * ROW_PX
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8" fill="#0d1117"'
        f' stroke="#30363d"/><text x="{x + MARGIN_PX:.0f}" y="{y + ROW_PX:.0f}" fill="#e6edf3"'
        f' font-weight="bold">{escape(pane.title)}</text>'
    )


def _text(pane: Pane, span: Span, number: int, length_s: float) -> str:
    x = pane.column * COLUMN_PX + 2 * MARGIN_PX
    y = (pane.row + span.moment.row + 2.2) * ROW_PX + MARGIN_PX
    colour = COLOURS.get(span.moment.text[0], PLAIN)
    hidden = ' opacity="0"' if span.until_s is not None else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{hidden}'
        f' style="animation:k{number} {length_s:.2f}s step-end infinite">{escape(span.moment.text)}</text>'
    )
