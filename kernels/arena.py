"""Every loaded adapter's weights in one storage on the device, none padded to a largest rank.

Loading copies one slab and one row of a table; nothing is packed, scaled or zeroed on the device.
On CUDA the slab is copied by a stream of its own, beside the steps; committing makes the steps
that come after it see the adapter. Not for several threads: its owner is who launches the steps.
Which adapter has which slot is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lora_fs.kernels.extents import Extents, Move
from lora_fs.kernels.layout import Shape
from lora_fs.kernels.rows import RowLayout
from lora_fs.kernels.slabs import ALIGN_BYTES, Slab, packed_at
from lora_fs.kernels.tables import DeviceLayer, Tables, column_table, rows_aligned

# An adapter that moves onto itself is copied in pieces through a buffer of this size.
BOUNCE_BYTES = 16 << 20
# Of what is loaded only the places are kept.
NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Transfer:
    """An adapter on its way to the device. Keeps the slab alive until it has arrived."""

    slot: int
    slab: Slab
    arrived: torch.cuda.Event | None

    def ready(self) -> bool:
        """Whether committing would let the device wait for nothing."""
        return self.arrived is None or bool(self.arrived.query())


class Arena:
    """The storage, and a layer for each of the model's.

    Args:
        shapes: of every layer, by name.
        slots: how many adapters at most.
        size_bytes: of the storage; rounded down to a multiple of ``ALIGN_BYTES``.
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
        self._storage = torch.empty(
            size_bytes // ALIGN_BYTES * ALIGN_BYTES // dtype.itemsize, dtype=dtype, device=self.device
        )
        self._extents = Extents(self._storage.numel())
        self._loaded: dict[int, Slab] = {}
        self._coming: dict[int, Transfer] = {}
        cuda = self.device.type == "cuda"
        self._side = torch.cuda.Stream(self.device) if cuda else None
        self._freed = torch.cuda.Event() if cuda else None
        self._layout = RowLayout.of(self.shapes)
        self._rows = torch.zeros(slots, self._layout.length, dtype=torch.int32, device=self.device)
        self.layers = {
            name: DeviceLayer(shape, [None] * slots, tables=self._tables(name, shape))
            for name, shape in self.shapes.items()
        }

    @property
    def free_bytes(self) -> int:
        return self._extents.free * int(self._storage.itemsize)

    def layer(self, name: str) -> DeviceLayer:
        """A layer, whose contents follow what is loaded and freed."""
        return self.layers[name]

    def load(self, slot: int, slab: Slab) -> None:
        """Load an adapter; the steps launched from now on see it."""
        self.commit(self.begin(slot, slab))

    def begin(self, slot: int, slab: Slab) -> Transfer:
        """Start to copy an adapter to an empty slot; no step sees it before ``commit``.

        Raises:
            StorageFullError: it does not fit beside what is loaded; says how much is free.
            ValueError: the slot is taken, a rank is above ``max_rank``, or type or model are others.
        """
        if slab.data.dtype != self._storage.dtype:
            raise ValueError(f"a slab of {slab.data.dtype} for an arena of {self._storage.dtype}")
        highest = max((rank for place in slab.places.values() for rank in place.ranks), default=0)
        if highest > self.max_rank:
            raise ValueError(f"a rank of {highest}, where {self.max_rank} is the largest")
        if len(slab.row) != self._layout.length:
            raise ValueError("a slab that was packed for another model")
        extent = self._extents.take(slot, slab.data.numel())
        if extent is None:
            self.compact()
            extent = self._extents.take(slot, slab.data.numel())
            assert extent is not None, "compaction leaves one gap of all that is free"
        target = self._storage.narrow(0, extent.begin, extent.length)
        arrived = None
        if self._side is None or self._freed is None:
            target.copy_(slab.data)
        else:
            arrived = torch.cuda.Event()
            with torch.cuda.stream(self._side):
                # Steps that are still to run may read what stood here before.
                self._side.wait_event(self._freed)
                target.copy_(slab.data, non_blocking=True)
                arrived.record(self._side)
        self._coming[slot] = Transfer(slot, slab, arrived)
        return self._coming[slot]

    def commit(self, transfer: Transfer) -> None:
        """Let the steps launched from now on see an adapter; the host waits for nothing."""
        if self._coming.pop(transfer.slot, None) is not transfer:
            raise ValueError(f"nothing is on its way to slot {transfer.slot}")
        if transfer.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(transfer.arrived)
        self._loaded[transfer.slot] = replace(transfer.slab, data=NOTHING)
        self._publish(transfer.slot)

    def free(self, slot: int) -> None:
        """Empty a slot, loaded or on its way; steps already launched still see it.

        Its row of the tables stays on the device, where there may be no memory to write to while an engine
        sleeps: a plan must not name an empty slot, and who is loaded there next writes the whole row.
        """
        self._coming.pop(slot, None)
        self._extents.release(slot)
        if self._loaded.pop(slot, None) is not None:
            for layer in self.layers.values():
                layer.put(slot, None)
        self._mark_freed()

    def restore(self) -> None:
        """Write again what is written only once, after the device lost its memory; what was loaded is
        loaded again by its owner.
        """
        for name, layer in self.layers.items():
            layer.tables.columns.copy_(column_table(self.shapes[name], self.device))

    def compact(self) -> None:
        """Move the adapters together, on the device, between two steps."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        moves = self._extents.compact()
        for move in moves:
            self._move(move)
            if move.owner in self._loaded:
                self._publish(move.owner)
        self._mark_freed()

    def _mark_freed(self) -> None:
        if self._freed is not None:
            self._freed.record(torch.cuda.current_stream(self.device))

    def _move(self, move: Move) -> None:
        step = move.source - move.target
        piece = move.length if step >= move.length else BOUNCE_BYTES // self._storage.itemsize
        for done in range(0, move.length, piece):
            count = min(piece, move.length - done)
            source = self._storage.narrow(0, move.source + done, count)
            # A piece that overlaps its target goes through a buffer; one stream keeps the order.
            pending = source if step >= count else source.clone()
            self._storage.narrow(0, move.target + done, count).copy_(pending)

    def _publish(self, slot: int) -> None:
        """Bring a loaded slot's row of the tables and its views up to date."""
        begin, loaded = self._extents[slot].begin, self._loaded[slot]
        for name, layer in self.layers.items():
            place = loaded.places.get(name)
            layer.put(slot, None if place is None else packed_at(layer.shape, place, self._storage, begin))
        row = self._layout.moved(loaded.row, begin)
        # Pinned memory that is dropped is not given out again before the copy is done.
        self._rows[slot].copy_(row.pin_memory() if self._rows.is_cuda else row, non_blocking=True)

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
