"""Where adapters land on the device before a step needs them, to fill vLLM's padded stacks from there.

One adapter is one copy from page-locked memory, on a stream of its own, which begins when a request wants the
adapter. Then one launch fills a slot. The device lets that launch wait for the copy, and the host waits for
nothing. A landed adapter stays until somebody drops it; others decide who goes for whom.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lora_fs.kernels.memory.extents import Extents, StorageFullError
from lora_fs.kernels.memory.leaving import Leaving
from lora_fs.kernels.weights.slabs import Place, Slab

KINDS_KEPT = 16


class Piece(NamedTuple):
    """A stack's part of a slab: contiguous ``[rows, columns]`` from ``offset`` on, in elements."""

    offset: int
    rows: int
    columns: int


NOTHING = Piece(0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Landed:
    """``slab`` stays while a copy of it may run; ``sources``: of its kind, on the device."""

    slab: Slab
    sources: torch.Tensor
    arrived: torch.cuda.Event | None


class Landing:
    """For one thread, whoever launches the steps.

    Args:
        stacks: each ``[slots, …, rows, columns]``, contiguous, all of one type and device.
        size_bytes: for landed adapters.
        pieces: of a slab, a piece a stack, in their order.
    """

    def __init__(
        self, stacks: Sequence[torch.Tensor], size_bytes: int, pieces: Callable[[Slab], Iterable[Piece]]
    ) -> None:
        from lora_fs.kernels.gpu.scatter import SOURCE_FIELDS, scatter  # Triton, which no CPU needs

        first = stacks[0]
        self._scatter = scatter
        self._stacks, self._pieces = stacks, pieces  # kept: kernels have their addresses
        self._pool = torch.empty(size_bytes // first.itemsize, dtype=first.dtype, device=first.device)
        self._extents = Extents(self._pool.numel())
        self._landed: dict[int, _Landed] = {}
        self._leaving = Leaving()
        # By the identity of ``places``, which adapters of a kind share; kept with it, so that it stays one.
        self._kinds: OrderedDict[int, tuple[Mapping[str, Place], torch.Tensor]] = OrderedDict()
        cuda = first.is_cuda
        self._side = torch.cuda.Stream(first.device) if cuda else None
        self._read = torch.cuda.Event() if cuda else None
        rows = [[s.data_ptr(), s.stride(0), s.shape[-2], s.shape[-1]] for s in stacks]
        self._targets = torch.tensor(rows, dtype=torch.int64).to(first.device)
        nobody = torch.zeros(len(stacks), SOURCE_FIELDS, dtype=torch.int64, device=first.device)
        for whole in (False, True):  # compiled now, and in no step; slots are all zero
            scatter(self._pool, self._targets, nobody, 0, whole=whole)

    def bring(self, slab: Slab) -> None:
        """Start to copy an adapter, unless it is there or on its way.

        Raises:
            StorageFullError: there is no gap that is large enough.
        """
        key = id(slab)
        if key in self._landed:
            return
        self._leaving.clear()
        sources, count = self._sources(slab), slab.data.numel()
        extent = self._extents.take(key, count)
        if extent is None:
            raise StorageFullError(count, self._extents.free, self._extents.size)
        target = self._pool.narrow(0, extent.begin, count)
        if self._side is None or self._read is None:
            target.copy_(slab.data)
            self._landed[key] = _Landed(slab, sources, None)
            return
        with torch.cuda.stream(self._side):
            # A step that is still to run may fill a slot from what stood here before.
            self._side.wait_event(self._read)
            target.copy_(slab.data, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._side)
        self._landed[key] = _Landed(slab, sources, arrived)

    def fill(self, slot: int, slab: Slab, *, whole: bool) -> None:
        """Fill a slot, in launch order; waits for nothing.

        Args:
            whole: zero what this adapter does not write.
        Raises:
            StorageFullError: as ``bring``.
        """
        self.bring(slab)
        landed = self._landed[id(slab)]
        if landed.arrived is not None:
            torch.cuda.current_stream(self._pool.device).wait_event(landed.arrived)
        extent = self._extents[id(slab)]
        block = self._pool.narrow(0, extent.begin, extent.length)
        self._scatter(block, self._targets, landed.sources, slot, whole=whole)
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._pool.device))

    def drop(self, slab: Slab) -> None:
        """Drop an adapter, if it is there; slots filled from it stay filled."""
        landed = self._landed.pop(id(slab), None)
        if landed is not None:
            self._leaving.add(slab, landed.arrived)
            self._extents.release(id(slab))

    def lose(self) -> None:
        """Forget all, after the device lost its memory; addresses are as before."""
        for landed in list(self._landed.values()):
            self.drop(landed.slab)
        self._kinds.clear()
        rows = [[s.data_ptr(), s.stride(0), s.shape[-2], s.shape[-1]] for s in self._stacks]
        self._targets.copy_(torch.tensor(rows, dtype=torch.int64))

    def _sources(self, slab: Slab) -> torch.Tensor:
        """A kind's pieces on the device: copied for its first adapter, and shared by the others."""
        key = id(slab.places)
        if key in self._kinds:
            self._kinds.move_to_end(key)
        else:
            table = torch.tensor([*self._pieces(slab)], dtype=torch.int64)
            table = table.pin_memory() if self._pool.is_cuda else table
            self._kinds[key] = (slab.places, table.to(self._pool.device, non_blocking=True))
            while len(self._kinds) > KINDS_KEPT:
                self._kinds.popitem(last=False)
        return self._kinds[key][1]
