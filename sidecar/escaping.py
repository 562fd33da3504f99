"""Text of unknown origin, without what a terminal would act on."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape control characters and lone surrogates; text without them is left as it is."""
    return text if text.isprintable() else ascii(text)[1:-1]
