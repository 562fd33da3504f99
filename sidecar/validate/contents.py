"""Read the weights' bytes: NaN, Inf, absurd sizes, tensors all zero, copies that are not finished.

Streams the file in one buffer, so memory does not grow with the adapter, and tests bits, so
bfloat16 needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lora_fs.sidecar.validate.files import RegularFile
from lora_fs.sidecar.validate.header import TensorEntry
from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.tensors import LoraModule, Part, parse_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BUFFER_BYTES = 256 * 1024  # what a core's cache holds twice
SAMPLE_BYTES = 256

# dtype → numpy's unsigned integer of its width, its exponent (all ones means NaN or Inf), and the
# exponent of 65,536, which float16 cannot hold
_EXPONENTS: Mapping[str, tuple[str, int, int]] = {
    "F16": ("<u2", 0x7C00, 0x7C00),
    "BF16": ("<u2", 0x7F80, 143 << 7),
    "F32": ("<u4", 0x7F80_0000, 143 << 23),
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 1039 << 52),
}


def scan_contents(
    weights: RegularFile,
    entries: Iterable[TensorEntry],
    modules: Sequence[LoraModule],
    found: Findings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Read every tensor once.

    Args:
        entries: what the header lists, in the order of the bytes.
        modules: the pairs among them.
        progress: called with the number of bytes just read.
    Raises:
        Refused: the file shrank while it was read.
        VolumeUnavailable: the volume did not answer.
    """
    import numpy as np  # most commands read no tensors, and its import takes longer than all they do

    buffer = memoryview(bytearray(BUFFER_BYTES))
    exponents = np.empty(BUFFER_BYTES, np.uint8)
    zero: set[str] = set()
    for entry in entries:
        kind, exponent, huge = _EXPONENTS.get(entry.dtype, ("<u1", 0, 1))
        any_bits, bad_at, huge_at = False, None, None
        for offset in range(entry.start, entry.end, BUFFER_BYTES):
            chunk = buffer[: min(BUFFER_BYTES, entry.end - offset)]
            weights.read_into(chunk, offset)
            values: npt.NDArray[np.unsignedinteger] = np.frombuffer(chunk, dtype=kind)
            largest = 0
            if exponent and bad_at is None:
                here = np.bitwise_and(values, exponent, out=exponents[: len(chunk)].view(kind))
                largest = here.max()
                if largest >= huge:
                    before = (offset - entry.start) // values.itemsize
                    bad_at = _first(here == exponent, before)
                    huge_at = _first(here >= huge, before) if huge_at is None else huge_at
            any_bits = any_bits or largest > 0 or bool(values.any())
            if progress is not None:
                progress(len(chunk))
        if bad_at is not None:
            found.add(
                "non-finite",
                weights.name,
                entry.name,
                f"holds NaN or Inf, first at element {bad_at}",
                hint="every token it touches becomes garbage: train or export it again",
            )
        elif huge_at is not None:
            found.add(
                "overflow",
                weights.name,
                entry.name,
                f"holds a weight of 65,536 or more, first at element {huge_at}",
                hint="products with it overflow and leave NaN in shared memory: train or export it again",
            )
        if not any_bits:
            zero.add(entry.name)
    _tell_zeros(weights.name, zero, modules, found)


def _first(where: npt.NDArray[np.bool_], before: int) -> int | None:
    return before + int(where.argmax()) if where.any() else None


def is_preallocated(weights: RegularFile, entries: Sequence[TensorEntry]) -> bool:
    """Whether samples of the tensors look like a copy whose bytes have not all arrived.

    A lora_A is never zero where it was trained, so a run of zero bytes at its head or its tail
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
