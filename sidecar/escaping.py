"""Text of unknown origin, shortened and without what a terminal would act on."""

from __future__ import annotations

from typing import Final

SHOWN_CHARACTERS: Final = 160


def printable(text: str) -> str:
    """Escape control characters and lone surrogates; text without them is left as it is."""
    return text if text.isprintable() else ascii(text)[1:-1]


def shown(value: object) -> str:
    """Render a value of unknown origin: shortened, and without what a terminal would act on."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:  # JSON may be nested as deep as the parser's stack, which is deeper
        text = f"a deeply nested {type(value).__name__}"
    if len(text) > SHOWN_CHARACTERS:
        text = text[: SHOWN_CHARACTERS - 1] + "…"
    return printable(text)


def shown_json(value: object) -> str:
    """Render a value of JSON that has the wrong type: text looks unlike a number."""
    return f'the text "{shown(value)}"' if isinstance(value, str) else shown(value)
