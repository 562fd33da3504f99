"""A slot is filled bit for bit, whether its rows are whole vectors or not, and no other slot is touched."""

from __future__ import annotations

import pytest
import torch

from lora_fs.kernels.gpu.scatter import scatter
from tests.ops.gpu.conftest import DEVICE

SLOTS = 3
# Rows and columns of a slot, of which the adapter has these; where its part begins.
CASES = {
    "vectors": ((16, 64), (8, 64), 128),
    "a rank of whole vectors": ((48, 32), (48, 16), 64),
    "a rank that is none": ((48, 32), (48, 4), 64),
    "a stack that is none": ((48, 12), (48, 8), 64),
    "a part that begins between": ((16, 64), (8, 64), 3),
    "more than one block": ((40, 256), (33, 248), 8),
    "nothing": ((16, 64), (0, 0), 0),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_slot_is_filled(case: str, dtype: torch.dtype, whole: bool) -> None:
    """Beside a stack that begins between vectors, whose rows are moved one by one."""
    size, live, offset = CASES[case]
    block = torch.randn(offset + live[0] * live[1] + 8, device=DEVICE).to(dtype)
    memory = torch.full((2, SLOTS * size[0] * size[1] + 1), torch.nan, dtype=dtype, device=DEVICE)
    stacks = [memory[0, :-1].view(SLOTS, *size), memory[1, 1:].view(SLOTS, *size)]
    rows = [[stack.data_ptr(), stack.stride(0), *size] for stack in stacks]
    wanted = memory.clone()
    for one in (wanted[0, :-1].view(SLOTS, *size), wanted[1, 1:].view(SLOTS, *size)):
        if whole:
            one[1] = 0
        one[1, : live[0], : live[1]] = block[offset : offset + live[0] * live[1]].view(live)
    targets = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
    sources = torch.tensor([[offset, *live]] * 2, dtype=torch.int64, device=DEVICE)
    scatter(block, targets, sources, 1, whole=whole)
    assert torch.equal(memory.view(torch.uint8), wanted.view(torch.uint8))
