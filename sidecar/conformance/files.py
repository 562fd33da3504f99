"""A file that a writer replaces while readers read it, and many small files.

Replaced files have a seal, so a torn read shows and costs a look. The number of torn reads says what
the filesystem makes of a rename.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_fs.sidecar.conformance.pair import ANSWER_S, Pair
from lora_fs.sidecar.conformance.report import Rates
from lora_fs.sidecar.conformance.visibility import create
from lora_fs.sidecar.errors import CorruptRecord, VolumeUnavailable
from lora_fs.sidecar.registry.format.layout import HEAD, LEASES
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder

Read = Literal["whole", "torn", "empty", "missing", "backwards", "refused"]
SIZES_BYTES = (0, 300, 5_000, 40, 9_000)  # of the padding: shorter, longer, over a page
FILE = b"x" * 1024
MOST_FILES = 2_000


@dataclass(frozen=True, slots=True)
class Replaced:
    """How often one mount replaced it, and what readers of the other found."""

    replaced: int
    reads: Counter[Read]

    @property
    def half(self) -> int:
        """Reads that were neither the old file nor the new one."""
        return self.reads["torn"] + self.reads["empty"]


def replace_for(folder: Path, share_s: float) -> int:
    """Replace a sealed file as often as it goes; how often."""
    number, end = 1, time.monotonic() + share_s
    while time.monotonic() < end:
        number += 1
        replace_once(folder, number)
    return number


def replace_once(folder: Path, number: int) -> None:
    """One of another length than the last."""
    data = seal({"number": number, "padding": "p" * SIZES_BYTES[number % len(SIZES_BYTES)]})
    atomic.replace(folder / HEAD, data, draft_in=folder / LEASES)


def read_for(folder: Path, share_s: float) -> Counter[Read]:
    """Read it as often as it goes; what was found."""
    found: Counter[Read] = Counter()
    last, end = 0, time.monotonic() + share_s
    while time.monotonic() < end:
        what, number = read_once(folder)
        found["backwards" if what == "whole" and number < last else what] += 1
        last = max(last, number)
    return found


def read_once(folder: Path) -> tuple[Read, int]:
    """One reader's counts, and the versions that it saw."""
    try:
        data = atomic.read_bytes(folder / HEAD)
    except VolumeUnavailable:
        return "refused", 0
    if not data:
        return ("missing" if data is None else "empty"), 0
    try:
        return "whole", int(unseal(data)["number"])
    except CorruptRecord:
        return "torn", 0


def replacing(pair: Pair, share_s: float) -> Replaced:
    """Replace on one mount what the other one reads."""
    here, there = pair.make("replacing", ANSWER_S)
    pair.here.agent.call(ANSWER_S, make_folder, here / LEASES)
    pair.here.agent.call(ANSWER_S, replace_once, here, 1)
    pair.there.agent.start(read_for, there, share_s)
    pair.here.agent.start(replace_for, here, share_s)
    reads, replaced = pair.there.agent.result(share_s + ANSWER_S), pair.here.agent.result(share_s + ANSWER_S)
    assert isinstance(reads, Counter)
    assert isinstance(replaced, int)
    return Replaced(replaced, reads)


def write_many(folder: Path, share_s: float) -> tuple[int, float]:
    """Write files as records are written; return how many, and in how many seconds."""
    started, number = time.monotonic(), 0
    while number == 0 or (time.monotonic() - started < share_s and number < MOST_FILES):
        create(folder / f"file-{number:05d}", FILE)
        number += 1
    return number, time.monotonic() - started


def read_many(folder: Path, number: int, share_s: float) -> tuple[int, float, float]:
    """List the folder, then read the files by name: how many, seconds for the listing and for the reads."""
    started = time.monotonic()
    atomic.list_names(folder)
    listed, read = time.monotonic(), 0
    while read < number and (read == 0 or time.monotonic() - listed < share_s):
        atomic.read_bytes(folder / f"file-{read:05d}")
        read += 1
    return read, listed - started, time.monotonic() - listed


def rates(pair: Pair, share_s: float, lease_s: float | None) -> Rates:
    """Write many on one mount, read them at first sight on the other."""
    here, there = pair.make("files", ANSWER_S)
    written, took_s = pair.here.agent.call(share_s + ANSWER_S, write_many, here, share_s / 2)
    read, listed_s, read_s = pair.there.agent.call(share_s + ANSWER_S, read_many, there, written, share_s / 2)
    return Rates(
        files=written,
        written_per_s=written / took_s,
        listed_s=listed_s,
        read_per_s=read / read_s,
        lease_s=lease_s,
    )
