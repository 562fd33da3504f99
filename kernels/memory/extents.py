"""The occupied stretches of a storage. Numbers alone: copies nothing."""

from __future__ import annotations

from dataclasses import dataclass


class StorageFullError(MemoryError):
    """A stretch does not fit.

    Attributes:
        wanted: elements.
        free: elements, not all of them together.
        size: of the whole storage.
    """

    def __init__(self, wanted: int, free: int, size: int) -> None:
        super().__init__(f"{wanted} elements do not fit: {free} of {size} are free")
        self.wanted = wanted
        self.free = free
        self.size = size


@dataclass(frozen=True, slots=True)
class Extent:
    """``length`` elements from ``begin`` on."""

    begin: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.length


@dataclass(frozen=True, slots=True)
class Move:
    """A copy for compaction: towards the beginning, and maybe onto itself."""

    owner: int
    source: int
    target: int
    length: int


class Extents:
    """The taken stretches of ``size`` elements, by owner."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, Extent] = {}

    def __contains__(self, owner: int) -> bool:
        return owner in self._taken

    def __getitem__(self, owner: int) -> Extent:
        return self._taken[owner]

    @property
    def free(self) -> int:
        return self.size - sum(extent.length for extent in self._taken.values())

    def take(self, owner: int, length: int) -> Extent | None:
        """Take the first gap that is long enough; None where there is none.

        Raises:
            StorageFullError: not even compaction would make one.
            ValueError: the owner has an extent already.
        """
        if owner in self._taken:
            raise ValueError(f"{owner} has an extent already")
        if length > self.free:
            raise StorageFullError(length, self.free, self.size)
        begin = 0
        for extent in self._in_order():
            if extent.begin - begin >= length:
                break
            begin = extent.end
        if begin + length > self.size:
            return None
        self._taken[owner] = Extent(begin, length)
        return self._taken[owner]

    def release(self, owner: int) -> None:
        del self._taken[owner]

    def compact(self) -> list[Move]:
        """Close all gaps; the moves have to be made in this order."""
        moves = []
        begin = 0
        for owner in sorted(self._taken, key=lambda owner: self._taken[owner].begin):
            extent = self._taken[owner]
            if extent.begin != begin:
                self._taken[owner] = Extent(begin, extent.length)
                moves.append(Move(owner, extent.begin, begin, extent.length))
            begin += extent.length
        return moves

    def _in_order(self) -> list[Extent]:
        return sorted(self._taken.values(), key=lambda extent: (extent.begin, extent.length))
