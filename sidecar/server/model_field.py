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

_DISPOSITION = re.compile(rb"content-disposition", re.IGNORECASE)
# What every client writes, and every parser reads alike: not folded, escaped, encoded or repeated.
_PLAIN_DISPOSITION = re.compile(
    rb'\r\nContent-Disposition: *form-data; *name="?([^"\\%;\r\n]*)"?'
    rb'(?:; *filename="[^"\r\n]*")?(?:; *filename\*=[^;\r\n]*)?\r\n(?![ \t])',
    re.IGNORECASE,
)
_OBJECT = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf\xff\xfe]*\{")  # in UTF-8, 16 or 32, with or without a mark
_UNUSUAL = (
    f"a JSON body of more than {MAX_UNUSUAL_BYTES} bytes has to be plain (RFC 8259): UTF-8 without a byte "
    "order mark, NaN, Infinity or half of a surrogate pair"
)

Body = bytes | bytearray


class _Top(msgspec.Struct):
    """As they stand in the body."""

    model: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()


_top = msgspec.json.Decoder(_Top)


@dataclass(frozen=True, slots=True)
class ModelField:
    """The model asked for.

    Attributes:
        renamed: the body with another one in its place.
        user: what a JSON body has there; a form names none.
        background: likewise, of whatever type.
    """

    name: str
    renamed: Callable[[str], Body]
    user: str | None = None
    background: object = None


def find_model(content_type: str, body: Body) -> ModelField | None:
    """Find the model a body names; None if it names none.

    Raises:
        InputError: it may name one, and is too long to be read as it is written.
    """
    if _media_type(content_type) == "multipart/form-data":
        boundary = _BOUNDARY.search(content_type)
        return _in_form((boundary[1] or boundary[2]).encode("latin-1"), body) if boundary else None
    return _in_json(body)


def hides_its_model(content_type: str, body: Body) -> bool:
    """Whether a form may name a model that ``find_model`` does not see, since it is written unusually."""
    kind = _media_type(content_type)
    if kind == "application/x-www-form-urlencoded":
        return bool(body)
    if kind != "multipart/form-data":
        return False
    if not _PLAIN_TYPE.fullmatch(content_type):
        return True
    plain = _PLAIN_DISPOSITION.findall(b"\r\n" + body)
    if len(plain) != len(_DISPOSITION.findall(body)):
        return True
    named = sum(name.strip() == b"model" for name in plain)
    return named > 1 or (named == 1 and find_model(content_type, body) is None)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _in_json(body: Body) -> ModelField | None:
    """Passes over what it does not need: of a body of arrays Python would make twenty times as much."""
    if not _OBJECT.match(body):
        return None
    try:
        top = _top.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _in_unusual_json(body)
    name = _text(top.model)
    if name is None:
        return None

    def renamed(other: str) -> Body:
        at = _address(top.model) - _address(body)
        return body[:at] + json.dumps(other).encode() + body[at + len(memoryview(top.model)) :]

    return ModelField(name, renamed, _text(top.user), _flag(top.background))


def _in_unusual_json(body: Body) -> ModelField | None:
    """What Python's parser takes besides, and with it the engine: UTF-16, a byte order mark, NaN.

    Raises:
        InputError: it is too long to be parsed so.
    """
    if len(body) > MAX_UNUSUAL_BYTES:
        raise InputError(_UNUSUAL)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = value.get("model") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return None
    user = value.get("user")

    def renamed(other: str) -> bytes:
        return json.dumps({**value, "model": other}).encode()

    return ModelField(name, renamed, user if isinstance(user, str) else None, value.get("background"))


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
    name = body[start:end].decode(errors="replace")
    return ModelField(name, lambda other: body[:start] + other.encode() + body[end:])
