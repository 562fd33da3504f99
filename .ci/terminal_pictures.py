"""Take the pictures of the command line: ``python .ci/terminal_pictures.py docs --minutes 3``.

The real command in a real terminal, beside sidecars that serve: ``top`` while it runs, then some others.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent))

from pictured import Pictured, pictured
from terminal import last_frame, shown, write_svg

from lora_fs.demo.volume import LORA_FS

REPLICAS = 4
MARKETS = ("en", "ja", "pl")
COLUMNS, ROWS = 124, 32
TOP_S = 25.0  # rates are told once every replica has reported twice
# Another task's weights stand in for better ones.
BEFORE = "lora-fs register search-en {sources}/intent --revision v2 --label market=en --no-activate"
TYPED = (
    "lora-fs canary search-en v2 --percent 10",
    "lora-fs list 's*' --selector market=en -o wide",
    "lora-fs events sql-en",
)


def main() -> None:
    """Start, ask, and look meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pictured(Path(folder), REPLICAS, MARKETS) as fleet:
        run(BEFORE.format(sources=fleet.root.parent / "sources"), fleet)
        until = time.monotonic() + 60 * options.minutes
        asking = threading.Thread(target=lambda: asyncio.run(fleet.ask(until + TOP_S)), daemon=True)
        asking.start()
        asking.join(60 * options.minutes)
        top = last_frame(run("lora-fs top", fleet, TOP_S))
        write_svg(options.folder / "top.svg", "lora-fs top", COLUMNS, drawn(top))
        lines = [line for command in TYPED for line in typed(command, fleet)]
        write_svg(options.folder / "commands.svg", "lora-fs", COLUMNS, lines)
        asking.join()


def run(command: str, fleet: Pictured, ends_s: float | None = None) -> str:
    """What a command line shows."""
    _, *words = shlex.split(command)
    env = {"LORA_FS_ROOT": str(fleet.root), "LORA_FS_MODEL": "tiny"}
    return shown([LORA_FS, *words], COLUMNS, ROWS, env, ends_s)


def typed(command: str, fleet: Pictured) -> list[Text]:
    """A command behind its prompt, and what it answers."""
    return [Text(f"$ {command}", style="bold"), *drawn(run(command, fleet)), Text()]


def drawn(written: str) -> list[Text]:
    """Lines with their colours, no one wider than the terminal."""
    return [Text.from_ansi(line, no_wrap=True, overflow="ellipsis") for line in written.rstrip().split("\n")]


if __name__ == "__main__":
    main()
