"""Whose rows are whose, where vLLM's mapping and a layer's rows do not agree."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_fs.kernels import reference
from lora_fs.kernels.cpu import compiled, grouped
from lora_fs.kernels.segments import NO_SLOT, plan_rows
from lora_fs.worker_patch.worker.ops import punica


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


def test_as_many_rows_as_are_sampled_from(wrapper: punica.OnCPU) -> None:
    """A prompt that happens to have so many is not taken for them, in any step."""
    wrapper.theirs = False
    mapping = SimpleNamespace(index_mapping=(7, 9), prompt_mapping=(7, 9))
    wrapper.update_metadata(mapping, [9, 7], 2, 100)
    for _ in range(2):  # of the second step vLLM does not tell a mapping that is the same
        wrapper.sampled_is_next = True
        assert wrapper.plan_of_logits(2) is wrapper.sampled
        assert [wrapper.plan_of_logits(rows).segments for rows in (2, 2, 1)] == [(), (), ()]


def test_a_padded_batch_and_its_beginning() -> None:
    """Rows beyond the plan are left alone; a layer that is given fewer gets those it is given."""
    plan = plan_rows(np.array([0, 1, 1, NO_SLOT]))
    y, x, same = punica._within(plan, torch.zeros(6, 2), torch.zeros(6, 3))
    assert (y.shape[0], x.shape[0], same) == (4, 4, plan)
    y, x, less = punica._within(plan, torch.zeros(2, 2), torch.zeros(2, 3))
    assert (y.shape[0], x.shape[0]) == (2, 2)
    assert [(segment.slot, segment.rows) for segment in less.segments] == [(0, 1), (1, 1)]


@pytest.fixture
def wrapper() -> punica.OnCPU:
    """With the kernels that ``auto`` chooses on a CPU."""
    made = punica.OnCPU.__new__(punica.OnCPU)
    made.ops = compiled
    return made


def test_what_is_sampled_from(wrapper: punica.OnCPU) -> None:
    """In a decode step every row is, by one plan; of a prompt its last row, by a plan of its own."""
    wrapper.theirs = False
    for prompt, rows in (((7, 9), (7, 9)), ((7, 9), (7, 7, 7, 9))):
        mapping = SimpleNamespace(index_mapping=rows, prompt_mapping=prompt)
        wrapper.update_metadata(mapping, [9, 7], 2, 100)
        assert [segment.slot for segment in wrapper.sampled.segments] == [0, 1]
        assert (wrapper.tokens.rows, wrapper.sampled.rows) == (len(rows), len(prompt))
        assert (wrapper.sampled is wrapper.tokens) == (rows == prompt)


def test_a_batch_of_one_adapter_or_none() -> None:
    """Planned without looking at its rows."""
    for ids, slots in (((9, 9), {9: 1}), ((9, 9), {}), ((0, 0), {9: 1}), ((), {9: 1})):
        plan = punica._plan(ids, slots)
        assert plan.rows == len(ids)
        assert [tuple(segment) for segment in plan.segments] == ([(1, 0, 2)] if 9 in ids and slots else [])


def test_kernels_that_compile(wrapper: punica.OnCPU) -> None:
    """They say which weights they read as they are; those that need nothing say none."""
    every = {torch.float32, torch.bfloat16, torch.float16}
    assert wrapper.prepare(torch.float32) == every
    assert wrapper.prepare(torch.bfloat16) == {torch.bfloat16}
    wrapper.ops = reference
    assert wrapper.prepare(torch.float32) == set()


def test_kernels_that_do_not_compile(
    wrapper: punica.OnCPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``auto`` serves by others and says so; what was asked for by name is an error."""

    def fail(rows: torch.dtype) -> frozenset[torch.dtype]:
        raise RuntimeError(f"LLVM knows no such processor: {rows}")

    monkeypatch.setattr(compiled, "warm_up", fail)
    monkeypatch.setenv("LORA_FS_KERNELS", "numba")
    with pytest.raises(RuntimeError, match="no such processor"):
        wrapper.prepare(torch.float32)
    monkeypatch.setenv("LORA_FS_KERNELS", "auto")
    with caplog.at_level(logging.ERROR, logger=punica.__name__):
        assert wrapper.prepare(torch.float32) == set()
    assert wrapper.ops is grouped
    assert "torch's products are used" in caplog.text


@pytest.mark.parametrize("cut", [True, False])
def test_steps_in_parts_are_refused_at_the_start(cut: bool) -> None:
    """Each part's rows would be taken for the step's first ones."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=cut))
    if not cut:
        punica.check_whole_steps(config)
        return
    with pytest.raises(ValueError, match="--enable-dbo"):
        punica.check_whole_steps(config)
