"""Which replicas have the beginning of a prompt in their cache, as far as this gateway sent it there. No I/O.

A prompt is a chain of blocks, each hashed with all before it. The adapter's digest seeds the first hash, so
no other revision's blocks match. A block with several successors, such as a system
prompt, identifies no prompt and does not count. Nor does one that every replica has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
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
    peers: set[str] = field(default_factory=set)
    next: int | None = None  # the one block that follows, or _MANY


class Prefixes:
    """The blocks that were sent lately, and where."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def sent(self, hashes: Chain, peer: str) -> None:
        """Note that ``peer`` gets this prompt."""
        for at, one in enumerate(hashes):
            block = self._blocks.get(one)
            if block is None:
                block = self._blocks[one] = _Block()
            else:
                self._blocks.move_to_end(one)
            block.peers.add(peer)
            follows = hashes[at + 1] if at + 1 < len(hashes) else None
            if follows is not None and block.next != follows:
                block.next = follows if block.next is None else _MANY
        while len(self._blocks) > self._kept:
            self._blocks.popitem(last=False)

    def found(self, hashes: Chain, peers: Collection[str]) -> dict[str, int]:
        """Return how many blocks that identify this prompt each of ``peers`` has, without a gap."""
        counts: dict[str, int] = {}
        there = set(peers)
        for at, one in enumerate(hashes):
            block = self._blocks.get(one)
            there = there & block.peers if block is not None else set()
            if block is None or not there:
                break
            follows = hashes[at + 1] if at + 1 < len(hashes) else block.next
            identifies = block.next in (None, follows)
            if identifies and len(there) < len(peers):
                for peer in there:
                    counts[peer] = counts.get(peer, 0) + 1
        return counts

    def forget(self, peers: Iterable[str]) -> None:
        """Forget what replicas had that left or restarted: their caches are empty."""
        gone = set(peers)
        if gone:
            for block in self._blocks.values():
                block.peers -= gone
