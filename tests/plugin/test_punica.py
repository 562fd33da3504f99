"""Whose rows are whose, where vLLM's mapping and a layer's rows do not agree."""

from __future__ import annotations

import numpy as np
import torch

from lora_fs.kernels.segments import NO_SLOT, plan_rows
from lora_fs.worker_patch.worker import punica


def test_an_adapter_without_a_slot_runs_as_the_base_model() -> None:
    """vLLM's own mapping raises a KeyError there, in the engine's step."""
    plan = punica._plan((7, 7, 0, 9), {9: 1})
    assert [segment.slot for segment in plan.segments] == [1]
    assert list(plan.order) == [3]
    assert plan.rows == 4


def test_a_prompts_own_logits_are_its_adapters() -> None:
    """Told only where one adapter has every sampled row; else they are the base model's."""
    alone = punica.of_prompt(plan_rows(np.array([2])), 5)
    assert [(segment.slot, segment.rows) for segment in alone.segments] == [(2, 5)]
    for others in ([2, 3], [2, NO_SLOT]):
        assert punica.of_prompt(plan_rows(np.array(others)), 5).segments == ()


def test_a_padded_batch_and_its_beginning() -> None:
    """Rows beyond the plan are left alone; a layer that is given fewer gets those it is given."""
    plan = plan_rows(np.array([0, 1, 1, NO_SLOT]))
    y, x, same = punica._within(plan, torch.zeros(6, 2), torch.zeros(6, 3))
    assert (y.shape[0], x.shape[0], same) == (4, 4, plan)
    y, x, less = punica._within(plan, torch.zeros(2, 2), torch.zeros(2, 3))
    assert (y.shape[0], x.shape[0]) == (2, 2)
    assert [(segment.slot, segment.rows) for segment in less.segments] == [(0, 1), (1, 1)]
