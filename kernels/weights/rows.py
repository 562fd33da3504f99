"""All layers' tables for one slot as one row of numbers, so that a slot changes with one copy.

``[offsets of all layers, int64 | ends, int32 | scales, fp32]``, in units of 4 bytes; ``Tables`` says
what they mean. A row is made where its slab is made, with offsets from the slab's beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from lora_fs.kernels.weights.layout import Shape


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where a layer's numbers are in a row.

    Attributes:
        starts: for each layer, its first entry of the offsets and of the ends.
        places: for each layer, which it is.
        entries: of the offsets, and of the ends.
        length: of a row, a multiple of 8 bytes.
    """

    starts: Mapping[str, int]
    places: Mapping[str, int]
    entries: int
    length: int

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> RowLayout:
        """The layout of a model's rows: its layers in the order of ``shapes``."""
        starts = [0, *accumulate(1 + len(shape.outputs) for shape in shapes.values())]
        entries = starts[-1]
        length = (3 * entries + len(shapes) + 1) // 2 * 2
        names = {name: index for index, name in enumerate(shapes)}
        return cls(dict(zip(shapes, starts, strict=False)), names, entries, length)

    def row(self, layers: Iterable[tuple[str, list[int], list[int], float]]) -> torch.Tensor:
        """Write a row, int32 ``[length]``, of each layer's name, offsets, ends and scale."""
        offsets, ends = [0] * self.entries, [0] * self.entries
        scales = [0.0] * (self.length - 3 * self.entries)
        for name, layer_offsets, layer_ends, scale in layers:
            begin, end = self.starts[name], self.starts[name] + len(layer_ends)
            offsets[begin:end], ends[begin:end] = layer_offsets, layer_ends
            scales[self.places[name]] = scale
        return torch.cat(
            [
                torch.tensor(offsets, dtype=torch.int64).view(torch.int32),
                torch.tensor(ends, dtype=torch.int32),
                torch.tensor(scales, dtype=torch.float32).view(torch.int32),
            ]
        )

    def moved(self, row: torch.Tensor, begin: int) -> torch.Tensor:
        """A row's copy with all offsets ``begin`` further."""
        copy = row.clone()
        copy[: 2 * self.entries].view(torch.int64).add_(begin)
        return copy

    def views(
        self, rows: torch.Tensor, name: str, slices: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's offsets, ends and scales in ``rows [slots, length]``."""
        low = self.starts[name]
        high = low + 1 + slices
        scale = 3 * self.entries + self.places[name]
        return (
            rows.view(torch.int64)[:, low:high],
            rows[:, 2 * self.entries + low : 2 * self.entries + high],
            rows.view(torch.float32)[:, scale : scale + 1],
        )
