"""The header of a safetensors file: pure on its bytes and the file's size.

A header that passes says exactly which bytes belong to which tensor: the tensors follow one
another without gap or overlap and end where the file ends. Bounds are those of the format's
own library, and of lora-fs on what parsing costs: the number of tensors, and the memory.

Source: safetensors 0.8, ``safetensors/src/tensor.rs``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.validate.config.adapter_config import unique_object
from lora_fs.sidecar.validate.report import Findings

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 200_000
MAX_TENSOR_NAME = 1_024
MAX_AXES = 8

_METADATA = "__metadata__"
# Of one entry of a matrix; keep what the parser builds in proportion to the tensors.
_MAX_COMMAS = 8 * MAX_TENSORS
_MAX_OPENED = 4 * MAX_TENSORS  # an object and two lists an entry; nested ones cost without a comma
_MAX_UNICODE_BYTES = 8_000_000  # one emoji makes the whole text four times as large in memory

BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: ``start`` and ``end`` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Malformed(ValueError):
    """An entry of the header is not one; the message says how."""


def header_length(first: bytes, file_size_bytes: int, file: str, found: Findings) -> int | None:
    """Read the header's length from a file's first 8 bytes; None when there is no header."""
    if len(first) < LENGTH_BYTES:
        found.add("truncated", file, "", f"is {file_size_bytes} bytes: not even a header's length")
        return None
    length = int.from_bytes(first, "little")
    if length == 0:
        found.add(
            "unfinished-copy",
            file,
            "",
            "begins with zero bytes: its content has not arrived",
            hint="wait for the copy to end, or copy it again",
        )
        return None
    if length > MAX_HEADER_BYTES:
        found.add(
            "header-too-large",
            file,
            "",
            f"claims a header of {length} bytes; the format allows {MAX_HEADER_BYTES}",
            hint="it is damaged, or no safetensors file",
        )
        return None
    if LENGTH_BYTES + length > file_size_bytes:
        found.add(
            "truncated",
            file,
            "",
            f"is {file_size_bytes} bytes; its header alone takes {LENGTH_BYTES + length}",
            hint="copy it again",
        )
        return None
    return length


def parse_header(
    raw: bytes, file_size_bytes: int, file: str, found: Findings
) -> tuple[TensorEntry, ...] | None:
    """Parse a header and hold it against the file's size.

    Args:
        raw: the header's bytes, without the length before them.
    Returns:
        The tensors in the order of their bytes, or None for an untrustworthy header.
    """
    if b"\0" in raw:
        found.add(
            "unfinished-copy",
            file,
            "",
            "has zero bytes in its header: its content has not all arrived",
            hint="wait for the copy to end, or copy it again",
        )
        return None
    if raw.count(b",") > _MAX_COMMAS or raw.count(b"[") + raw.count(b"{") > _MAX_OPENED:
        found.add("header-too-large", file, "", f"lists more than {MAX_TENSORS} tensors")
        return None
    if len(raw) > _MAX_UNICODE_BYTES and not raw.isascii():
        what = f"is {len(raw)} bytes with text beyond ASCII; {_MAX_UNICODE_BYTES} are the most that is read"
        found.add("header-too-large", file, "", f"its header {what}")
        return None
    try:
        if not raw.startswith(b"{"):
            raise _Malformed("the header does not begin with {")
        header = json.loads(raw.decode(), object_pairs_hook=unique_object)
        if not isinstance(header, dict):
            raise _Malformed("the header is not a JSON object")
        _check_metadata(header.pop(_METADATA, None))
        if len(header) > MAX_TENSORS:
            found.add("header-too-large", file, "", f"lists {len(header)} tensors")
            return None
        begin = LENGTH_BYTES + len(raw)
        entries = [_entry(name, value, begin) for name, value in header.items()]
    except RecursionError:
        found.add("header", file, "", "the header is nested too deeply to be read")
        return None
    except ValueError as error:
        found.add("header", file, "", f"damaged safetensors header: {shown(str(error))}")
        return None
    entries.sort(key=lambda entry: (entry.start, entry.end))
    return tuple(entries) if _covers(entries, begin, file_size_bytes, file, found) else None


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Malformed("__metadata__ is not an object of strings")


def _entry(name: str, value: object, begin: int) -> TensorEntry:
    """Build one tensor's entry; ``begin`` is where the header ends in the file."""
    if len(name) > MAX_TENSOR_NAME or not name.isprintable():
        raise _Malformed(f"{shown(name)} is no tensor's name")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed(f"{shown(name)} is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Malformed(f"{shown(name)} has the unknown dtype {shown(dtype)}")
    if not _sizes(shape) or len(shape) > MAX_AXES:
        raise _Malformed(f"{shown(name)} has the shape {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2:
        raise _Malformed(f"{shown(name)} has the offsets {shown(offsets)}")
    return TensorEntry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _covers(entries: list[TensorEntry], begin: int, file_size_bytes: int, file: str, found: Findings) -> bool:
    """Whether the tensors tile the file from ``begin`` to its end; notes the first that fails."""
    at = begin
    for entry in entries:
        bits = math.prod(entry.shape) * BITS[entry.dtype]
        if entry.start != at:
            what = "overlaps the tensor before it" if entry.start < at else "leaves a gap before it"
            found.add("offsets", file, entry.name, what)
            return False
        if bits % 8 or (entry.end - entry.start) * 8 != bits:
            found.add(
                "offsets",
                file,
                entry.name,
                f"takes {entry.end - entry.start} bytes; {entry.dtype} × {list(entry.shape)} "
                f"takes {bits / 8:g}"
                if bits < 2**60
                else "has a shape beyond any file",
            )
            return False
        at = entry.end
    if at > file_size_bytes:
        found.add(
            "truncated",
            file,
            "",
            f"is {file_size_bytes} bytes; its tensors end at {at}",
            hint="copy it again, or wait for the copy to end",
        )
    elif at < file_size_bytes:
        found.add(
            "trailing-bytes",
            file,
            "",
            f"is {file_size_bytes} bytes; its tensors end at {at}",
            hint="it is damaged or two files were joined: copy it again",
        )
    return at == file_size_bytes
