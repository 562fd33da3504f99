"""Ranks and scales by module: the engine compiles each expression of an adapter once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.peft_helper import PEFTHelper

from lora_fs.worker_patch.worker.load import patterns

VLLMS = getattr(PEFTHelper, "_match_pattern", None)  # as this process has it before any hook
LAYERS = range(80)
PARTS = [f"self_attn.{part}_proj" for part in "qkvo"] + [
    f"mlp.{part}_proj" for part in ("gate", "up", "down")
]
MODULES = [f"model.layers.{layer}.{part}" for layer in LAYERS for part in PARTS]
WORDS = st.sampled_from(["q_proj", "v_proj", "self_attn", "layers", r"\d+", "[0-3]", ".*", "3", "(q|v)_proj"])
KEYS = st.lists(WORDS, min_size=1, max_size=4).map(r"\.".join)
NAMES = st.sampled_from([*MODULES[:40], "q_proj", "xq_proj", "model.layers.3.self_attn.q_proj.3"])


SINCE = pytest.mark.since("0.32", "rank_pattern and alpha_pattern are ignored before it, and refused")


@SINCE
@given(st.dictionaries(KEYS, st.integers(1, 64), max_size=6), NAMES)
def test_a_module_has_the_value_that_vllm_gives_it(pattern: dict[str, int], name: str) -> None:
    """The first key that matches wins, none gives none."""
    assert VLLMS is not None
    assert patterns.match(pattern, name) == VLLMS(pattern, name)


@SINCE
def test_each_key_of_a_large_model_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a rank for each module of 80 layers: 560 keys, and vLLM's library keeps 500 compiled."""
    assert VLLMS is not None
    monkeypatch.setattr(PEFTHelper, "_match_pattern", staticmethod(VLLMS))
    patterns.keep_compiled()
    patterns._compiled.cache_clear()
    ranks = {module: 1 + at % 8 for at, module in enumerate(MODULES)}
    config = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj"], "rank_pattern": ranks}
    helper = PEFTHelper.from_dict(config)
    assert {module: helper.get_rank_and_scaling(module)[0] for module in MODULES} == ranks
    assert patterns._compiled.cache_info().misses == len(MODULES)


def test_a_vllm_that_ignores_patterns_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.32 there is nothing to replace."""
    monkeypatch.delattr(PEFTHelper, "_match_pattern", raising=False)
    patterns.keep_compiled()
    assert not hasattr(PEFTHelper, "_match_pattern")
