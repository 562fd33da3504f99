"""Durations and sizes as people write them: one grammar for options, the environment and settings.

Nothing here imports pydantic or click.
"""

from __future__ import annotations

import re
from typing import Final

_TIMES: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final[dict[str, int]] = {
    f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)
}
_DURATION: Final = re.compile(r"(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?)(?P<unit>ms|[smhd])?")
_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,15})(?:(?P<unit>[KkMGT]i?)?B?)")


def has_unit(text: str) -> bool:
    """Return whether a duration says its unit."""
    found = _DURATION.fullmatch(text)
    return found is not None and found["unit"] is not None


def seconds_of(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``48h``, ``2d`` or ``500ms``.

    Raises:
        ValueError: it is none of these.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no duration: write 90, 90s, 15m, 48h or 2d")
    return float(found["number"]) * _TIMES[found["unit"] or "s"]


def bytes_of(text: str) -> int:
    """Return the bytes of ``1000``, ``500M``, ``5GB`` or ``50Gi``.

    Raises:
        ValueError: it is none of these.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no size: write 1000, 500M, 5GB or 50Gi")
    number, unit = int(found["number"]), (found["unit"] or "").replace("k", "K")
    return number * (_BYTES | _BINARY)[unit]
