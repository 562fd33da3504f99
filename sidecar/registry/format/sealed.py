"""Sealed JSON: encodes records, pointers and hints for the volume, and decodes them. Pure: no I/O.

A seal is the SHA-256 over the canonical JSON (sorted keys, no spaces, UTF-8) of the object
without its ``sum``. A file whose seal does not hold is *not yet visible*, never a value.
"""

from __future__ import annotations

import hashlib
import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from lora_fs.sidecar.errors import CorruptRecord, InputError, NewerRecord
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import API_VERSION, JsonObject

MAX_SEALED_BYTES = 4 << 20
MAX_DEPTH = 100  # pydantic serializes 255 levels; nothing of ours has ten

Stored = TypeVar("Stored", bound=BaseModel)


def _checksum(body: JsonObject) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def seal(value: BaseModel | JsonObject) -> bytes:
    """Serialize with a fresh ``sum``, indented so that ``cat`` is enough to read it.

    Raises:
        InputError: it has more than MAX_SEALED_BYTES, or text that UTF-8 cannot encode.
    """
    body = value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value
    body = {name: item for name, item in body.items() if name != "sum"}
    try:
        body["sum"] = _checksum(body)
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 60) : error.end + 20]
        raise InputError(f"{around!a} holds what is no text in UTF-8: use another name or path") from error
    data = to_json(body, indent=1) + b"\n"  # json.dumps indents in Python, several times slower
    if len(data) > MAX_SEALED_BYTES:
        raise InputError(f"{len(data)} bytes of JSON: {MAX_SEALED_BYTES} are the most that is read")
    return data


def unseal(data: bytes) -> JsonObject:
    """Check the seal and return the object, ``sum`` included.

    Raises:
        CorruptRecord: not JSON, not an object, no seal, or a seal that does not hold.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("sum"), str):
        raise CorruptRecord("not a sealed object: no 'sum'")
    try:
        expected = _checksum({name: item for name, item in value.items() if name != "sum"})
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"cannot be checked: {error}") from error
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise CorruptRecord(f"nested deeper than {MAX_DEPTH}")
    if value["sum"] != expected:
        raise CorruptRecord(f"checksum is {shown(value['sum'][:12])}…, the content gives {expected[:12]}…")
    return value


def _depth(value: object) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [item for items in inner for item in items]
    return depth


def decode(kind: type[Stored], data: bytes) -> Stored:
    """Unseal and parse.

    Raises:
        NewerRecord: another ``apiVersion`` wrote it. CorruptRecord: the seal or the shape is wrong.
    """
    value = unseal(data)
    version = value.get("apiVersion", API_VERSION)
    if version != API_VERSION:
        raise NewerRecord(f"apiVersion {shown(repr(version))} is not {API_VERSION!r}: needs another lora-fs")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CorruptRecord(f"{shown(field)}: {shown(first['msg'])}") from error
