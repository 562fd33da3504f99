"""Where a request's body names its model, in JSON and in multipart forms, and how to rename it.

A body that is neither, or that cannot be parsed, names none: the engine says what is wrong
with it. Nothing but the one value is changed in a form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message


@dataclass(frozen=True, slots=True)
class ModelField:
    """``name``: the model asked for. ``renamed``: the body with another one in its place."""

    name: str
    renamed: Callable[[str], bytes]


def find_model(content_type: str, body: bytes) -> ModelField | None:
    """Find the model a body names; None if it names none."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() == "multipart/form-data":
        boundary = header.get_param("boundary")
        return _in_form(boundary.encode(), body) if isinstance(boundary, str) else None
    return _in_json(body)


def _in_json(body: bytes) -> ModelField | None:
    if body.lstrip()[:1] != b"{":
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = value.get("model")
    if not isinstance(name, str):
        return None
    return ModelField(name, lambda other: json.dumps({**value, "model": other}).encode())


def _in_form(boundary: bytes, body: bytes) -> ModelField | None:
    part = re.search(
        rb'\r\nContent-Disposition: *form-data; *name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n(.*?)\r\n--'
        + re.escape(boundary),
        b"\r\n" + body,
        re.IGNORECASE | re.DOTALL,
    )
    if part is None:
        return None
    start, end = part.start(1) - 2, part.end(1) - 2
    name = part[1].decode(errors="replace")
    return ModelField(name, lambda other: body[:start] + other.encode() + body[end:])
