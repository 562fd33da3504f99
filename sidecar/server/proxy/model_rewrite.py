"""Where a request's body names its model, in JSON and in multipart forms, and how to rename it.

Any other body, or one that does not parse, names none: the engine says what is wrong with it. Only the one
value changes. No body takes much more memory than its own length. A long body takes turns with other
requests, whatever it nests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.server.proxy.json_fields import BLANKS, SLICE_BYTES, Body, Span, find_own_fields

MAX_UTF16_BYTES = 1 << 20  # of JSON in UTF-16 or 32, which is encoded anew
MAX_NAME_BYTES = 1 << 16  # of a model's or a user's name, in its encoding, with the blanks around it
MAX_FLAG_BYTES = 64
MAX_PROMPT_BYTES = 1 << 13  # of a prompt, which they identify
_PROMPTS = ("messages", "prompt", "input")
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
_FORM = "multipart/form-data"
_BEFORE_UTF16 = BLANKS + b"\0\xfe\xff"  # blanks, and the mark before them

Parts = tuple[bytes | bytearray | memoryview, ...]  # of a body, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of a body besides its model.

    Attributes:
        user: what a JSON body has there; a form names none.
        background: likewise, of whatever type.
        prompt: the beginning of its prompt or messages, as a JSON body writes them; empty where it has none.
    """

    user: str | None = None
    background: object = None
    prompt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelField(Fields):
    """The model asked for.

    Attributes:
        parts: the body with another model in its place. The bytes around it are not copied.
    """

    name: str
    parts: Callable[[str], Parts]

    def renamed(self, other: str) -> bytes:
        """Return a copy of the body that names ``other``."""
        return b"".join(self.parts(other))


async def find_fields(content_type: str, body: Body) -> Fields:
    """Return what a body says: a ``ModelField`` if it names a model.

    Raises:
        InputError: it may name a model, in an encoding that takes too long to read.
    """
    if _media_type(content_type) == _FORM:
        boundary = _BOUNDARY.search(content_type)
        if boundary is None:
            return Fields()
        return await _in_form((boundary[1] or boundary[2]).encode("latin-1"), body) or Fields()
    return await _in_json(body)


async def hides_its_model(content_type: str, body: Body) -> bool:
    """Return whether a form may name a model that ``find_fields`` does not see.

    It is unusual, or names none.
    """
    kind = _media_type(content_type)
    if kind == "application/x-www-form-urlencoded":
        return bool(body)
    if kind != _FORM:
        return False
    if not _PLAIN_TYPE.fullmatch(content_type):
        return True
    parts = named = 0
    async for at in _places(_DISPOSITION, body):
        plain = _PLAIN_DISPOSITION.match(body, max(0, at - 2), at + 2 * MAX_PART_HEADER_BYTES)
        parts += 1
        if plain is None or len(plain[0]) > MAX_PART_HEADER_BYTES or parts > MAX_PARTS:
            return True
        named += plain[1].strip() == b"model"
    return named != 1 or not isinstance(await find_fields(content_type, body), ModelField)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


async def _in_json(body: Body) -> Fields:
    encoding = json.detect_encoding(bytes(body[:4]))
    if not encoding.startswith("utf-8"):
        if body[:SLICE_BYTES].lstrip(_BEFORE_UTF16)[:1] not in (b"", b"{"):
            return Fields()
        if len(body) > MAX_UTF16_BYTES:
            raise InputError(f"a JSON body of more than {MAX_UTF16_BYTES} bytes has to be UTF-8")
        try:
            body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return Fields()
    found = await find_own_fields(body, ("model", "user", "background", *_PROMPTS))
    if found is None:
        return Fields()
    user = _text(body, found["user"]) if "user" in found else None
    background = _flag(body, found["background"]) if "background" in found else None
    said = next((found[one] for one in _PROMPTS if one in found), Span(0, 0))
    prompt = bytes(body[said.start : min(said.end, said.start + MAX_PROMPT_BYTES)]).lstrip(BLANKS)
    span = found.get("model", Span(0, 0))
    if span.end - span.start > MAX_NAME_BYTES:
        raise InputError(f"the field model takes over {MAX_NAME_BYTES} bytes: send a model's name")
    name = _text(body, span)
    if name is None:
        return Fields(user=user, background=background, prompt=prompt)
    text = bytes(body[span.start : span.end])
    start = span.end - len(text.lstrip(BLANKS))
    end = start + len(text.strip(BLANKS))

    def parts(other: str) -> Parts:
        view = memoryview(body)
        return view[:start], json.dumps(other).encode(), view[end:]

    return ModelField(name=name, parts=parts, user=user, background=background, prompt=prompt)


def _text(body: Body, span: Span) -> str | None:
    """Return a value that is text; None of any other, and of what is too long for a name."""
    if span.end - span.start > MAX_NAME_BYTES:
        return None
    text = bytes(body[span.start : span.end]).strip(BLANKS)
    if not text.startswith(b'"'):
        return None
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _flag(body: Body, span: Span) -> object:
    """Return a value, or the beginning of its text where that is no flag."""
    text = bytes(body[span.start : min(span.end, span.start + MAX_NAME_BYTES)]).strip(BLANKS)[:MAX_FLAG_BYTES]
    if len(text) == MAX_FLAG_BYTES:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


async def _places(word: bytes, body: Body) -> AsyncIterator[int]:
    """Yield the positions of ``word``, in any capitalisation."""
    for begin in range(0, len(body), SLICE_BYTES):
        # To look for a constant is many times faster than a pattern without case.
        lowered, at = bytes(body[begin : begin + SLICE_BYTES + len(word) - 1]).lower(), -1
        while (at := lowered.find(word, at + 1)) >= 0:
            yield begin + at
        if begin + SLICE_BYTES < len(body):
            await asyncio.sleep(0)


async def _find(word: bytes, body: Body, start: int) -> int:
    """Return where ``word`` stands next; -1: nowhere."""
    for begin in range(start, len(body), SLICE_BYTES):
        at = body.find(word, begin, begin + SLICE_BYTES + len(word) - 1)
        if at >= 0:
            return at
        if begin + SLICE_BYTES < len(body):
            await asyncio.sleep(0)
    return -1


async def _in_form(boundary: bytes, body: Body) -> ModelField | None:
    """Go from boundary to boundary, so that the work grows with the body's length and no faster."""
    delimiter = b"--" + boundary
    at = 0 if body.startswith(delimiter) else await _find(b"\r\n" + delimiter, body, 0) + 2
    for part in range(MAX_PARTS):
        end = await _find(b"\r\n" + delimiter, body, at)
        if not body.startswith(delimiter, at) or end < 0:
            return None
        headers_end = body.find(b"\r\n\r\n", at, min(end, at + MAX_PART_HEADER_BYTES))
        if headers_end >= 0 and _IS_MODEL.search(body, at, headers_end + 2):
            return _form_field(body, headers_end + 4, end)
        at = end + 2
        if part % 16 == 15:
            await asyncio.sleep(0)
    return None


def _form_field(body: Body, start: int, end: int) -> ModelField:
    name, view = body[start:end].decode(errors="replace"), memoryview(body)
    return ModelField(name=name, parts=lambda other: (view[:start], other.encode(), view[end:]))
