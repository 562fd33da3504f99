"""Where a request's body names its model, in JSON and in multipart forms, and how to rename it.

A body that is neither, or that cannot be parsed, names none: the engine says what is wrong
with it. Nothing but the one value is changed in a form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_BODY_BYTES = 64 << 20  # of a request that is read to find its model
MAX_PARTS = 4_000  # Starlette, which parses for vLLM, takes 1,000 fields and as many files
MAX_PART_HEADER_BYTES = 16_384

# The standard library's parser of parameters raises on some that it cannot sort.
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_IS_MODEL = re.compile(rb'\r\nContent-Disposition: *form-data; *name="?model"?\r\n', re.IGNORECASE)

_DISPOSITION = re.compile(rb"content-disposition", re.IGNORECASE)
# What every client writes, and every parser reads alike: not folded, escaped, encoded or repeated.
_PLAIN_DISPOSITION = re.compile(
    rb'\r\nContent-Disposition: *form-data; *name="?([^"\\%;\r\n]*)"?'
    rb'(?:; *filename="[^"\r\n]*")?(?:; *filename\*=[^;\r\n]*)?\r\n(?![ \t])',
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ModelField:
    """The model asked for.

    Attributes:
        renamed: the body with another one in its place.
        user, background: what a JSON body has there, of whatever type; a form names none.
    """

    name: str
    renamed: Callable[[str], bytes]
    user: object = None
    background: object = None


def find_model(content_type: str, body: bytes) -> ModelField | None:
    """Find the model a body names; None if it names none."""
    if _media_type(content_type) == "multipart/form-data":
        boundary = _BOUNDARY.search(content_type)
        return _in_form((boundary[1] or boundary[2]).encode("latin-1"), body) if boundary else None
    return _in_json(body)


def hides_its_model(content_type: str, body: bytes) -> bool:
    """Whether a form may name a model that ``find_model`` does not see, since it is written unusually."""
    kind = _media_type(content_type)
    if kind == "application/x-www-form-urlencoded":
        return bool(body)
    if kind != "multipart/form-data":
        return False
    plain = _PLAIN_DISPOSITION.findall(b"\r\n" + body)
    if len(plain) != len(_DISPOSITION.findall(body)):
        return True
    named = sum(name.strip() == b"model" for name in plain)
    return named > 1 or (named == 1 and find_model(content_type, body) is None)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _in_json(body: bytes) -> ModelField | None:
    if not body:
        return None
    try:
        value = json.loads(body)  # as the engine does: UTF-16 and a byte order mark are text, too
    except (ValueError, RecursionError):
        return None
    name = value.get("model") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return None

    def renamed(other: str) -> bytes:
        return json.dumps({**value, "model": other}).encode()

    return ModelField(name, renamed, value.get("user"), value.get("background"))


def _in_form(boundary: bytes, body: bytes) -> ModelField | None:
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


def _form_field(body: bytes, start: int, end: int) -> ModelField:
    name = body[start:end].decode(errors="replace")
    return ModelField(name, lambda other: body[:start] + other.encode() + body[end:])
