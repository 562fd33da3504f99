"""What a tensor-parallel rank reserves for an adapter is what its share takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_fs.worker_patch.worker.load.resident import size_bytes
from lora_fs.worker_patch.worker.slots.shares import Part, Shares
from tests.plugin.block import RANK, WHOLE, Make, Model, adapter, packed
from tests.plugin.test_room import Files, load, worker

FEW = {name: WHOLE[name] for name in ("q_proj", "v_proj")}
ALIGNED = 128  # bytes, of each matrix


@pytest.mark.parametrize("sizes", [WHOLE, FEW, {"o_proj": WHOLE["o_proj"]}], ids=["all", "qv", "o"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_share_is_known_before_it_is_read(
    make: Make, sizes: dict[str, tuple[int, int]], rank: int, size: int
) -> None:
    """To the byte, but for what aligns matrices; also where ranks outnumber the heads of k and v."""
    manager = make("torch", rank, size, model=lambda: Model(embedding=False))
    files = sum(RANK * (inputs + outputs) * 4 for inputs, outputs in sizes.values()) + 1000
    told = manager.shares.size_bytes(files, list(sizes), RANK, 4)
    taken = size_bytes(packed(manager, adapter(1, sizes)))
    assert 0 <= taken - told <= 2 * len(sizes) * ALIGNED
    by_files = manager.shares.size_bytes(files, list(sizes), 0, 4)
    assert told <= by_files <= told + 1000


def test_what_is_unknown_is_counted_whole() -> None:
    """A name that no layer has, and a list that is too long to be sent."""
    shares = Shares({"model.layers.0.self_attn.q_proj": Part(3, 4)})
    assert shares.size_bytes(100, [], 8, 2) == 100
    assert shares.size_bytes(100, ["proj"], 8, 2) == 100
    assert shares.size_bytes(100, ["q_proj"], 0, 2) == 75
    assert shares.size_bytes(100, ["self_attn.q_proj", "k_proj"], 8, 2) == 48
    for number in range(200):
        assert shares.size_bytes(100, [f"other{number}"], 0, 2) == 100


def test_an_adapter_of_layers_that_stay_vllms_is_counted_whole(make: Make) -> None:
    """Here an embedding's: nobody knows what a rank's share of it takes."""
    assert make("off").shares.parts == {}
    assert make("torch").shares.parts.keys() >= WHOLE.keys()


def test_a_budget_that_has_room_for_the_share_alone(make: Make, tmp_path: Path) -> None:
    """Of two ranks: the whole adapter would not fit in either's budget, and is refused by none."""
    files = Files(tmp_path / "support")
    budget = files.size_bytes * 3 // 4
    manager = worker(make, budget, torch.float32, rank=1, size=2)
    answer = load(manager, files, rank=8, target_modules=list(WHOLE))
    assert answer == {"state": "ready", "reason": ""}
    assert manager.tiers.used_bytes <= budget
