"""Which replicas have the beginning of a prompt in their cache, as far as this gateway sent it there. No I/O.

A prompt is a chain of blocks, each hashed with all before it. The adapter's digest seeds the first hash, so
no other revision's blocks match. A block with several successors, such as the end of a system prompt, and all
blocks before it are the beginning of several prompts: they do not count. Nor does one that every replica has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Final

BLOCK_BYTES: Final = 64
MAX_BLOCKS: Final = 128  # of one prompt: 8 KiB identify it
KEPT: Final = 1 << 17  # blocks in memory
_MANY: Final = -1

Chain = tuple[int, ...]


def chain(seed: str, prompt: bytes | bytearray | memoryview) -> Chain:
    """Return the hashes of the whole blocks of ``prompt``.

    Args:
        seed: what the cache depends on besides the prompt: the adapter's digest.
        prompt: as the request writes it, text or token ids.
    """
    view = memoryview(prompt)[: BLOCK_BYTES * MAX_BLOCKS]
    before = blake2b(seed.encode(errors="surrogatepass"), digest_size=8).digest()
    hashes = []
    for at in range(0, len(view) - BLOCK_BYTES + 1, BLOCK_BYTES):
        before = blake2b(before + bytes(view[at : at + BLOCK_BYTES]), digest_size=8).digest()
        hashes.append(int.from_bytes(before, "big"))
    return tuple(hashes)


@dataclass(slots=True)
class _Block:
    lives: set[int] = field(default_factory=set)  # of the replicas that have it
    next: int | None = None  # the one block that follows, or _MANY


class Prefixes:
    """The blocks that were sent lately, and where."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._lives: dict[str, int] = {}  # replica → the number of its life, from one emptying to the next
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._blocks)

    def sent(self, hashes: Chain, peer: str) -> None:
        """Note that ``peer`` gets this prompt."""
        if peer not in self._lives:
            self._lives[peer] = next(self._numbers)
        life = self._lives[peer]
        for at, one in enumerate(hashes):
            block = self._blocks.get(one)
            if block is None:
                block = self._blocks[one] = _Block()
            else:
                self._blocks.move_to_end(one)
            block.lives.add(life)
            if len(block.lives) > len(self._lives):  # some are over
                block.lives.intersection_update(self._lives.values())
            follows = hashes[at + 1] if at + 1 < len(hashes) else None
            if follows is not None and block.next != follows:
                block.next = follows if block.next is None else _MANY
        while len(self._blocks) > self._kept:
            self._blocks.popitem(last=False)

    def found(self, hashes: Chain, peers: Collection[str]) -> dict[str, int]:
        """Return how many blocks that identify this prompt each of ``peers`` has, without a gap."""
        of = {self._lives[peer]: peer for peer in peers if peer in self._lives}
        counts = Counter[int]()
        there: Set[int] = of.keys()
        for one in hashes:
            block = self._blocks.get(one)
            if block is None or not (there := there & block.lives):
                break
            if block.next == _MANY:
                counts.clear()
            elif len(there) < len(peers):
                counts.update(there)
        return {of[life]: blocks for life, blocks in counts.items()}

    def forget(self, peer: str) -> None:
        """Forget what a replica had that left or restarted: its cache is empty."""
        self._lives.pop(peer, None)
