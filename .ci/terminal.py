"""A command as a terminal shows it, and what it shows as an SVG that fetches nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

FONTS = r"@font-face \{.*?\}\s*"  # fetched from elsewhere; the viewer's own will do
HOME = "\x1b[H"


def shown(command: list[str], columns: int, rows: int, env: Mapping[str, str], ends_s: float | None) -> str:
    """What a command writes to a terminal of that size, with its escapes.

    Args:
        ends_s: it is ended after so long; None: it ends by itself.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = {**kept, "TERM": "xterm-256color", **env}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    written, began = b"", time.monotonic()
    while process.poll() is None:
        if ends_s is not None and time.monotonic() - began > ends_s:
            process.terminate()
            ends_s = None
        written += _read(ours)
        time.sleep(0.02)
    written += _read(ours)
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


def last_frame(written: str) -> str:
    """The last whole one of what draws its screen again and again."""
    return written.split(HOME)[-2]


def write_svg(path: Path, title: str, width: int, lines: Iterable[Text]) -> None:
    """Draw lines as a terminal of ``width`` columns would show them."""
    console = Console(record=True, width=width, file=sys.stderr)
    for line in lines:
        console.print(line)
    picture = console.export_svg(title=title)
    path.write_text(re.sub(FONTS, "", picture, flags=re.DOTALL), encoding="utf-8")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 20)
    except (BlockingIOError, OSError):  # nothing now; EIO when the command has ended
        return b""
