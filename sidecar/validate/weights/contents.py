"""Read the weights' bytes: NaN, Inf, absurd sizes, tensors all zero, unfinished copies.

Streams the file in one buffer, so memory does not grow with the adapter, and tests bits, so
bfloat16 needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from lora_fs.sidecar.validate.config.adapter_config import LARGEST_FLOAT32
from lora_fs.sidecar.validate.files import RegularFile
from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.weights.header import TensorEntry
from lora_fs.sidecar.validate.weights.tensors import LoraModule, Part, parse_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BUFFER_BYTES = 256 * 1024  # what a core's cache holds twice
SAMPLE_BYTES = 256

HUGE = 65_536.0  # float16 cannot hold it


class _Kind(NamedTuple):
    """How a dtype's numbers are read as bits.

    Attributes:
        bits: numpy's unsigned integer of its width.
        unsigned: all but the sign. What is larger there is larger as a number, too.
        exponent: all ones in it means NaN or Inf.
        huge: the bits of ``HUGE``.
    """

    bits: str
    unsigned: int
    exponent: int
    huge: int


_KINDS: Mapping[str, _Kind] = {
    "F16": _Kind("<u2", 0x7FFF, 0x7C00, 0x7C00),
    "BF16": _Kind("<u2", 0x7FFF, 0x7F80, 143 << 7),
    "F32": _Kind("<u4", 0x7FFF_FFFF, 0x7F80_0000, 143 << 23),
    "F64": _Kind("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 1039 << 52),
}
_OTHER = _Kind("<u1", 0xFF, 0xFF, 0x100)


def scan_contents(
    weights: RegularFile,
    entries: Sequence[TensorEntry],
    modules: Sequence[LoraModule],
    found: Findings,
    seen: Callable[[memoryview], None],
) -> None:
    """Read every tensor once.

    Args:
        entries: what the header lists, in the order of the bytes.
        modules: the pairs among them.
        seen: called with the bytes just read, before the checks; they stay until the call after
            the next one.
    Raises:
        Refused: the file shrank while it was read.
        VolumeUnavailable: the volume did not answer.
    """
    import numpy as np  # most commands read no tensors, and its import takes longer than all they do

    room = min(BUFFER_BYTES, weights.size_bytes)
    exponents = np.empty(room, np.uint8)
    buffers = cycle([memoryview(bytearray(room)) for _ in range(2)])
    nonzero: set[str] = set()
    bad_at: dict[str, int | None] = {}
    huge_at: dict[str, int | None] = {}
    scaled = {
        module.b.name: _scaled(module.b.dtype, abs(module.scale))
        for module in modules
        if 1 < abs(module.scale) <= LARGEST_FLOAT32 and module.b.dtype in _KINDS  # else: reported already
    }
    for parts in _parts(entries):
        kind, unsigned, exponent, huge = _KINDS.get(parts[0].tensor.dtype, _OTHER)
        plain = _Limit(huge, huge)
        begin = parts[0].start
        chunk = weights.view(begin, parts[-1].end - begin, next(buffers))
        seen(chunk)
        values: npt.NDArray[np.unsignedinteger] = np.frombuffer(chunk, dtype=kind)
        here = np.bitwise_and(values, exponent, out=exponents[: len(chunk)].view(kind))
        starts = [(part.start - begin) // values.itemsize for part in parts]
        for part, at, largest in zip(parts, starts, np.maximum.reduceat(here, starts).tolist(), strict=True):
            name, end = part.tensor.name, (part.end - begin) // values.itemsize
            if largest or (name not in nonzero and (values[at:end] & unsigned).any()):
                nonzero.add(name)
            limit = scaled.get(name, plain)
            if largest >= limit.exponent and bad_at.get(name) is None:
                before = (part.start - part.tensor.start) // values.itemsize
                bad_at[name] = _first(here[at:end] == exponent, before)
                if huge_at.get(name) is None:
                    huge_at[name] = _first((values[at:end] & unsigned) >= limit.bits, before)
    for name, huge_first in huge_at.items():
        if bad_at[name] is not None:
            found.add(
                "non-finite",
                weights.name,
                name,
                f"holds NaN or Inf, first at element {bad_at[name]}",
                hint="every token it touches becomes garbage: train or export it again",
            )
        elif huge_first is not None:
            times = f" times its scale {scaled[name].scale:g}" if name in scaled else ""
            found.add(
                "overflow",
                weights.name,
                name,
                f"holds a weight that{times} is 65,536 or more, first at element {huge_first}",
                hint="products with it overflow and leave NaN in shared memory: train or export it again",
            )
    _tell_zeros(weights.name, {entry.name for entry in entries} - nonzero, modules, found)


class _Part(NamedTuple):
    """What is read of a tensor at once; ``start`` and ``end`` are byte offsets in the file."""

    tensor: TensorEntry
    start: int
    end: int


def _parts(entries: Iterable[TensorEntry]) -> Iterator[list[_Part]]:
    """The tensors in the order of their bytes, at most BUFFER_BYTES of one dtype at a time."""
    parts: list[_Part] = []
    room = BUFFER_BYTES
    for entry in entries:
        if parts and parts[0].tensor.dtype != entry.dtype:
            yield parts
            parts, room = [], BUFFER_BYTES
        start = entry.start
        while start < entry.end:
            end = min(entry.end, start + room)
            parts.append(_Part(entry, start, end))
            start, room = end, room - (end - start)
            if not room:
                yield parts
                parts, room = [], BUFFER_BYTES
    if parts:
        yield parts


class _Limit(NamedTuple):
    """The least number of a dtype that ``scale`` makes ``HUGE``: its exponent alone, and all its bits."""

    exponent: int
    bits: int
    scale: float = 1.0


@lru_cache(maxsize=64)
def _scaled(dtype: str, scale: float) -> _Limit:
    import numpy as np

    least = np.array(HUGE / scale)
    wide = {"F16": "<f2", "F64": "<f8"}.get(dtype, "<f4")  # bfloat16 is the upper half of a float32
    with np.errstate(all="ignore"):
        rounded = least.astype(wide)
    bits = int(rounded.view(wide.replace("f", "u"))) + int(rounded < least)
    bits = -(-bits >> 16) if dtype == "BF16" else bits
    return _Limit(bits & _KINDS[dtype].exponent, bits, scale)


def _first(where: npt.NDArray[np.bool_], before: int) -> int | None:
    return before + int(where.argmax()) if where.any() else None


def is_preallocated(weights: RegularFile, entries: Sequence[TensorEntry]) -> bool:
    """Whether samples of the tensors look like a copy whose bytes have not all arrived.

    A trained lora_A is never zero, so a run of zero bytes at its head or its tail
    is a hole. Tails alone, of every lora_A alike, are an adapter padded to a larger rank.
    lora_embedding_A is left out: it starts as zeros, and rare tokens never change it. The lora_B
    may all be zero, in an adapter without training; the file's last tensor may not end in
    zeros when other lora_B do not.

    Args:
        entries: what the header lists, in the order of the bytes.
    """
    ends = [_zero_ends(weights, entry) for entry in entries if _part(entry) is Part.A]
    padded = len(ends) > 1 and all(tail for _, tail in ends)
    if any(head for head, _ in ends) or (not padded and any(tail for _, tail in ends)):
        return True
    b_entries = [entry for entry in entries if _part(entry) is Part.B]
    if not b_entries or b_entries[-1] is not entries[-1]:
        return False
    last_ends_in_zeros = _zero_ends(weights, b_entries[-1])[1]
    return last_ends_in_zeros and any(_zero_ends(weights, entry) != (True, True) for entry in b_entries)


def _part(entry: TensorEntry) -> Part | None:
    parsed = parse_name(entry.name)
    return None if parsed is None or entry.start == entry.end else parsed[1]


def _zero_ends(weights: RegularFile, entry: TensorEntry) -> tuple[bool, bool]:
    """Whether a tensor's first bytes, and its last ones, are all zero."""
    size = min(SAMPLE_BYTES, (entry.end - entry.start + 1) // 2)
    head, tail = weights.read(entry.start, size), weights.read(entry.end - size, size)
    return not any(head), not any(tail)


def _tell_zeros(file: str, zero: set[str], modules: Sequence[LoraModule], found: Findings) -> None:
    for module in modules:
        if module.a.name in zero and not module.embedding:
            found.add(
                "zero-weights",
                file,
                module.a.name,
                "is all zero: the adapter does nothing there, or its copy is not finished",
            )
    if modules and all(module.b.name in zero for module in modules):
        found.add("zero-weights", file, "", "every lora_B is all zero: the adapter does nothing")
