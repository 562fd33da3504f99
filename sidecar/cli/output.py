"""What commands print: tables and lines for people, JSON, YAML and names for scripts.

It escapes text of unknown origin, so that a terminal acts on none of it.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import click

from lora_fs.sidecar.escaping import printable

GAP: Final = "  "
LEAST_FOLDED: Final = 24
MOST_ALIGNED: Final = 100  # columns: in a pipe no other row makes room for a longer cell
# The record's fencing token proves who wrote it. As "token" people take it for a secret.
FENCING: Final = {"token": "fencing_token"}


class Format(StrEnum):
    """The formats of ``-o``."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def for_people(self) -> bool:
        return self in (Format.TEXT, Format.WIDE)


def put(text: str) -> None:
    """Print lines as they are.

    Raises:
        OSError: says that it is the output, on a full disk say: a user would think of the volume.
    """
    try:
        click.echo(text)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the output: {error.strerror or error}") from error


def say(text: str) -> None:
    """Print a line for people, escaped."""
    put(printable(text))


def complain(message: str) -> None:
    """Say on stderr what is wrong, line by line, escaped."""
    click.echo("lora-fs: " + "\n".join(map(printable, message.split("\n"))), err=True)


def unread() -> None:
    """Let what is left of stdout, which the exit writes, go nowhere: nobody reads it any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def document(value: Mapping[str, Any] | list[Any], output: Format) -> str:
    """Return JSON or YAML for scripts, with a record's fencing token under its full name."""
    text = json.dumps(renamed(value), indent=2)
    # Of the JSON: YAML's writer refuses a text that is an enumeration's.
    return as_yaml([json.loads(text)]) if output is Format.YAML else text


def as_yaml(documents: Iterable[Any]) -> str:
    """Return YAML in ASCII: in a plain text no reader takes an escape of the stream's for one."""
    import yaml  # needed for this format alone

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump_all(documents, Dumper=dumper, sort_keys=False, explicit_start=True).rstrip()


def renamed(value: Any) -> Any:
    """Return ``value`` with ``fencing_token`` in place of each written generation's ``token``."""
    if isinstance(value, Mapping):
        names = FENCING if "apiVersion" in value else {}
        return {names.get(name, name): renamed(item) for name, item in value.items()}
    return [renamed(item) for item in value] if isinstance(value, list | tuple) else value


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    folds: str = "",
    headers: bool = True,
) -> None:
    """Print a row a line, no cell cut, escaped.

    Args:
        folds: the column to fold if the terminal is too narrow for a row. In a pipe a row stays one line,
            and a long cell of this column moves the rest of its own row alone.
    """
    cells = [[printable(cell) for cell in row] for row in ((columns, *rows) if headers else rows)]
    if not cells:
        return
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    long = columns.index(folds) if folds else None
    folded = long if is_terminal() else None
    if long is not None and folded is None:
        aligned = (width for row in cells if (width := _width(row[long])) <= MOST_ALIGNED)
        widths[long] = max(aligned, default=0)
    if folded is not None:
        others = sum(widths) - widths[folded] + len(GAP) * (len(widths) - 1)
        widths[folded] = min(widths[folded], max(LEAST_FOLDED, shutil.get_terminal_size().columns - others))
    printed = []
    for row in cells:
        lines = [""] if folded is None else textwrap.wrap(row[folded], widths[folded]) or [""]
        for number, line in enumerate(lines):
            shown = [cell if number == 0 else "" for cell in row]
            if folded is not None:
                shown[folded] = line
            padded = (cell + " " * (width - _width(cell)) for cell, width in zip(shown, widths, strict=True))
            printed.append(GAP.join(padded).rstrip())
    put("\n".join(printed))  # one write, not one a line


def _width(text: str) -> int:
    """Return the columns that escaped text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # the widths of all characters, which few tables need

    return cell_len(text)


def is_terminal() -> bool:
    """Whether a person reads stdout; ``FORCE_COLOR`` says so, too."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def counted(number: int, what: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def shown_bytes(size_bytes: int) -> str:
    """``0.9 kB``, ``12.3 MB``, ``4.0 GB``."""
    unit, scale = ("GB", 1e9) if size_bytes >= 1e9 else ("MB", 1e6) if size_bytes >= 100_000 else ("kB", 1e3)
    return f"{size_bytes / scale:.1f} {unit}"


def shown_time(written: str) -> str:
    """A time of a record in UTC, as ``2026-11-21T18:08:37Z``; any other text as it is."""
    try:
        at = datetime.datetime.fromisoformat(written).astimezone(datetime.UTC)
    except (ValueError, OverflowError):  # a zone may lead out of the years there are
        return written
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
