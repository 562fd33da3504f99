"""Values as people write them: paths, durations, sizes, labels. One parser for each.

Nothing here imports pydantic: the page of ``lora-fs --help`` needs some of it.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.escaping import printable
from lora_fs.sidecar.quantities import bytes_of, has_unit, seconds_of

NONE: Final = "none"  # in place of a number: no limit
_COUNT: Final = re.compile(r"[0-9]{1,15}")


class Place(click.Path):
    """A path that was really given: an empty one would be the current folder."""

    name = "path"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "" or "\0" in str(value):
            self.fail("the path is empty, or holds a NUL byte: is a variable unset?", param, ctx)
        return Path(str(value))


class FormatName(click.Choice[str]):
    """A value of ``-o``."""

    def __init__(self) -> None:
        super().__init__([one.value for one in Format])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Format:
        return Format(super().convert(value, param, ctx))


class Duration(click.ParamType[float]):
    """``90``, ``90s``, ``15m``, ``48h``, ``2d`` or ``500ms``, in seconds.

    Args:
        least: seconds; smaller values are refused. whole: return an ``int``, at least 1.
        bare: whether a number without a unit counts as seconds.
    """

    name = "time"

    def __init__(self, *, least: float = 0, whole: bool = False, bare: bool = True) -> None:
        self._least, self._whole, self._bare = (1 if whole else least), whole, bare

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self._bare and seconds != 0 and not has_unit(str(value)):
            self.fail(f"write the unit: {value}h for hours, {value}s for seconds", param, ctx)
        if seconds < self._least or not math.isfinite(seconds):
            self.fail(f"{value} is too short: at least {self._least:g} s", param, ctx)
        if self._whole and not seconds.is_integer():
            self.fail(f"{value} is no whole number of seconds", param, ctx)
        return int(seconds) if self._whole else seconds


class Size(click.ParamType[int | str]):
    """``1000``, ``500M``, ``5GB`` or ``50Gi``, in bytes.

    Args:
        or_none: ``none`` is a value, too: no limit.
    """

    name = "size"

    def __init__(self, *, or_none: bool = False) -> None:
        self._or_none = or_none

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if self._or_none and value == NONE:
            return NONE
        try:
            return bytes_of(str(value))
        except ValueError as error:
            self.fail(f"{error}{f', or {NONE}' if self._or_none else ''}", param, ctx)


class Count(click.ParamType[int | str]):
    """A whole number from ``least`` on, or ``none``."""

    name = "count"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == NONE:
            return NONE
        if not _COUNT.fullmatch(str(value)) or int(str(value)) < self._least:
            self.fail(f"{value!r} is no whole number from {self._least} on, nor {NONE}", param, ctx)
        return int(str(value))


def stdin(what: str) -> BinaryIO:
    """Return stdin, which ``-`` names; raises click.UsageError if it is closed."""
    if sys.stdin is None:
        raise click.UsageError(f"with - {what} is read from stdin, and that is closed")
    return sys.stdin.buffer


def text(_: object, __: object, value: str | None) -> str | None:
    """Refuse what is no UTF-8."""
    return None if value is None else _checked(value)


def _checked(value: str) -> str:
    """Return text. Refuse bytes that are no UTF-8 before the files are copied: no record holds them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{printable(value)} is no text in UTF-8") from None
    return value


def labels(_: object, __: object, value: tuple[str, ...]) -> dict[str, str]:
    """Parse ``key=value``, any number of times."""
    pairs = [_checked(item).partition("=") for item in value]
    if any(not key or not equals for key, equals, _value in pairs):
        raise click.BadParameter("write it as key=value")
    return {key: told for key, _equals, told in pairs}


def labels_or_none(_: object, __: object, value: tuple[str, ...]) -> dict[str, str | None]:
    """Parse ``key=value``, and ``key-`` for a label to remove, any number of times."""
    found: dict[str, str | None] = {}
    for item in value:
        key, equals, told = _checked(item).partition("=")
        if not equals and item.endswith("-"):
            key = item[:-1]
        elif not equals:
            key = ""
        if not key:
            raise click.BadParameter("write it as key=value, or key- to take it away")
        found[key] = told if equals else None
    return found
