"""Draw a demo's transcript: ``lora-fs demo | python .ci/render_demo.py docs/demo.svg``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent))

from terminal import write_svg

WIDTH = 118


def main() -> None:
    """Read the transcript, colour what was typed and what held, write the picture."""
    lines = []
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
        lines.append(text)
    write_svg(Path(sys.argv[1]), "make demo", WIDTH, lines)


if __name__ == "__main__":
    main()
