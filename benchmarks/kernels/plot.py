"""Ratios as bars on a logarithmic axis, in SVG written by hand; readable on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

# The median, and the ends of its 95 % interval.
Ratio = tuple[float, float, float]

LABEL_PX, WIDTH_PX, VALUE_PX = 290, 520, 60
BAR_PX, GAP_PX, HEAD_PX, FOOT_PX = 12, 10, 60, 46
COLORS = ("#4477aa", "#cc6633", "#228855", "#aa4488", "#998822")
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #222 } .faint { fill: #666 } .title { font-size: 15px }
.grid { stroke: #ddd } .one { stroke: #222; stroke-width: 1.5 } .spread { stroke: #222 }
.ground { fill: #fff }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .faint { fill: #999 } .ground { fill: #14171a }
  .grid { stroke: #3a3f44 } .one, .spread { stroke: #ddd }
}
</style>"""


@dataclass(frozen=True, slots=True)
class Row:
    """A case, and for each peer the ratio that it was measured at; a peer may be missing."""

    label: str
    ratios: Mapping[str, Ratio]


def write_plot(path: Path, title: str, rows: Sequence[Row], note: str) -> None:
    """Write a chart; ``note`` says on what it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bars(title, rows, note), encoding="utf-8")


def bars(title: str, rows: Sequence[Row], note: str) -> str:
    """Horizontal bars from 1 to each ratio: to the right the peer takes longer, to the left ours."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.ratios))
    colors = {peer: COLORS[index % len(COLORS)] for index, peer in enumerate(peers)}
    ends = [end for row in rows for ratio in row.ratios.values() for end in ratio] or [1.0]
    low = math.floor(math.log2(min(1.0, *ends)))
    high = max(low + 1, math.ceil(math.log2(max(2.0, *ends))))
    heights = [max(1, len(row.ratios)) * BAR_PX + GAP_PX for row in rows]
    bottom = HEAD_PX + sum(heights)
    width, height = LABEL_PX + WIDTH_PX + VALUE_PX, bottom + FOOT_PX

    def at(ratio: float) -> float:
        return LABEL_PX + WIDTH_PX * (math.log2(ratio) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text class="title" x="10" y="22">{escape(title)}</text>',
        *_legend(colors),
        *_axis(low, high, bottom, at(1.0)),
    ]
    top = float(HEAD_PX)
    for row, of_row in zip(rows, heights, strict=True):
        middle = top + (of_row - GAP_PX) / 2 + 4
        parts.append(
            f'<text x="{LABEL_PX - 8}" y="{middle:.1f}" text-anchor="end">{escape(row.label)}</text>'
        )
        for index, (peer, ratio) in enumerate(row.ratios.items()):
            parts += _bar(top + index * BAR_PX, ratio, colors[peer], at(1.0), [at(one) for one in ratio])
        top += of_row
    parts.append(f'<text class="faint" x="10" y="{height - 10}">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(top: float, ratio: Ratio, color: str, one: float, places: Sequence[float]) -> list[str]:
    end, low, high = places
    left, middle = min(one, end), top + BAR_PX / 2
    return [
        f'<rect x="{left:.1f}" y="{top + 1:.1f}" width="{abs(end - one):.1f}" height="{BAR_PX - 2}" '
        f'fill="{color}"/>',
        f'<path class="spread" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>',
        f'<text x="{max(high, end, one) + 5:.1f}" y="{middle + 4:.1f}">{ratio[0]:.3g}×</text>',
    ]


def _legend(colors: Mapping[str, str]) -> Iterator[str]:
    for index, (peer, color) in enumerate(colors.items()):
        x = LABEL_PX + index * 130
        yield f'<rect x="{x}" y="32" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 15}" y="41">{escape(peer)}</text>'


def _axis(low: int, high: int, bottom: float, one: float) -> Iterator[str]:
    for power in range(low, high + 1):
        x = LABEL_PX + WIDTH_PX * (power - low) / (high - low)
        yield f'<path class="grid" d="M{x:.1f} {HEAD_PX - 6}V{bottom}"/>'
        yield (
            f'<text class="faint" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{2.0**power:g}×</text>'
        )
    yield f'<path class="one" d="M{one:.1f} {HEAD_PX - 6}V{bottom}"/>'
