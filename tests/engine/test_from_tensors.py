"""Reinforcement learning: a program trains an adapter, and its own vLLM serves every step's from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from tests.engine.rounding import near
from tests.engine.scripts import run_script


def test_each_steps_answers_are_pefts(farm: EngineFarm, model_dir: Path, tmp_path: Path) -> None:
    """Also of the step before, until it is unloaded; no registry is there.

    A folder that is written again is read again by ``load_inplace``. For one that is missing the base model
    answers, and the adapter once the folder is there.
    """
    seen = run_script(farm, "in-process", "in_process.py", model_dir, str(tmp_path), env=PLUGIN_ENV)
    earlier = None
    for step in seen["steps"]:
        assert step["vllm"] == near(step["peft"])
        assert step["in place"] == near(step["peft"])
        if earlier is not None:
            assert step["earlier"] == near(earlier)
            assert step["vllm"] != pytest.approx(earlier, abs=0.01)
        assert step["vllm"] != pytest.approx(seen["base"], abs=0.01)
        earlier = step["peft"]
    late = seen["late"]
    assert late["before"] == near(seen["base"])
    assert late["after"] == near(late["peft"])
