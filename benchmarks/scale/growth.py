"""How figures grow with the registry, on logarithmic axes, in SVG written by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

PANEL_PX, HEIGHT_PX, GAP_PX = 300, 190, 70
LEFT_PX, HEAD_PX, FOOT_PX, LEGEND_PX = 60, 60, 60, 18
COLORS = ("#4477aa", "#cc6633", "#228855")
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #222 } .faint { fill: #666 } .title { font-size: 15px }
.grid { stroke: #ddd } .ground { fill: #fff } polyline { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .faint { fill: #999 } .ground { fill: #14171a } .grid { stroke: #3a3f44 }
}
</style>"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure; ``lines`` by label: which kind of replica, which step, which value, its scale."""

    title: str
    unit: str
    lines: Mapping[str, tuple[str, str, str, float]]


PANELS = (
    Panel(
        "One change",
        "ms of CPU",
        {
            "to register": ("all scopes", "write", "cpu_s", 1e3),
            "to see it, one scope served": ("one scope", "seen", "cpu_s", 1e3),
            "to see it, all scopes served": ("all scopes", "seen", "cpu_s", 1e3),
        },
    ),
    Panel(
        "Cold start",
        "s",
        {
            "one scope": ("one scope", "cold", "s", 1),
            "all scopes": ("all scopes", "cold", "s", 1),
        },
    ),
    Panel(
        "Memory, resident",
        "MB",
        {
            "one scope": ("one scope", "cold", "resident_bytes", 1e-6),
            "all scopes": ("all scopes", "cold", "resident_bytes", 1e-6),
        },
    ),
)


def write_plot(path: Path, results: Mapping[str, Any]) -> None:
    """Write the chart of one run."""
    sizes = results["sizes"]
    counts = [int(size.replace(",", "")) for size in sizes]
    width = LEFT_PX + len(PANELS) * (PANEL_PX + GAP_PX)
    height = HEAD_PX + HEIGHT_PX + FOOT_PX + 3 * LEGEND_PX
    origin = results["origin"]
    title = "What grows with the registry, and what does not"
    note = f"{origin['cores']} cores, Python {origin['python']}, commit {origin['commit']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text class="title" x="{LEFT_PX}" y="24">{escape(title)}</text>',
        f'<text class="faint" x="{LEFT_PX}" y="{height - 8}">adapters in the registry; {escape(note)}</text>',
    ]
    for number, panel in enumerate(PANELS):
        values = {
            label: [scale * _median(size[kind][step], what) for size in sizes.values()]
            for label, (kind, step, what, scale) in panel.lines.items()
        }
        parts += _panel(LEFT_PX + number * (PANEL_PX + GAP_PX), panel, counts, values)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _median(told: Sequence[Mapping[str, Any]], what: str) -> float:
    return float(statistics.median(one[what] for one in told))


def _panel(
    left: int, panel: Panel, counts: Sequence[int], values: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    every = [value for line in values.values() for value in line]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    high = max(high, low + 1)
    first, last = math.log10(min(counts)), math.log10(max(counts))
    bottom = HEAD_PX + HEIGHT_PX

    def x(count: int) -> float:
        return left + PANEL_PX * (math.log10(count) - first) / max(last - first, 1)

    def y(value: float) -> float:
        return bottom - HEIGHT_PX * (math.log10(value) - low) / (high - low)

    yield f'<text x="{left}" y="{HEAD_PX - 12}">{escape(panel.title)}, {escape(panel.unit)}</text>'
    for power in range(low, high + 1):
        at = y(10.0**power)
        yield f'<line class="grid" x1="{left}" x2="{left + PANEL_PX}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="faint" text-anchor="end" x="{left - 6}" y="{at + 4:.1f}">{10.0**power:g}</text>'
    for count in counts:
        yield (
            f'<text class="faint" text-anchor="middle" x="{x(count):.1f}" y="{bottom + 18}">{count:,}</text>'
        )
    for number, (label, line) in enumerate(values.items()):
        color = COLORS[number]
        points = " ".join(f"{x(c):.1f},{y(v):.1f}" for c, v in zip(counts, line, strict=True))
        yield f'<polyline stroke="{color}" points="{points}"/>'
        for count, value in zip(counts, line, strict=True):
            yield (
                f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="3.5" fill="{color}">'
                f"<title>{escape(label)}: {value:.3g} {escape(panel.unit)} at {count:,}</title></circle>"
            )
        at = bottom + 38 + number * LEGEND_PX
        yield f'<rect x="{left}" y="{at - 9}" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{left + 16}" y="{at}">{escape(label)}, last {line[-1]:.3g}</text>'
