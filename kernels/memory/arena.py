"""Every loaded adapter's weights in one storage on the device, none padded to a largest rank.

A load copies one slab, and neither packs, scales nor zeroes anything on the device. On CUDA a
stream of its own copies it, beside the steps. Showing an adapter in a slot copies one row of a table, and the
later steps see the adapter: more adapters stay here than there are slots. Not for several threads:
the thread that launches the steps owns it. Others decide which adapters stay and which have a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lora_fs.kernels.memory.extents import Extents, Move
from lora_fs.kernels.memory.leaving import Leaving
from lora_fs.kernels.weights.layout import Packed, Shape
from lora_fs.kernels.weights.rows import RowLayout
from lora_fs.kernels.weights.slabs import Slab, packed_at
from lora_fs.kernels.weights.tables import DeviceLayer, Tables, column_table, rows_aligned

# An adapter moves in pieces of this size.
BOUNCE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Placed:
    """The data to show an adapter, made when its copy began.

    ``slab``: in host memory, kept while the adapter is here. ``arrived``: the event after its copy.
    """

    slab: Slab
    row: torch.Tensor
    views: Mapping[str, Packed | None]
    arrived: torch.cuda.Event | None


class Arena:
    """The storage, and a layer for each of the model's.

    Args:
        shapes: of every layer, by name.
        slots: how many adapters a batch has at most.
        size_bytes: of the storage.
        max_rank: the largest rank that a slice may have: bounds scratch space, pads nothing.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        slots: int,
        size_bytes: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.shapes = dict(shapes)
        self.max_rank = max_rank
        self._storage = torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=self.device)
        self._extents = Extents(self._storage.numel())
        self._placed: dict[int, _Placed] = {}
        self._shown: dict[int, int] = {}  # slot → owner
        self._leaving = Leaving()
        cuda = self.device.type == "cuda"
        self._side = torch.cuda.Stream(self.device) if cuda else None
        self._freed = torch.cuda.Event() if cuda else None
        self._layout = RowLayout.of(self.shapes)
        self._rows = torch.zeros(slots, self._layout.length, dtype=torch.int32, device=self.device)
        # Rows on their way: as many as two steps may show.
        self._sent = [
            torch.empty(self._layout.length, dtype=torch.int32, pin_memory=cuda) for _ in range(2 * slots)
        ]
        self._copied = [torch.cuda.Event() if cuda else None for _ in self._sent]
        self._turn = 0
        self.layers = {
            name: DeviceLayer(shape, [None] * slots, tables=self._tables(name, shape))
            for name, shape in self.shapes.items()
        }

    def layer(self, name: str) -> DeviceLayer:
        """A layer, whose contents follow the loads and frees."""
        return self.layers[name]

    def load(self, slot: int, slab: Slab) -> None:
        """Load an adapter that has its slot's number; the steps launched from now on see it."""
        self.begin(slot, slab)
        self.show(slot, slot)

    def begin(self, owner: int, slab: Slab) -> None:
        """Start to copy an adapter; no step sees it before ``show``.

        Raises:
            StorageFullError: it does not fit beside the loaded ones; says how much is free.
            ValueError: the owner has one already, a rank is above ``max_rank``, or type or model are others.
        """
        if slab.data.dtype != self._storage.dtype:
            raise ValueError(f"a slab of {slab.data.dtype} for an arena of {self._storage.dtype}")
        highest = max((rank for place in slab.places.values() for rank in place.ranks), default=0)
        if highest > self.max_rank:
            raise ValueError(f"a rank of {highest}, where {self.max_rank} is the largest")
        if len(slab.row) != self._layout.length:
            raise ValueError("a slab that was packed for another model")
        self._leaving.clear()
        extent = self._extents.take(owner, slab.data.numel())
        if extent is None:
            self.compact()
            extent = self._extents.take(owner, slab.data.numel())
            assert extent is not None, "compaction leaves one gap of all that is free"
        arrived = None if self._side is None else torch.cuda.Event()
        try:
            placed = self._place(owner, slab, arrived)
        except Exception:  # no memory for its row
            self._extents.release(owner)
            raise
        target = self._storage.narrow(0, extent.begin, extent.length)
        if self._side is None or self._freed is None or arrived is None:
            target.copy_(slab.data)
        else:
            with torch.cuda.stream(self._side):
                # Steps that are still to run may read what stood here before.
                self._side.wait_event(self._freed)
                target.copy_(slab.data, non_blocking=True)
                arrived.record(self._side)
        self._placed[owner] = placed

    def show(self, slot: int, owner: int) -> None:
        """Let the steps launched from now on see an adapter in a slot: writes one row of the tables.

        They come after its copy; the host waits for nothing.
        """
        placed = self._placed[owner]
        if placed.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(placed.arrived)
        if self._side is None:
            for name, layer in self.layers.items():
                layer.see(slot, placed.views.get(name))
        self._send(slot, placed.row)
        self._shown[slot] = owner

    def _send(self, slot: int, row: torch.Tensor) -> None:
        """Copy a row to the device from page-locked memory, which every row shares with others."""
        host, copied = self._sent[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # two steps ago
        host.numpy()[:] = row.numpy()
        self._rows[slot].copy_(host, non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self.device))
        self._turn = (self._turn + 1) % len(self._sent)

    def hide(self, slot: int) -> None:
        """Empty a slot; who was there stays.

        Its row of the tables stays on the device, where there may be no memory to write to while an engine
        sleeps. So a plan must not name an empty slot, and the next adapter there writes the whole row.
        """
        if self._shown.pop(slot, None) is not None:
            for layer in self.layers.values():
                layer.see(slot, None)

    def free(self, owner: int) -> None:
        """Let an adapter go, loaded or on its way; steps already launched still see it."""
        for slot in [slot for slot, shown in self._shown.items() if shown == owner]:
            self.hide(slot)
        placed = self._placed.pop(owner)
        self._leaving.add(placed.slab, placed.arrived)
        self._extents.release(owner)
        self._mark_freed()

    def restore(self) -> None:
        """Write the parts again that are written only once, after the device lost its memory. The owner
        loads the adapters again.
        """
        for name, layer in self.layers.items():
            layer.tables.columns.copy_(column_table(self.shapes[name], self.device))

    def compact(self) -> None:
        """Move the adapters together, on the device, between two steps."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        # Before anything moves: there may be no memory for it.
        bounce = torch.empty_like(self._storage[: BOUNCE_BYTES // self._storage.itemsize])
        for move in self._extents.compact():
            self._move(move, bounce)
            placed = self._placed[move.owner]
            self._placed[move.owner] = self._place(move.owner, placed.slab, placed.arrived)
        for slot, owner in list(self._shown.items()):
            self.show(slot, owner)
        self._mark_freed()

    def _mark_freed(self) -> None:
        if self._freed is not None:
            self._freed.record(torch.cuda.current_stream(self.device))

    def _move(self, move: Move, bounce: torch.Tensor) -> None:
        """Copy an adapter through a buffer, since it may overlap its target; one stream keeps the order."""
        for done in range(0, move.length, len(bounce)):
            count = min(len(bounce), move.length - done)
            source = self._storage.narrow(0, move.source + done, count)
            self._storage.narrow(0, move.target + done, count).copy_(bounce[:count].copy_(source))

    def _place(self, owner: int, slab: Slab, arrived: torch.cuda.Event | None) -> _Placed:
        """The parts of an adapter that depend on its place."""
        begin = self._extents[owner].begin
        row = self._layout.moved(slab.row, begin)
        views = {}
        if self._side is None:
            # A GPU's kernels read the tables alone; a view of each matrix takes milliseconds to make.
            views = {
                name: packed_at(self.shapes[name], place, self._storage, begin)
                for name, place in slab.places.items()
            }
        return _Placed(slab, row, views, arrived)

    def _tables(self, name: str, shape: Shape) -> Tables:
        offsets, ends, scales = self._layout.views(self._rows, name, len(shape.outputs))
        return Tables(
            weights=self._storage,
            offsets=offsets,
            ends=ends,
            scales=scales,
            columns=column_table(shape, self.device),
            capacity=len(shape.outputs) * self.max_rank,
            aligned=rows_aligned(shape, self._storage.itemsize),
        )
