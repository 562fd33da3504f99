"""Draw a demo's transcript: ``lora-fs demo | python .ci/render_demo.py docs/demo.svg``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 118


def main() -> None:
    """Read the transcript, colour what was typed and what held, write the picture."""
    console = Console(record=True, width=WIDTH, file=sys.stderr)
    for line in sys.stdin.read().strip().splitlines():
        text = Text(re.sub(r"(lora-fs-demo)-\w+", r"\1", line), overflow="ellipsis", no_wrap=True)
        if re.match(r"[0-9]+\. ", line):
            text.stylize("bold cyan")
        elif line.lstrip().startswith("$ "):
            text.stylize("bold")
        elif "✓" in line:
            text.highlight_regex("✓", "bold green")
        elif line.lstrip().startswith("done in"):
            text.stylize("dim")
        console.print(text)
    picture = console.export_svg(title="make demo")
    fonts = r"@font-face \{.*?\}\s*"  # fetched from elsewhere; the viewer's own will do
    Path(sys.argv[1]).write_text(re.sub(fonts, "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
