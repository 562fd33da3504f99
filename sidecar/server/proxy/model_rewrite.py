"""Where a request's body names its model, in JSON and in multipart forms, and how to rename it.

A body that is neither, or that cannot be parsed, names none: the engine says what is wrong
with it. Nothing but the one value is changed. No body takes much more memory than its own length, or more
than a moment, whatever it nests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from lora_fs.sidecar.errors import InputError

MAX_UNUSUAL_BYTES = 1 << 20  # of JSON that only Python's parser takes, which makes a tree of it
MAX_FLAG_BYTES = 64
MAX_PARTS = 4_000  # Starlette, which parses for vLLM, takes 1,000 fields and as many files
MAX_PART_HEADER_BYTES = 16_384

# The standard library's parser of parameters raises on some that it cannot sort.
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
# One boundary, and a charset only if it changes nothing: vLLM's parser reads names and values by it.
_CHARSET = r'(?:; *charset="?utf-8"?)?'
_PLAIN_TYPE = re.compile(
    rf'multipart/form-data{_CHARSET}; *boundary=(?:"[^"\\]+"|[^\s;,"]+){_CHARSET};? *', re.IGNORECASE
)
_IS_MODEL = re.compile(rb'\r\nContent-Disposition: *form-data; *name="?model"?\r\n', re.IGNORECASE)

_DISPOSITION = b"content-disposition"
# What every client writes, and every parser reads alike: not folded, escaped, encoded or repeated.
_PLAIN_DISPOSITION = re.compile(
    rb'(?:\A|\r\n)Content-Disposition: *+form-data; *+name="?+([^"\\%;\r\n]*+)"?+'
    rb'(?:; *+filename="[^"\r\n]*+")?+(?:; *+filename\*=[^;\r\n]*+)?+\r\n(?![ \t])',
    re.IGNORECASE,
)
_OBJECT = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf\xff\xfe]*\{")  # in UTF-8, 16 or 32, with or without a mark
_UNUSUAL = (
    f"a JSON body of more than {MAX_UNUSUAL_BYTES} bytes has to be plain (RFC 8259): UTF-8 without a byte "
    "order mark, NaN, Infinity or half of a surrogate pair"
)

Body = bytes | bytearray
Parts = tuple[bytes | bytearray | memoryview, ...]  # of a body, in their order


class _Top(msgspec.Struct):
    """As they stand in the body."""

    model: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()


_top = msgspec.json.Decoder(_Top)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a body says besides its model.

    Attributes:
        user: what a JSON body has there; a form names none.
        background: likewise, of whatever type.
    """

    user: str | None = None
    background: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelField(Fields):
    """The model asked for.

    Attributes:
        parts: the body with another one in its place. What is around it is not copied.
    """

    name: str
    parts: Callable[[str], Parts]

    def renamed(self, other: str) -> bytes:
        """Return a copy of the body that names ``other``."""
        return b"".join(self.parts(other))


def find_fields(content_type: str, body: Body) -> Fields:
    """What a body says: a ``ModelField`` if it names a model.

    Raises:
        InputError: it may name one, and is too long or too deep to be read as it is written.
    """
    if _media_type(content_type) == "multipart/form-data":
        boundary = _BOUNDARY.search(content_type)
        found = _in_form((boundary[1] or boundary[2]).encode("latin-1"), body) if boundary else None
        return found or Fields()
    return _in_json(body)


def find_model(content_type: str, body: Body) -> ModelField | None:
    """The model a body names; None if it names none. Raises InputError as ``find_fields``."""
    found = find_fields(content_type, body)
    return found if isinstance(found, ModelField) else None


def hides_its_model(content_type: str, body: Body) -> bool:
    """Whether a form may name a model that ``find_model`` does not see: it is unusual, or names none."""
    kind = _media_type(content_type)
    if kind == "application/x-www-form-urlencoded":
        return bool(body)
    if kind != "multipart/form-data":
        return False
    if not _PLAIN_TYPE.fullmatch(content_type):
        return True
    parts = named = 0
    lowered, at = body.lower(), -1  # to look for a constant is many times faster than a pattern without case
    while (at := lowered.find(_DISPOSITION, at + 1)) >= 0:
        plain = _PLAIN_DISPOSITION.match(body, max(0, at - 2))
        parts += 1
        if plain is None or parts > MAX_PARTS:
            return True
        named += plain[1].strip() == b"model"
    return named != 1 or find_model(content_type, body) is None


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _in_json(body: Body) -> Fields:
    """Passes over what it does not need: of a body of arrays Python would make twenty times as much."""
    if not _OBJECT.match(body):
        return Fields()
    try:
        top = _top.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _in_unusual_json(body)
    name, user, background = _text(top.model), _text(top.user), _flag(top.background)
    if name is None:
        return Fields(user=user, background=background)

    def parts(other: str) -> Parts:
        at, view = _address(top.model) - _address(body), memoryview(body)
        return view[:at], json.dumps(other).encode(), view[at + len(memoryview(top.model)) :]

    return ModelField(name=name, parts=parts, user=user, background=background)


def _in_unusual_json(body: Body) -> Fields:
    """What Python's parser takes besides, and with it the engine: UTF-16, a byte order mark, NaN.

    Raises:
        InputError: it is too long to be parsed so, or nests deeper than this Python's parser goes: another
            one's, the engine's, may go deeper.
    """
    if len(body) > MAX_UNUSUAL_BYTES:
        raise InputError(_UNUSUAL)
    try:
        value = json.loads(body)
    except ValueError:
        return Fields()
    except RecursionError as error:
        raise InputError(
            "a JSON body nests too deeply to be read: send arrays and objects less deep"
        ) from error
    if not isinstance(value, dict):
        return Fields()
    name, user, background = value.get("model"), value.get("user"), value.get("background")
    user = user if isinstance(user, str) else None
    if not isinstance(name, str):
        return Fields(user=user, background=background)

    def parts(other: str) -> Parts:
        return (json.dumps({**value, "model": other}).encode(),)

    return ModelField(name=name, parts=parts, user=user, background=background)


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _flag(raw: msgspec.Raw) -> object:
    """Its value, or the beginning of its text where that is no flag."""
    text = bytes(memoryview(raw)[:MAX_FLAG_BYTES])
    if len(text) == MAX_FLAG_BYTES:
        return text
    try:
        return msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text


def _address(view: Body | msgspec.Raw) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _in_form(boundary: bytes, body: Body) -> ModelField | None:
    """Goes from boundary to boundary, so that the work grows with the body's length and no faster."""
    delimiter = b"--" + boundary
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    for _ in range(MAX_PARTS):
        end = body.find(b"\r\n" + delimiter, at)
        if not body.startswith(delimiter, at) or end < 0:
            return None
        headers_end = body.find(b"\r\n\r\n", at, min(end, at + MAX_PART_HEADER_BYTES))
        if headers_end >= 0 and _IS_MODEL.search(body, at, headers_end + 2):
            return _form_field(body, headers_end + 4, end)
        at = end + 2
    return None


def _form_field(body: Body, start: int, end: int) -> ModelField:
    name, view = body[start:end].decode(errors="replace"), memoryview(body)
    return ModelField(name=name, parts=lambda other: (view[:start], other.encode(), view[end:]))
