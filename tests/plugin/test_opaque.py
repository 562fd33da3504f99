"""The operations of a compiled model: what needs no kernel. ``opaque_interpreted`` has the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lora_fs.kernels.gpu.plan import FEWEST_ROWS, LARGE_ROWS, SMALL_ROWS, tile_rows, tiles_of
from lora_fs.kernels.segments import plan_rows
from tests.plugin.block import Make


@pytest.mark.parametrize("capacity", [1, SMALL_ROWS, SMALL_ROWS + 1, LARGE_ROWS - 1, LARGE_ROWS, 1 << 14])
def test_tiles_that_batches_may_get(capacity: int) -> None:
    """All that ``tile_rows`` gives of any batch, and no others."""
    most = {tile_rows(plan_rows(np.zeros(rows, dtype=np.int64)), rows) for rows in {1, SMALL_ROWS, capacity}}
    given = {
        tile_rows(plan_rows(np.zeros(rows, dtype=np.int64)), rows)
        for rows in (SMALL_ROWS + 1, LARGE_ROWS - 1, LARGE_ROWS)
        if rows <= capacity
    }
    assert set(tiles_of(capacity, SMALL_ROWS)) == most | given | {FEWEST_ROWS}


@pytest.mark.parametrize(("ids", "names"), [((0, 0), False), ((0, 7), True), ((9, 9), True), ((), False)])
def test_who_is_named(make: Make, ids: tuple[int, ...], names: bool) -> None:
    """Also an adapter without a slot, as where a graph is captured before any has one."""
    wrapper: Any = make("triton").punica_wrapper_mapping["language_model"]
    wrapper.theirs = False
    mapping = SimpleNamespace(index_mapping=ids, prompt_mapping=ids)
    wrapper.update_metadata(mapping, [7, None, None], 3, 100)
    assert wrapper.named is names
