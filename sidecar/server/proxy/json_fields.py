"""Where a JSON object's own fields stand in its bytes, found a slice at a time.

This parser follows only strings and brackets. It finds the very fields that Python's parser finds, and so the
engine, in every text that that one accepts. A text that the parser refuses may seem to have some: the engine
refuses it. It uses no parser in C, which holds the GIL to its end: up to 0.1 s for 60 MiB.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Container
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lora_fs.sidecar.errors import InputError

Body = bytes | bytearray

SLICE_BYTES: Final = 1 << 17  # gone through before others have their turn: about 1 ms
SMALL_BYTES: Final = 1 << 13  # numpy's calls cost more than all of a body up to this
MAX_FIELDS: Final = 4_000  # of the object itself: each costs a look
MAX_KEY_BYTES: Final = 128
BLANKS: Final = b" \t\r\n"

_QUOTE, _COMMA, _COLON = b'",:'
_LOWER = 0x20  # what "{" and "}" have over "[" and "]"
_OPEN, _CLOSE = b"{}"
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRING = re.compile(_TEXT, re.DOTALL)
# A string, a list of numbers, a mark, or a quote that nothing closes.
_TOKEN = re.compile(_TEXT + rb'|\[[^][{}"]*+\]|[][{}:,"]', re.DOTALL)


class Span(NamedTuple):
    """Bytes from ``start`` to ``end``, with the blanks around a value."""

    start: int
    end: int


class _Marks(NamedTuple):
    """A slice's marks: the object's own commas and colons, and the object's end, or -1."""

    own: list[int]
    end: int


class _Scanner:
    """The open strings and brackets at the end of the bytes so far."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def feed(self, piece: bytes) -> _Marks:
        piece = self._without_escapes(piece)
        if self._is_in_string and b'"' not in piece:
            return _Marks([], -1)
        data = np.frombuffer(piece, np.uint8)
        quotes = data == _QUOTE
        quotes[0] ^= self._is_in_string
        in_string = np.logical_xor.accumulate(quotes)
        self._is_in_string = bool(in_string[-1])
        data = np.where(in_string, 0, data)
        depths = self._depths(data)
        self._depth = int(depths[-1])
        is_own = (depths == 1) & ((data == _COMMA) | (data == _COLON))
        is_end = depths == 0
        return _Marks(np.flatnonzero(is_own).tolist(), int(is_end.argmax()) if is_end.any() else -1)

    def _depths(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the depth of brackets after each byte."""
        lower = data | _LOWER
        steps = (lower == _OPEN).view(np.int8) - (lower == _CLOSE).view(np.int8)
        return np.cumsum(steps, dtype=np.int32) + np.int32(self._depth)

    def _without_escapes(self, piece: bytes) -> bytes:
        """Put what means nothing in the place of escapes: a backslash stands in strings alone."""
        if self._is_escaped:
            piece = b"x" + piece[1:]
        self._is_escaped = False
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"xx")
            self._is_escaped = piece.endswith(b"\\")
            piece = piece.replace(rb"\"", b"xx")
        return piece


def _marks_of_small(body: Body, first: int) -> _Marks:
    """Return the marks of a body from its first bracket, as places behind that one."""
    own, depth = [], 0
    for token in _TOKEN.finditer(body, first):
        begin, end = token.span()
        byte = body[begin]
        if end - begin > 1:
            continue
        if byte == _QUOTE:
            break
        if byte in (_COMMA, _COLON):
            if depth == 1:
                own.append(begin - first)
            continue
        depth += 1 if byte | _LOWER == _OPEN else -1
        if depth == 0:
            return _Marks(own, begin - first)
    return _Marks(own, -1)


async def find_own_fields(body: Body, names: Container[str]) -> dict[str, Span] | None:
    """Find the values of an object's own fields; of a repeated name, the last one.

    Args:
        body: UTF-8. A byte order mark may stand before it.
        names: which fields.
    Returns:
        None if it is no object, or one that does not end.
    Raises:
        InputError: it has over MAX_FIELDS fields.
    """
    first = await _first(body, 3 if body.startswith(b"\xef\xbb\xbf") else 0, len(body))
    if body[first : first + 1] != b"{":
        return None
    scanner, found = _Scanner(), dict[str, Span]()
    fields, begun, colon, name = 1, first + 1, -1, ""
    for at in range(first, len(body), SLICE_BYTES):
        if at > first:
            await asyncio.sleep(0)
        if len(body) <= min(SMALL_BYTES, SLICE_BYTES):
            own, end = _marks_of_small(body, first)
        else:
            own, end = scanner.feed(bytes(memoryview(body)[at : at + SLICE_BYTES]))
        for mark in own:
            place = at + mark
            if end >= 0 and mark > end:
                break
            if body[place] == _COLON:
                name, colon = await _key(body, begun, place), place
                continue
            if name in names:
                found[name] = Span(colon + 1, place)
            name, begun, fields = "", place + 1, fields + 1
            if fields > MAX_FIELDS:
                raise InputError(f"the body has over {MAX_FIELDS} fields: send fewer")
        if end >= 0:
            if name in names:
                found[name] = Span(colon + 1, at + end)
            return found if await _first(body, at + end + 1, len(body)) == len(body) else None
    return None


async def _key(body: Body, start: int, end: int) -> str:
    """Return the key at that place as text; empty if it is none, or longer than every wanted name."""
    first = await _first(body, start, end)
    match = _STRING.match(body, first, min(end, first + MAX_KEY_BYTES + 1))
    if match is None:
        return ""
    text = bytes(match[0])
    if b"\\" not in text:
        return text[1:-1].decode(errors="replace")
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


async def _first(body: Body, start: int, end: int) -> int:
    """Return the place of the first byte that is no blank; ``end`` if there is none."""
    for at in range(start, end, SLICE_BYTES):
        if at > start:
            await asyncio.sleep(0)
        piece = bytes(memoryview(body)[at : min(end, at + SLICE_BYTES)])
        if rest := piece.lstrip(BLANKS):
            return at + len(piece) - len(rest)
    return end
